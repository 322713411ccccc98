"""Train a language model as a configuration says, and go on where an earlier run with the same run_dir stopped.

    mesh-mpi launch -n 4 -- train runs/quickstart.yaml
    mesh-mpi launch -n 4 -- train runs/quickstart.yaml train.steps=500 run_dir=runs/longer
    srun --mpi=pmi2 mesh-mpi train my.yaml                  under Slurm; SIGUSR1 saves and ends with code 85

Ctrl-C saves and ends with code 85 too; a second one ends at once. Without a launcher the ranks of the mesh are simulated in this process.
Another mesh_shape or layout may go on with the run. run_dir (default: runs/NAME, by the configuration's name) takes
metrics.jsonl, checkpoints, config.resolved.yaml and environment.txt. In the log, "of products' rate" is the step's flops against what matrix
products alone reach on these ranks, and communication includes waiting for the slowest rank. Exit codes: 0 done, 2 bad input, 85 saved on request, other: failure.
"""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``mesh-mpi train``."""
    parser.add_argument("config", metavar="CONFIG", help="a YAML file, here or one that comes with the package")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="set a key of the configuration, dotted: train.steps=10")


def run(arguments: argparse.Namespace) -> int:
    """Train; return the exit code."""
    from mesh_mpi.training.stop import StopRequest

    with StopRequest() as stop:  # before what takes time: from here on a signal saves
        return _train(arguments, stop)


def _train(arguments: argparse.Namespace, stop) -> int:
    from mesh_mpi.config import load
    from mesh_mpi.log import say

    config = load(arguments.config, arguments.overrides)
    if config.run_dir is None:
        config = load(arguments.config, [*arguments.overrides, f"run_dir=runs/{Path(arguments.config).stem}"])
    from mesh_mpi.training.loop import train

    outcome = train(config, stop)
    if outcome.code == 0 and not config.data.is_packed:
        say(f"done: {outcome.step} steps on random numbers. Give data.train a token file (mesh-mpi prepare) or bundled:sotu to learn from a text.")
    elif outcome.code == 0:
        say(f"done: {outcome.step} steps. The checkpoint is {outcome.checkpoint}\n"
            f"next:  mesh-mpi inspect {outcome.checkpoint}\n"
            f"       mesh-mpi evaluate {config.run_dir}{'' if config.data.valid else ' --data FILE.h5'}\n"
            f"       mesh-mpi generate {config.run_dir} --temperature 0.7\n"
            f"       mesh-mpi plot {config.run_dir}          (needs matplotlib, the extra plot)")
    return outcome.code

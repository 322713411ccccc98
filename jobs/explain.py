"""Print the SPMD programs of a configuration: kernels, collectives with their bytes, peak memory.

    mesh-mpi explain runs/bench_lm.yaml
    mesh-mpi explain models/lm_n16.yaml --summary           512 ranks, planned in this one process
    mesh-mpi explain runs/bench_lm.yaml mesh_shape="data:1;model:2"

Needs neither MPI nor data: the programs are compiled for the mesh of the configuration, whatever its size.
"""

from __future__ import annotations

import argparse


ONE_PROCESS = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``mesh-mpi explain``."""
    parser.add_argument("config", metavar="CONFIG", help="a YAML file, here or one that comes with the package")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="set a key of the configuration, dotted: train.steps=10")
    parser.add_argument("--summary", action="store_true", help="totals only, without the instructions")


def run(arguments: argparse.Namespace) -> int:
    """Print every program of the configuration, or its totals."""
    from mesh_mpi.config import load

    config = load(arguments.config, arguments.overrides)
    from mesh_mpi.training.step import build  # after the configuration: its errors need no compiler

    for program in build(config).programs:
        print(program.summary() if arguments.summary else program.listing())
    return 0

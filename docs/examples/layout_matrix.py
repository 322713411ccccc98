"""Layout invariance: one small Transformer, trained with Adam and dropout under many layouts, gives one sequence of losses.

    python docs/examples/layout_matrix.py              7 layouts x 3 numbers of microbatches, 20 steps, float32 and float64
    python docs/examples/layout_matrix.py --quick      6 layouts, 5 steps, both element types
    mesh-mpi launch -n 4 -- docs/examples/layout_matrix.py      the meshes of four ranks, on MPI

Prints a table of the largest relative difference of losses from those of one rank. Bounds: float32, 1e-6 at the first loss and 2e-5
at any; float64, 1e-12. Initial parameters must be the same to the bit. Exits with 1 if something is beyond its bound. Without a launcher all ranks are simulated in this
process; under one, the meshes of as many ranks as there are run on MPI, and the one rank to compare with is simulated on each.
"""

from __future__ import annotations

import argparse
import sys
from typing import NamedTuple

import numpy as np

import mesh_mpi as mm
from mesh_mpi.config import parse
from mesh_mpi.log import is_speaker, launcher_size
from mesh_mpi.mesh import Mesh
from mesh_mpi.runtime.machine import choose_machine
from mesh_mpi.runtime.simulated import SimulatedMachine
from mesh_mpi.training.batches import ByteBatches
from mesh_mpi.training.step import build

LAYOUT = "batch:data;d_ff:model;heads:model;vocab:model"
MESHES = ("", "data:2", "data:4", "model:2", "model:4", "data:2;model:2", "model:2;data:2")
QUICK = (("data:2", 1), ("model:2", 1), ("data:2;model:2", 1), ("model:4", 1), ("data:2", 2), ("model:2;data:2", 4))
BOUNDS = {"float32": (1e-6, 2e-5), "float64": (1e-12, 1e-12)}  # relative differences of the first loss, and of any


class Run(NamedTuple):
    """The losses of a run and the initial values of its parameters by name."""

    losses: np.ndarray
    initial: dict[str, np.ndarray]


def configuration(mesh_shape: str, microbatches: int, float_type: str) -> dict:
    """Return the configuration of one run; the layout keeps the rules whose axis the mesh has."""
    rules = ";".join(rule for rule in LAYOUT.split(";") if rule.split(":")[1] in Mesh(mesh_shape).names)
    return {
        "mesh_shape": mesh_shape, "layout": rules, "sequences_per_batch": 16, "float_type": float_type,
        "model": {"d_model": 32, "d_ff": 64, "heads": 4, "d_kv": 8, "layers": 2, "vocab_size": 61, "vocab_multiple": 32, "length": 16, "dropout": 0.1},
        "optimizer": {"name": "adam", "beta2": 0.98, "eps": 1e-6, "clip_norm": 1.0},
        "schedule": {"name": "linear_warmup", "learning_rate": 3e-3, "warmup_steps": 5},
        "train": {"steps": 100, "microbatches": microbatches},
    }


def run(mesh_shape: str, microbatches: int, float_type: str, n_steps: int) -> Run:
    """Train ``n_steps`` steps on this process's machine; one rank is always simulated."""
    config = parse(configuration(mesh_shape, microbatches, float_type))
    training = build(config)
    state = mm.State(training.programs, seed=config.seed, machine=choose_machine(Mesh(mesh_shape)) if mesh_shape else SimulatedMachine(Mesh("")))
    initial = {name: state.read(name) for name, b in state.variables.items() if b.variable.trainable}
    data = np.random.default_rng(1).integers(0, 61, 20_000).astype(np.uint8)
    data[1::2] = data[::2] // 2  # something to learn
    batches = ByteBatches(data, config.model.length, config.n_sequences, config.seed)
    losses = [training.run_step(state, step, batches.feeds(step)).loss for step in range(1, n_steps + 1)]
    return Run(np.array(losses), initial)


def compare(this: Run, reference: Run) -> tuple[float, float, bool]:
    """Return the relative difference of the first loss, the largest of any, and whether the initial parameters are the same bits."""
    differences = np.abs(this.losses - reference.losses) / np.abs(reference.losses)
    same = this.initial.keys() == reference.initial.keys() and all(
        np.array_equal(a.view(np.uint8), reference.initial[name].view(np.uint8)) for name, a in this.initial.items())
    return float(differences[0]), float(differences.max()), same


def report(text: str) -> None:
    """Print a line, on one rank only."""
    if is_speaker():
        print(text, flush=True)


def main() -> int:
    """Run the matrix, print the table, return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="6 layouts, 5 steps")
    parser.add_argument("--steps", type=int, metavar="N", help="steps of each run (default 20; 5 with --quick)")
    arguments = parser.parse_args()
    n_steps = arguments.steps or (5 if arguments.quick else 20)
    cases = QUICK if arguments.quick else tuple((m, k) for m in MESHES for k in (1, 2, 4) if (m, k) != ("", 1))
    size = launcher_size()
    if size is not None:
        cases = tuple((m, k) for m, k in cases if Mesh(m).size == size)
    failed = 0
    report(f"{n_steps} steps; differences from one rank with one microbatch, relative\n{'mesh':16} {'microbatches':>12} "
          f"{'type':>8} {'first loss':>11} {'any loss':>11} {'initial':>8}")
    for float_type, (first_bound, bound) in BOUNDS.items():
        reference = run("", 1, float_type, n_steps)
        for mesh_shape, microbatches in cases:
            first, largest, same = compare(run(mesh_shape, microbatches, float_type, n_steps), reference)
            good = first <= first_bound and largest <= bound and same
            failed += not good
            report(f"{mesh_shape or '1 rank':16} {microbatches:>12} {float_type:>8} {first:>11.1e} {largest:>11.1e} {'same' if same else 'DIFFER':>8}"
                  + ("" if good else "  beyond its bound"))
        report(f"{float_type}: loss {reference.losses[0]:.4f} -> {reference.losses[-1]:.4f}; bounds {first_bound:g} and {bound:g}")
    report(f"{failed} of {len(BOUNDS) * len(cases)} beyond their bounds" if failed else "all within their bounds")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

"""A small language model with Adam, for tests of checkpoints: many variables, split and whole, slots placed by rules of their own."""

from __future__ import annotations

import os
from pathlib import Path

import h5py
import numpy as np
from mpi_runner import ROOT

import mesh_mpi as mm
from mesh_mpi.config import parse
from mesh_mpi.mesh import Mesh
from mesh_mpi.runtime.simulated import SimulatedMachine
from mesh_mpi.training.batches import ByteBatches
from mesh_mpi.training.step import build

PATH = {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]))}
LAYOUT = "batch:data;d_ff:model;heads:model;vocab:model"
SEED = 5
TEXT = "mesh_shape: a\n# a comment: ä\n"
COUNTERS = {"rows_consumed": 24, "tokens": 384, "best_loss": 2.5}


def training(mesh_shape: str = "", zero_1: bool = False, **changes):
    """Build the model for a mesh; ``changes``: float_type, vocab_multiple."""
    names = Mesh(mesh_shape).names
    return build(parse({
        "mesh_shape": mesh_shape, "layout": ";".join(r for r in LAYOUT.split(";") if r.split(":")[1] in names), "sequences_per_batch": 8,
        "float_type": changes.get("float_type", "float32"), **({"storage": {"optimizer": "d_model:data"}} if zero_1 else {}),
        "model": {"d_model": 16, "d_ff": 32, "heads": 4, "d_kv": 4, "layers": 1, "vocab_size": 61, "length": 16, "dropout": 0.1,
                  "vocab_multiple": changes.get("vocab_multiple", 32)},
        "optimizer": {"name": "adam", "beta2": 0.98}, "schedule": {"name": "constant", "learning_rate": 3e-3}, "train": {"steps": 10}}))


def run(train, state, first: int, last: int) -> list[float]:
    """Take steps ``first`` to ``last`` and return their losses."""
    batches = ByteBatches(np.arange(2000, dtype=np.uint8) % 61, 16, 8, SEED)
    return [train.run_step(state, step, batches.feeds(step)).loss for step in range(first, last + 1)]


def state_of(train, mesh_shape: str = "", seed: int = SEED) -> mm.State:
    """Return a State with simulated ranks."""
    return mm.State(train.programs, seed=seed, machine=SimulatedMachine(Mesh(mesh_shape)))


def trained(mesh_shape: str = "", n_steps: int = 2, **changes):
    """Return (training, state) after ``n_steps``, simulated."""
    train = training(mesh_shape, **changes)
    state = state_of(train, mesh_shape)
    run(train, state, 1, n_steps)
    return train, state


def values(state) -> dict[str, np.ndarray]:
    """Return every saved variable, whole."""
    return {name: state.read(name) for name in state.saved_names}


def assert_same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> None:
    """The same names, element types and bits."""
    assert list(sorted(a)) == list(sorted(b))
    for name, x in a.items():
        assert x.dtype == b[name].dtype and x.tobytes() == b[name].tobytes(), name


def raw_arrays(path: Path) -> dict[str, bytes]:
    """Return the bytes of each dataset of variables, and its attributes' text, as HDF5 gives them."""
    found = {}
    with h5py.File(path, "r") as file:
        def visit(name, item):
            if isinstance(item, h5py.Dataset) and item.dtype != object:
                found[name] = item[()].tobytes() + repr(sorted((k, str(v)) for k, v in item.attrs.items())).encode()
        file.visititems(visit)
    return found

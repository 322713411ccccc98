"""How fast a state is saved, against h5py alone writing the same bytes to the same disk.

Invariant: both are measured in turn, in one run, each from rank 0's first call to the return of fsync; what they write is removed.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import h5py
import numpy as np

from ..runtime.agreement import on_rank_0
from ..runtime.state import State
from .format import LIBVER
from .writer import n_bytes_of, path_of, save


def measure_save(state: State, folder, rounds: int) -> dict:
    """Save ``state`` and write its bytes with h5py, ``rounds`` times in turn; return medians in seconds and their ratio, on every rank.

    ``write_s`` is that of SaveReport (collecting, checksums, writing, bringing to disk), ``verify_s`` comes on top; ``plain_s``: datasets of
    the same names and shapes, created with their data, flushed, closed and brought to disk.

    Comm    collective, as :func:`save`. Raises MeshMpiError, alike on every rank, if ``folder`` cannot be written; nothing is left there.
    """
    operation = f"measuring saves in {folder}"
    place = Path(on_rank_0(state.machine, operation, lambda: tempfile.mkdtemp(prefix="mesh_mpi_bench_", dir=folder)))
    plain, written, verified, n_bytes = [], [], [], 0
    try:
        for i in range(rounds):
            for what in ("save", "plain")[::1 if i % 2 else -1]:
                on_rank_0(state.machine, operation, lambda: _touch(n_bytes_of(state)))
                if what == "plain":
                    plain.append(on_rank_0(state.machine, operation, lambda: _plain(state, place / "plain.h5")))
                    continue
                done = save(state, place, i + 1, keep_last=1)
                written, verified, n_bytes = [*written, done.write_s], [*verified, done.verify_s], done.n_bytes
                on_rank_0(state.machine, operation, lambda: shutil.rmtree(place / "checkpoints"))
    finally:
        if state.machine.rank == 0:
            shutil.rmtree(place, ignore_errors=True)
    middle = {name: statistics.median(times) for name, times in (("plain_s", plain), ("write_s", written), ("verify_s", verified))}
    return {"n_ranks": state.mesh.size, "rounds": rounds, "checkpoint_bytes": n_bytes, **{k: round(v, 4) for k, v in middle.items()},
            "ratio": round(middle["plain_s"] / middle["write_s"], 4)}


def _touch(n_bytes: int) -> None:
    """Take memory and give it back, so that both find free pages that are there: on virtual machines the first touch of a page costs more than writing it."""
    np.ones(n_bytes, np.uint8)


def _plain(state: State, path: Path) -> float:
    """Return how long h5py takes on rank 0."""
    data = {name: np.ones(state.variables[name].shape, state.variables[name].value.dtype) for name in state.saved_names}
    start = time.perf_counter()
    with h5py.File(path, "w", libver=LIBVER) as file:
        for name, array in data.items():
            file.create_dataset(path_of(state, name), data=array)
        file.flush()
    descriptor = os.open(path, os.O_RDWR)
    os.fsync(descriptor)
    os.close(descriptor)
    taken_s = time.perf_counter() - start
    path.unlink()
    return taken_s

"""The simulated machine: all ranks of a mesh in this process, in lock-step, in one thread.

Invariant: sums run in the order of ranks in the element type itself, so groups of two equal MPI's bit for bit,
and every run of a program gives the same bits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from ..mesh import Mesh
from .threads import fit_simulated_ranks

BLOCK_ELEMENTS = 1 << 16  # of a reduction at a time: the running sum stays in cache and needs no large buffer
UFUNCS = {"sum": np.add, "max": np.maximum, "min": np.minimum}


class SimulatedMachine:
    """Every rank of ``mesh``; ``recorder`` sees what one rank passes, ``comm_s`` is the time spent in collectives."""

    is_simulated = True

    def __init__(self, mesh: Mesh):
        self.mesh = mesh
        self.coordinates = [mesh.coordinate(rank) for rank in range(mesh.size)]
        self.rank, self.n_ranks = 0, mesh.size
        self.recorder = None
        self.comm_s = 0.0
        fit_simulated_ranks(mesh.size)

    def __repr__(self):
        return f"simulated mesh {self.mesh}"

    def bind(self, kind: str, axes: tuple[str, ...], outs: Sequence[np.ndarray], ins: Sequence[np.ndarray],
             reduce: str = "", label: str = "") -> Callable[[], None]:
        """Return a call that runs one collective on every group of ranks along ``axes``.

        Shape   ``outs`` and ``ins``: one flat contiguous array a rank, all of one element type. With n ranks in a group:
                allreduce [m] -> [m], in place or not; reduce_scatter [n m] -> [m]; allgather [m] -> [n m];
                alltoall [n m] -> [n m], block i to the group's i-th; swap [m] -> [m] between mirrored coordinates.
        """
        groups = self.mesh.groups(axes)
        moves = {"allreduce": _allreduce, "reduce_scatter": _reduce_scatter, "allgather": _allgather,
                 "alltoall": _alltoall}.get(kind)
        if kind == "swap":
            steps = _swap(self.mesh, axes, outs, ins)
        else:
            steps = [step for group in groups for step in moves([outs[r] for r in group], [ins[r] for r in group], reduce)]

        def call() -> None:
            start = time.perf_counter()
            for step in steps:
                step()
            if self.recorder is not None:
                self.recorder.record(kind, axes, max(outs[0].nbytes, ins[0].nbytes))
            self.comm_s += time.perf_counter() - start

        return call

    def gather(self, axes: tuple[str, ...], arrays: Sequence[np.ndarray]) -> np.ndarray:
        """Return [ranks in the group of rank 0 along ``axes``, ...]: their arrays, in order."""
        group = next(g for g in self.mesh.groups(axes) if 0 in g)
        gathered = np.stack([arrays[rank] for rank in group])
        if self.recorder is not None and len(group) > 1:
            self.recorder.record("gather", tuple(axes), gathered.nbytes)
        return gathered

    def collect(self, sources: Sequence[np.ndarray | None], targets: Sequence[np.ndarray | None], label: str = "") -> None:
        """Bring arrays to rank 0: ``targets[r]`` becomes what rank r gave; call it on every rank alike.

        Shape   ``sources``: one array (any strides), or None, for each rank of this process; ``targets``, used on rank 0 only: one for each
                rank of the mesh, of its source's shape and element type, None where that is None.
        """
        start, passed = time.perf_counter(), 0
        for source, target in zip(sources, targets):
            if target is not None:
                np.copyto(target, source)
                passed += target.nbytes
        if self.recorder is not None:
            self.recorder.record("collect", (), passed)
        self.comm_s += time.perf_counter() - start

    def check_same(self, parts: dict[str, str]) -> None:
        """Nothing to compare: one process has one program."""

    def maxima(self, values: Sequence[float]) -> list[float]:
        """Return the largest of each value over all processes: the values themselves."""
        return [float(v) for v in values]

    def broadcast(self, value):
        """Return rank 0's value."""
        return value

    def gather_objects(self, value) -> list:
        """Return what each process gave: one value, as there is one process."""
        return [value]


def _reducer(sources: Sequence[np.ndarray], targets: Sequence[np.ndarray], reduce: str) -> Callable[[], None]:
    """Return a call: each target becomes the reduction of all sources in order, block by block, so that targets may be sources."""
    ufunc, n = UFUNCS[reduce], sources[0].size
    work = np.empty(min(n, BLOCK_ELEMENTS), sources[0].dtype)

    def call() -> None:
        for start in range(0, n, BLOCK_ELEMENTS):
            part = slice(start, min(n, start + BLOCK_ELEMENTS))
            total = work[:part.stop - start]
            total[...] = sources[0][part]
            for source in sources[1:]:
                ufunc(total, source[part], out=total)
            for target in targets:
                target[part] = total

    return call


def _allreduce(outs, ins, reduce):
    return [_reducer(ins, outs, reduce)]


def _reduce_scatter(outs, ins, reduce):
    m = outs[0].size
    return [_reducer([x[i * m:(i + 1) * m] for x in ins], [out], reduce) for i, out in enumerate(outs)]


def _allgather(outs, ins, reduce):
    m = ins[0].size
    return [_copy(out[i * m:(i + 1) * m], x) for out in outs for i, x in enumerate(ins)]


def _alltoall(outs, ins, reduce):
    m = ins[0].size // len(ins)
    return [_copy(out[j * m:(j + 1) * m], x[i * m:(i + 1) * m]) for i, out in enumerate(outs) for j, x in enumerate(ins)]


def _swap(mesh: Mesh, axes: tuple[str, ...], outs, ins):
    steps = []
    for rank in range(mesh.size):
        steps.append(_copy(outs[rank], ins[mirrored(mesh, axes, mesh.coordinate(rank))]))
    return steps


def mirrored(mesh: Mesh, axes: tuple[str, ...], coordinate: dict[str, int]) -> int:
    """Return the rank whose coordinates on the two ``axes`` are exchanged."""
    p, q = axes
    return mesh.rank({**coordinate, p: coordinate[q], q: coordinate[p]})


def _copy(target: np.ndarray, source: np.ndarray) -> Callable[[], None]:
    return lambda: np.copyto(target, source)

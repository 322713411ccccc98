"""One group of ranks, and every call that is made on it.

Invariant: no other module hands an array of a program to mpi4py, so the recorder, the clock and the watchdog miss nothing.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from ..errors import MeshMpiError

PIECE_BYTES = 8 << 20  # of an allreduce: larger calls are slower (93 MB: 36 ms in one, 11 ms in pieces) and allocate inside MPI
MESSAGE_BYTES = 1 << 30  # of a message between two ranks
MAX_ELEMENTS = 2**31 - 1  # of a count: Open MPI fails beyond it


class Communicator:
    """Wraps the mpi4py communicator ``comm`` of one group along ``axes``; ``machine`` has recorder, clock and progress."""

    def __init__(self, comm, axes: tuple[str, ...], machine, mpi):
        self.comm, self.axes, self.machine, self.mpi = comm, axes, machine, mpi
        self.size = comm.Get_size()

    def bind(self, kind: str, out: np.ndarray, source: np.ndarray, reduce: str = "", label: str = "", partner: int = -1,
             recorded: str = "") -> Callable[[], None]:
        """Return a call that runs one collective between flat contiguous arrays; sizes as in the simulated machine's ``bind``.

        ``partner`` is the rank in this group that a swap exchanges with; ``recorded`` another name for the recorder.
        """
        if out.dtype == bool:
            out, source = out.view(np.uint8), source.view(np.uint8)
        op = {"sum": self.mpi.SUM, "max": self.mpi.MAX, "min": self.mpi.MIN}.get(reduce)
        if kind == "swap":
            steps = self._swap(out, source, partner)
        else:
            steps = {"allreduce": self._allreduce, "reduce_scatter": self._reduce_scatter, "allgather": self._allgather,
                     "alltoall": self._alltoall}[kind](out, source, op)
        return self._watched(recorded or kind, tuple(steps), label)

    def _watched(self, kind: str, steps: tuple[partial, ...], label: str) -> Callable[[], None]:
        machine, progress, axes, now = self.machine, self.machine.progress, self.axes, time.perf_counter

        def call() -> None:
            progress.label = label  # two stores are all that the watchdog costs
            start = now()
            for step in steps:
                step()
            if machine.recorder is not None:
                machine.recorder.record(kind, axes, _passed_bytes(steps))
            machine.comm_s += now() - start
            progress.count += 1
            progress.label = ""

        return call

    def _allreduce(self, out, source, op):
        in_place = out.ctypes.data == source.ctypes.data
        for part in _parts(out.size, PIECE_BYTES // out.itemsize):
            yield partial(self.comm.Allreduce, self.mpi.IN_PLACE if in_place else source[part], out[part], op)

    def _reduce_scatter(self, out, source, op):
        if out.size <= MAX_ELEMENTS:
            return [partial(self.comm.Reduce_scatter_block, source, out, op)]
        mine = self.comm.Get_rank()  # beyond the largest count: block by block to its owner
        return [partial(self.comm.Reduce, source[root * out.size:][part], out[part] if root == mine else None, op, root)
                for root in range(self.size) for part in _parts(out.size, MESSAGE_BYTES // out.itemsize)]

    def _allgather(self, out, source, op):
        return [partial(self.comm.Allgather, *self._counted(source, source.size, out))]

    def _alltoall(self, out, source, op):
        return [partial(self.comm.Alltoall, *self._counted(source, source.size // self.size, out))]

    def _swap(self, out, source, partner):
        return [partial(self.comm.Sendrecv, source[part], partner, 0, out[part], partner, 0)
                for part in _parts(out.size, MESSAGE_BYTES // out.itemsize)]

    def _counted(self, source, block: int, out):
        """Return both buffers as mpi4py takes them; a block beyond the largest count becomes few elements of a larger type."""
        if block <= MAX_ELEMENTS:
            return source, out
        unit = next((u for u in itertools.islice(itertools.count(-(-block // MAX_ELEMENTS)), 1 << 20) if block % u == 0), None)
        if unit is None:
            raise MeshMpiError(f"communication: blocks of {block} elements exceed {MAX_ELEMENTS} and have no divisor of use. Change a size slightly.")
        from mpi4py.util.dtlib import from_numpy_dtype

        larger = from_numpy_dtype(source.dtype).Create_contiguous(unit).Commit()
        return (source, block // unit, larger), (out, block // unit, larger)  # counts are per rank


def _parts(n: int, step: int):
    """Yield slices that cover ``n`` elements, ``step`` at a time."""
    for start in range(0, n, step):
        yield slice(start, min(n, start + step))


def _passed_bytes(steps: tuple[partial, ...]) -> int:
    """Return the bytes of the larger buffer of each call, added up, as read from the very arguments."""
    return sum(max(_n_bytes(argument) for argument in step.args) for step in steps)


def _n_bytes(argument) -> int:
    if isinstance(argument, tuple):
        argument = argument[0]
    return argument.nbytes if isinstance(argument, np.ndarray) else 0

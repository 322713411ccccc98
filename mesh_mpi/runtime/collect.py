"""Bringing arrays of all ranks to rank 0, for files.

Invariant: travels on a communicator of its own, in messages of at most ``communicator.MESSAGE_BYTES``, so that nothing of a program's
traffic is ever matched with it; memory beyond the arrays themselves is one staging copy of the array under way.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from . import communicator


class Collector:
    """Wraps a private duplicate of the mpi4py communicator ``comm``. Comm: collective to make."""

    def __init__(self, comm):
        self.comm = comm.Dup()
        self.rank = self.comm.Get_rank()

    def collect(self, source: np.ndarray | None, targets: Sequence[np.ndarray | None]) -> int:
        """Copy this rank's ``source`` to rank 0 (None: nothing); on rank 0, fill ``targets[r]`` with what rank r sends. Return the bytes passed.

        Arrays may be strided; a target has the shape and element type of its source, and is None where that is. On other ranks
        ``targets`` is not looked at.
        """
        if self.rank != 0:
            if source is None:
                return 0
            self._pass(self.comm.Send, _bytes_of(np.ascontiguousarray(source)), 0)
            return source.nbytes
        passed = 0
        for sender, target in enumerate(targets):
            if target is None:
                continue
            passed += target.nbytes
            if sender == 0:
                np.copyto(target, source)
            elif target.flags.c_contiguous:
                self._pass(self.comm.Recv, _bytes_of(target), sender)
            else:
                staging = np.empty(target.shape, target.dtype)
                self._pass(self.comm.Recv, _bytes_of(staging), sender)
                np.copyto(target, staging)
        return passed

    @staticmethod
    def _pass(call, flat: np.ndarray, partner: int) -> None:
        for start in range(0, flat.size, communicator.MESSAGE_BYTES):
            call(flat[start:start + communicator.MESSAGE_BYTES], partner)


def _bytes_of(array: np.ndarray) -> np.ndarray:
    """Return a contiguous array's memory as bytes."""
    return array.reshape(-1).view(np.uint8)

"""Bringing arrays of all ranks to rank 0, for files.

Invariant: travels on a communicator of its own, in messages of at most ``communicator.MESSAGE_BYTES``, so that nothing of a program's
traffic is ever matched with it; memory beyond the arrays themselves is one staging copy of the array under way.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from . import communicator, patience

KEPT_BYTES = 8 << 20  # of staging memory, once there was something to stage


class Collector:
    """Wraps a private duplicate of the mpi4py communicator ``comm``. Comm: collective to make."""

    def __init__(self, comm):
        self.comm = comm.Dup()
        self.rank, self._kept = self.comm.Get_rank(), None

    def collect(self, source: np.ndarray | None, targets: Sequence[np.ndarray | None]) -> int:
        """Copy this rank's ``source`` to rank 0 (None: nothing); on rank 0, fill ``targets[r]`` with what rank r sends. Return the bytes passed.

        Arrays may be strided; a target has the shape and element type of its source, and is None where that is. On other ranks
        ``targets`` is not looked at.
        """
        if self.rank != 0:
            if source is None:
                return 0
            self._pass(lambda part, rank: patience.wait(self.comm.Isend(part, rank)), _bytes_of(np.ascontiguousarray(source)), 0)
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
                staging = self._staged(target)
                self._pass(self.comm.Recv, _bytes_of(staging), sender)
                np.copyto(target, staging)
        return passed

    def _staged(self, target: np.ndarray) -> np.ndarray:
        """Return contiguous memory of a target's shape, the same for all that fit: new memory costs as much as the copy."""
        if target.nbytes > KEPT_BYTES:
            return np.empty(target.shape, target.dtype)
        if self._kept is None:
            self._kept = np.empty(KEPT_BYTES, np.uint8)
        return self._kept[:target.nbytes].view(target.dtype).reshape(target.shape)

    @staticmethod
    def _pass(call, flat: np.ndarray, partner: int) -> None:
        for start in range(0, flat.size, communicator.MESSAGE_BYTES):
            call(flat[start:start + communicator.MESSAGE_BYTES], partner)


def _bytes_of(array: np.ndarray) -> np.ndarray:
    """Return a contiguous array's memory as bytes."""
    return array.reshape(-1).view(np.uint8)

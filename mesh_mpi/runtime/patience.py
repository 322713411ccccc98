"""Waiting for other ranks without taking a core from them.

Invariant: a wait lasts at most a tenth, and at most PAUSE_S, longer than what it waits for. MPI libraries wait by asking without end, which on full nodes
takes the core that another rank's threads could have (writing and checking a checkpoint with two ranks on two cores: 0.40 s, and 0.29 s with this).
"""

from __future__ import annotations

import time

PAUSE_S = 0.005  # the longest
_AT_ONCE_S = 0.0002  # asked without end for so long


def wait(request, timeout_s: float | None = None) -> bool:
    """Wait until an mpi4py ``request`` is done; return False if it is not within ``timeout_s``."""
    start = time.perf_counter()
    while not request.Test():
        waited_s = time.perf_counter() - start
        if timeout_s is not None and waited_s > timeout_s:
            return False
        if waited_s > _AT_ONCE_S:
            time.sleep(min(PAUSE_S, waited_s / 10))
    return True

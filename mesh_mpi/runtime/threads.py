"""BLAS threads: each rank takes its share of the cores, unless the user set a number.

Invariant: the threads of all ranks on a node together are never more than its cores by this module's doing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from ..log import say

VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS")


def share_of_cores(masks: Sequence[Sequence[int]], me: int) -> int:
    """Return the cores for rank ``me`` of a node, given the cores that each of its ranks may use; a core that n may use counts 1/n."""
    users: dict[int, int] = {}
    for mask in masks:
        for core in mask:
            users[core] = users.get(core, 0) + 1
    return max(1, int(sum(1 / users[core] for core in masks[me]) + 1e-9))


def threads_set_by_user(environment: Mapping[str, str] = os.environ) -> int | None:
    """Return the number of BLAS threads that the environment asks for, or None."""
    for name in VARIABLES:
        if environment.get(name, "").isdigit() and int(environment[name]) > 0:  # 0 and words mean to BLAS: all cores
            return int(environment[name])
    return None


def fit_blas_threads(masks: Sequence[Sequence[int]], me: int) -> tuple[int, str]:
    """Set this process's BLAS threads; return their number and where it comes from. Says so if a node is overloaded."""
    n, origin = threads_set_by_user(), "set by the environment"
    if n is None:
        n, origin = share_of_cores(masks, me), "cores // ranks on the node"
        from threadpoolctl import threadpool_limits

        threadpool_limits(n, user_api="blas")  # NumPy's BLAS is loaded already, so the variables would come too late
    n_cores = len({core for mask in masks for core in mask})
    if n * len(masks) > n_cores and me == 0:
        share = max(1, n_cores // len(masks))
        say(f"warning: {len(masks)} ranks on a node with BLAS threads of {n} each want {n * len(masks)} cores and may use {n_cores}: steps will be "
            "slow. " + (f"Set OPENBLAS_NUM_THREADS={share}." if n > share else "Start fewer ranks, or let the launcher give them more cores."))
    return n, origin


_simulated: list[int] = []


def threads_text() -> str:
    """Return the BLAS threads of a process without MPI, in words."""
    given = threads_set_by_user()
    return f"BLAS threads {given} (set by the environment)" if given is not None else f"BLAS threads {_simulated[0]}" if _simulated else "BLAS threads as it likes"


def fit_simulated_ranks(n_ranks: int) -> None:
    """Give this process the BLAS threads that one of ``n_ranks`` on this machine would have, unless the user set a number.

    A product's bits may depend on the number of threads, and simulated ranks are to have those of real ones.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    n = max(1, cores // n_ranks)
    if threads_set_by_user() is None and _simulated != [n]:
        from threadpoolctl import threadpool_limits

        threadpool_limits(n, user_api="blas")
        _simulated[:] = [n]

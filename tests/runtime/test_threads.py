"""How many BLAS threads a rank takes."""

from __future__ import annotations

import pytest

from mesh_mpi.runtime.threads import VARIABLES, fit_blas_threads, share_of_cores, threads_set_by_user


@pytest.mark.parametrize("masks, shares", [
    ([range(16)] * 4, [4, 4, 4, 4]),
    ([range(2)] * 4, [1, 1, 1, 1]),
    ([range(0, 4), range(4, 8)], [4, 4]),  # bound by the launcher: each has its own
    ([range(0, 4), range(4, 8), range(4, 8)], [4, 2, 2]),
    ([[0]], [1]),
    ([range(7)] * 3, [2, 2, 2]),
])
def test_the_cores_a_rank_may_use_are_shared_among_those_that_may_use_them(masks, shares):
    assert [share_of_cores([list(m) for m in masks], i) for i in range(len(masks))] == shares


def test_a_number_the_user_set_is_kept_and_too_many_threads_are_told(monkeypatch, capsys):
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "8")
    assert threads_set_by_user() == 8
    assert fit_blas_threads([[0, 1], [0, 1]], 0) == (8, "set by the environment")
    assert "want 16 cores and may use 2" in capsys.readouterr().err


@pytest.mark.parametrize("senseless", ["0", "-1", "all", ""])
def test_a_number_of_threads_that_means_nothing_counts_as_none(senseless):
    assert threads_set_by_user({"OPENBLAS_NUM_THREADS": senseless}) is None
    assert threads_set_by_user({"OPENBLAS_NUM_THREADS": senseless, "OMP_NUM_THREADS": "3"}) == 3


def test_simulated_ranks_have_the_blas_threads_of_real_ones(monkeypatch):
    import numpy  # noqa: F401  its BLAS is what is asked about
    from threadpoolctl import threadpool_info

    from mesh_mpi.mesh import Mesh
    from mesh_mpi.runtime.simulated import SimulatedMachine

    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    SimulatedMachine(Mesh({"data": 4096}))
    assert {pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"} == {1}

"""What each collective of the simulated machine does, against NumPy, group by group."""

from __future__ import annotations

import numpy as np
import pytest

from mesh_mpi.mesh import Mesh
from mesh_mpi.runtime.recorder import Recorder
from mesh_mpi.runtime.simulated import BLOCK_ELEMENTS, SimulatedMachine

MESH = Mesh("a:2;b:3;c:2")


def arrays(size: int, dtype="float32") -> list[np.ndarray]:
    draw = np.random.default_rng(size)
    return [(draw.normal(size=size) * 10.0 ** draw.integers(-3, 4, size)).astype(dtype) for _ in range(MESH.size)]


def in_rank_order(group, xs):
    total = xs[group[0]].copy()
    for rank in group[1:]:
        total = total + xs[rank]
    return total


@pytest.mark.parametrize("axes", [("b",), ("a", "c"), ("a", "b", "c")])
@pytest.mark.parametrize("in_place", [False, True])
def test_allreduce_sums_in_the_order_of_ranks(axes, in_place):
    size = BLOCK_ELEMENTS + 17
    ins = arrays(size)
    kept = [x.copy() for x in ins]
    outs = ins if in_place else [np.empty_like(x) for x in ins]
    SimulatedMachine(MESH).bind("allreduce", axes, outs, ins, "sum")()
    for group in MESH.groups(axes):
        expected = in_rank_order(group, kept)
        for rank in group:
            np.testing.assert_array_equal(outs[rank], expected)


def test_allreduce_takes_maxima_and_keeps_nans():
    ins = arrays(5)
    ins[4][2] = np.nan
    outs = [np.empty_like(x) for x in ins]
    SimulatedMachine(MESH).bind("allreduce", ("a", "b", "c"), outs, ins, "max")()
    np.testing.assert_array_equal(outs[7], np.max(ins, axis=0))
    assert np.isnan(outs[0][2])


@pytest.mark.parametrize("axes", [("b",), ("a", "c")])
def test_reduce_scatter_allgather_and_alltoall_go_by_the_order_in_the_group(axes):
    machine, m, n = SimulatedMachine(MESH), 5, MESH.extent(axes)
    ins = arrays(m * n, "float64")
    scattered, gathered, exchanged = ([np.empty(k) for _ in ins] for k in (m, m * n, m * n))
    machine.bind("reduce_scatter", axes, scattered, ins, "sum")()
    machine.bind("allgather", axes, gathered, scattered)()
    machine.bind("alltoall", axes, exchanged, ins)()
    for group in MESH.groups(axes):
        total = in_rank_order(group, ins)
        for i, rank in enumerate(group):
            np.testing.assert_array_equal(scattered[rank], total[i * m:(i + 1) * m])
            np.testing.assert_array_equal(gathered[rank], total)
            np.testing.assert_array_equal(exchanged[rank], np.concatenate([ins[other][i * m:(i + 1) * m] for other in group]))


def test_swap_exchanges_two_coordinates():
    machine, ins = SimulatedMachine(MESH), arrays(4)
    outs = [np.empty_like(x) for x in ins]
    machine.bind("swap", ("a", "c"), outs, ins)()
    for rank in range(MESH.size):
        at = MESH.coordinate(rank)
        np.testing.assert_array_equal(outs[rank], ins[MESH.rank({"a": at["c"], "b": at["b"], "c": at["a"]})])


def test_the_recorder_gets_the_larger_buffer_of_one_rank_and_time_is_counted():
    machine = SimulatedMachine(MESH)
    machine.recorder = Recorder()
    machine.bind("allgather", ("b",), [np.empty(12, np.float32) for _ in range(12)], [np.ones(4, np.float32) for _ in range(12)])()
    assert machine.recorder.calls == [("allgather", ("b",), 48)] and machine.recorder.total_bytes() == 48
    assert 0 < machine.comm_s < 1

"""Softmax and its logarithm: golden cases, gradients, layouts, communication."""

import numpy as np
import pytest
from ops.checks import assert_close, check_gradients, every_layout, run, variables_of

import mesh_mpi as mm

B, D = mm.Dimension("batch", 4), mm.Dimension("d", 12)


@pytest.mark.parametrize("mesh, layout", [("", ""), ("a:3", "three:a")])
def test_softmax_and_log_sum_of_1_2_3(mesh, layout):
    d = mm.Dimension("three", 3)
    x = mm.placeholder("x", [d])
    outputs = {"softmax": mm.softmax(x, d), "log": mm.log_softmax(x, d), "lse": mm.reduce_logsumexp(x, d)}
    found, _ = run(outputs, {"x": np.float32([1, 2, 3])}, mesh=mesh, layout=layout)
    assert_close(found["softmax"], np.float32([.0900306, .2447285, .6652410]), 1e-6)
    assert_close(found["lse"], np.float32(3.407606), 1e-6)
    assert_close(found["log"], np.float32([1, 2, 3]) - np.float32(3.407606), 1e-6)


@pytest.mark.parametrize("mesh, layout", [("", ""), ("a:2", "two:a")])
def test_large_numbers_do_not_overflow(mesh, layout):
    d = mm.Dimension("two", 2)
    x = mm.placeholder("x", [d])
    found, _ = run({"lse": mm.reduce_logsumexp(x, d), "softmax": mm.softmax(x, d)}, {"x": np.float32([1000, 1000])}, mesh=mesh, layout=layout)
    assert_close(found["lse"], np.float32(1000.693176), 1e-7)
    assert_close(found["softmax"], np.float32([.5, .5]), 0)


@pytest.mark.parametrize("function", [mm.softmax, mm.log_softmax])
def test_gradients_equal_differences_and_no_layout_changes_them(function):
    v, values = variables_of(np.random.default_rng(2), x=[B, D])
    y = function(v["x"], D)
    outputs, feeds = check_gradients(y, [v["x"]], values)
    assert every_layout({"y": y, **outputs}, ["batch", "d"], feeds=feeds, values=values) >= 6


@pytest.mark.parametrize("function", [mm.softmax, mm.log_softmax])
def test_a_split_softmax_reduces_one_maximum_and_one_sum_a_row(function):
    v, _ = variables_of(np.random.default_rng(2), x=[B, D])
    y = function(v["x"], D)
    dx, = mm.gradients(y, [v["x"]], [mm.placeholder("dy", y.shape, "float64")])
    program = mm.compile({"y": y, "dx": dx}, mesh_shape="a:2", layout="d:a")
    assert [(c.name, c.reduce, c.payload_bytes) for c in program.collectives()] == [
        ("allreduce", "max", 32), ("allreduce", "sum", 32), ("allreduce", "sum", 32)]


def test_integers_are_refused():
    with pytest.raises(mm.MeshMpiError, match="softmax: .*int32"):
        mm.softmax(mm.placeholder("x", [D], "int32"), D)

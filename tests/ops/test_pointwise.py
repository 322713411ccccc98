"""Golden cases of products and pointwise functions, on one rank and split."""

import numpy as np
import pytest
from ops.checks import assert_close, run

import mesh_mpi as mm


def one(function, *arrays, layout=""):
    """Apply a function to vectors along ``d``."""
    d = mm.Dimension("d", len(arrays[0]))
    xs = [mm.placeholder(f"x{i}", [d], np.asarray(a).dtype.name) for i, a in enumerate(arrays)]
    return run({"y": function(*xs)}, {f"x{i}": np.asarray(a) for i, a in enumerate(arrays)}, mesh="a:7" if layout else "", layout=layout)[0]["y"]


@pytest.mark.parametrize("layout", ["", "rows:a", "inner:a", "columns:a", "rows:a;inner:b"])
def test_a_product_and_its_gradients(layout):
    rows, inner, columns = mm.Dimension("rows", 2), mm.Dimension("inner", 3), mm.Dimension("columns", 2)
    x, w = mm.placeholder("x", [rows, inner]), mm.placeholder("w", [inner, columns])
    y = mm.einsum([x, w], [rows, columns])
    dx, dw = mm.gradients(mm.reduce_sum(mm.square(y)), [x, w])
    mesh = "a:2;b:3" if "b" in layout else "a:3" if "inner" in layout else "a:2"
    feeds = {"x": np.float32([[1, 2, 3], [4, 5, 6]]), "w": np.float32([[1, 0], [2, 1], [0, 3]])}
    found, _ = run({"y": y, "dx": dx, "dw": dw}, feeds, mesh=mesh if layout else "", layout=layout)
    assert_close(found["y"], np.float32([[5, 11], [14, 23]]), 0)
    assert_close(found["dx"], np.float32([[10, 42, 66], [28, 102, 138]]), 0)
    assert_close(found["dw"], np.float32([[122, 206], [160, 274], [198, 342]]), 0)


def test_a_tie_of_maximum_gives_the_gradient_to_both():
    d = mm.Dimension("d", 3)
    a, b = mm.placeholder("a", [d]), mm.placeholder("b", [d])
    da, db = mm.gradients(mm.maximum(a, b), [a, b])
    found, _ = run({"da": da, "db": db}, {"a": np.float32([1, 2, 3]), "b": np.float32([2, 2, 2])})
    assert found["da"].tolist() == [0, 1, 1] and found["db"].tolist() == [1, 1, 0]


@pytest.mark.parametrize("layout", ["", "columns:a"])
def test_ties_of_reduce_max_each_take_the_gradient(layout):
    rows, columns = mm.Dimension("rows", 2), mm.Dimension("columns", 3)
    x = mm.placeholder("x", [rows, columns])
    y = mm.reduce_max(x, columns)
    found, _ = run({"y": y, "dx": mm.gradients(y, [x])[0]}, {"x": np.float32([[1, 3, 3], [2, 0, 2]])}, mesh="a:3", layout=layout)
    assert found["y"].tolist() == [3, 2] and found["dx"].tolist() == [[0, 1, 1], [1, 0, 1]]


@pytest.mark.parametrize("dtype", ["int32", "float32"])
def test_quotients_and_remainders_are_of_the_floor(dtype):
    assert one(mm.floordiv, np.array([-7, 7], dtype), np.array([2, -2], dtype)).tolist() == [-4, -4]
    assert one(mm.mod, np.array([-7, 7], dtype), np.array([3, -3], dtype)).tolist() == [2, -2]


@pytest.mark.parametrize("layout", ["", "d:a"])
def test_gelu(layout):
    found = one(mm.gelu, np.float32([-3, -1, -.5, 0, .5, 1, 3]), layout=layout)
    assert_close(found, np.float32([-.0036375, -.1588080, -.1542860, 0, .3457140, .8411920, 2.9963626]), 1e-6)


@pytest.mark.parametrize("function, at_minus_1, at_1", [
    (mm.silu, -.2689414, .7310586), (mm.elu, -.6321206, 1), (mm.selu, -1.1113307, 1.0507010), (mm.softplus, .3132617, 1.3132617), (mm.leaky_relu, -.2, 1)])
def test_activations_at_minus_1_and_1(function, at_minus_1, at_1):
    assert_close(one(function, np.float32([-1, 1])), np.float32([at_minus_1, at_1]), 1e-6)


def test_the_gradient_of_abs_at_0_is_0():
    assert one(lambda x: mm.gradients(mm.abs(x), [x])[0], np.float32([-2, 0, 3])).tolist() == [-1, 0, 1]

"""Writes and slices at an index that is fed: values, gradients, layouts, in place."""

import numpy as np
import pytest
from ops.checks import assert_close, check_gradients, every_layout, run, variables_of

import mesh_mpi as mm

B, L, D = mm.Dimension("batch", 4), mm.Dimension("length", 12), mm.Dimension("d_model", 6)
WINDOW = mm.Dimension("length", 4)


def sample(dims):
    """Return a cache written at a fed index, its variables and their values."""
    v, values = variables_of(np.random.default_rng(14), cache=[B, L, D], value=dims)
    return mm.write(v["cache"], {L: mm.placeholder("at", [], "int64")}, v["value"]), v, values


@pytest.mark.parametrize("at", [0, 3, 8])
def test_a_window_is_replaced(at):
    y, _, values = sample([D, WINDOW, B])
    expected = values["cache"].copy()
    expected[:, at:at + 4] = values["value"].transpose(2, 1, 0)
    assert_close(run({"y": y}, {"at": np.int64(at)}, values=values)[0]["y"], expected, 0)


@pytest.mark.parametrize("dims", [[B, WINDOW, D], [B, D]])
@pytest.mark.parametrize("at", [0, 5, 8])
def test_gradients_equal_differences_and_no_layout_changes_them(dims, at):
    y, v, values = sample(dims)
    outputs, feeds = check_gradients(y, list(v.values()), values, {"at": np.int64(at)})
    every_layout({"y": y, **outputs}, ["batch", "length", "d_model"], feeds=feeds, values=values, n_least=12)


def test_a_cache_is_written_in_place_and_without_communication():
    v, _ = variables_of(np.random.default_rng(14), cache=[B, L, D])
    new = mm.write(v["cache"], {"length": mm.placeholder("at", [], "int64")}, mm.placeholder("k", [B, D], "float64"))
    for mesh, layout in (("", ""), ("a:2", "length:a"), ("a:2", "batch:a")):
        program = mm.compile({}, [(v["cache"], new)], mesh_shape=mesh, layout=layout)
        assert [i.name for i in program.instructions] == ["write_at"]
        assert program.plan.address(program.instructions[0].outputs[0].root)[0] == "cache"


@pytest.mark.parametrize("new_dim", [None, WINDOW, mm.Dimension("window", 2)])
@pytest.mark.parametrize("at", [0, 5])
def test_a_slice_its_gradients_and_layouts(new_dim, at):
    v, values = variables_of(np.random.default_rng(15), x=[B, L, D])
    y = mm.slice_at(v["x"], L, mm.placeholder("at", [], "int64"), new_dim)
    n = 1 if new_dim is None else new_dim.size
    expected = values["x"][:, at:at + n]
    outputs, feeds = check_gradients(y, [v["x"]], values, {"at": np.int64(at)})
    assert_close(run({"y": y}, feeds, values=values)[0]["y"], expected[:, 0] if new_dim is None else expected, 0)
    every_layout({"y": y, **outputs}, ["batch", "length", "d_model", "window"], feeds=feeds, values=values, n_least=10)


def test_a_slice_of_a_split_dimension_says_that_it_gathers():
    x = mm.placeholder("x", [B, L])
    y = mm.slice_at(x, L, mm.placeholder("at", [], "int64"))
    assert mm.compile({"y": y}, mesh_shape="a:2", layout="length:a").notes
    with pytest.raises(mm.MeshMpiError, match="length of .* whole"):
        mm.compile({"y": y}, mesh_shape="a:2", layout="length:a", strict_layout=True)


def test_faults_are_named():
    x, at = mm.placeholder("x", [B, L]), mm.placeholder("at", [], "int64")
    with pytest.raises(mm.MeshMpiError, match="Index exactly one"):
        mm.write(x, {B: at, L: at}, x)
    with pytest.raises(mm.MeshMpiError, match="value .* along length=12"):
        mm.write(x, {L: at}, mm.placeholder("y", [B, mm.Dimension("length", 13)]))
    with pytest.raises(mm.MeshMpiError, match="value .* is of float64"):
        mm.write(x, {L: at}, mm.placeholder("y", [B], "float64"))
    with pytest.raises(mm.MeshMpiError, match="index is .* of float32"):
        mm.slice_at(x, L, mm.placeholder("at", []))
    with pytest.raises(mm.MeshMpiError, match="window=13 out of length=12"):
        mm.slice_at(x, L, at, mm.Dimension("window", 13))


@pytest.mark.parametrize("mesh, layout", [("", ""), ("a:2;b:2", "batch:a;heads:b")])
def test_queries_one_by_one_through_a_cache_see_what_all_at_once_see(mesh, layout):
    heads, k, one = mm.Dimension("heads", 2), mm.Dimension("d_kv", 3), mm.Dimension("query_length", 1)
    queries, memory = mm.Dimension("query_length", 6), mm.Dimension("memory_length", 6)
    arrays = dict(zip("qkv", np.random.default_rng(16).standard_normal((3, 4, 6, 2, 3))))
    q, *kv = (mm.placeholder(n, [B, queries if n == "q" else memory, heads, k], "float64") for n in "qkv")
    expected = run({"y": mm.attention(q, *kv, queries, memory, k)}, arrays)[0]["y"]

    at = mm.placeholder("at", [], "int64")
    caches = [mm.Variable(n, [B, memory, heads, k], dtype="float64", trainable=False) for n in ("k_cache", "v_cache")]
    new = [mm.write(c, {memory: at}, mm.placeholder(n, [B, heads, k], "float64")) for c, n in zip(caches, "kv")]
    seen = mm.broadcast(mm.cast(mm.less_equal(mm.range_of(memory, "int64"), at), "int32"), [B, memory])
    y = mm.attention(mm.placeholder("q", [B, one, heads, k], "float64"), *new, one, memory, k, causal=False,
                     query_segments=mm.full([B, one], 1, "int32"), memory_segments=seen)
    program = mm.compile({"y": y}, list(zip(caches, new)), mesh_shape=mesh, layout=layout)
    state = mm.State([program], poison=True)
    for i in range(6):
        found = state.run(program, whole=True, at=np.int64(i), q=arrays["q"][:, i:i + 1], k=arrays["k"][:, i], v=arrays["v"][:, i])
        assert_close(found["y"][:, 0], expected[:, i], 1e-12)

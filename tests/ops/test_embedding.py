"""Embedding: look-up, gradient, tied tables, layouts, communication."""

import numpy as np
import pytest
from ops.checks import assert_close, check_gradients, every_layout, run, variables_of

import mesh_mpi as mm

B, L, V, D = mm.Dimension("batch", 4), mm.Dimension("length", 6), mm.Dimension("vocab", 12), mm.Dimension("d_model", 8)
IDS = np.random.default_rng(5).integers(0, 12, (4, 6)).astype(np.int32)
IDS[0, :2] = (-1, 12)  # outside: zeros, and nothing comes back


def tied():
    """Return logits through a table that also embeds the ids, so that two gradients of it meet."""
    v, values = variables_of(np.random.default_rng(6), table=[V, D])
    x = mm.embedding(v["table"], mm.placeholder("ids", [B, L], "int32"), V)
    return mm.einsum([x, v["table"]], [B, L, V]), v, values


def test_an_index_outside_gives_zeros():
    v, values = variables_of(np.random.default_rng(6), table=[V, D])
    y = mm.embedding(v["table"], mm.placeholder("ids", [B, L], "int32"), V)
    found, _ = run({"y": y}, {"ids": IDS}, values=values)
    assert_close(found["y"], np.where((IDS >= 0) & (IDS < 12), 1, 0)[..., None] * values["table"][np.clip(IDS, 0, 11)], 0)


@pytest.mark.parametrize("order", [[V, D], [D, V]])
def test_gradients_equal_differences_and_no_layout_changes_them(order):
    v, values = variables_of(np.random.default_rng(6), table=order)
    y = mm.embedding(v["table"], mm.placeholder("ids", [B, L], "int32"), V)
    outputs, feeds = check_gradients(y, [v["table"]], values, {"ids": IDS})
    assert every_layout({"y": y, **outputs}, ["batch", "length", "vocab", "d_model"], feeds=feeds, values=values) >= 20


def test_gradients_of_a_tied_table_equal_differences_and_no_layout_changes_them():
    y, v, values = tied()
    outputs, feeds = check_gradients(y, [v["table"]], values, {"ids": IDS})
    assert every_layout({"y": y, **outputs}, ["batch", "length", "vocab", "d_model"], feeds=feeds, values=values) >= 15


def test_the_gradient_of_a_tied_table_is_scattered_in_place_and_reduced_once():
    y, v, _ = tied()
    program = mm.compile({"dtable": mm.gradients(y, [v["table"]])[0]}, mesh_shape="a:2", layout="batch:a")
    kinds = [i.name for i in program.instructions]
    assert kinds.count("scatter_add") == 1 and "embedding_grad" not in kinds
    assert [(c.name, c.payload_bytes) for c in program.collectives()] == [("allreduce", 12 * 8 * 8)]
    scatter = program.instructions[kinds.index("scatter_add")]
    assert program.plan.address(scatter.outputs[0].root) == program.plan.address(scatter.inputs[0].root)


def test_two_look_ups_of_one_table_need_one_table_of_gradients():
    v, values = variables_of(np.random.default_rng(6), table=[V, D])
    one, two = (mm.embedding(v["table"], mm.placeholder(n, [B, L], "int32"), V) for n in ("one", "two"))
    outputs = {"d": mm.gradients(mm.square(one) + two, [v["table"]])[0]}
    given = {"feeds": {"one": IDS, "two": IDS[::-1].copy()}, "values": values}
    assert every_layout(outputs, ["batch", "vocab", "d_model"], **given) >= 10
    assert [i.name for i in mm.compile(outputs).instructions if "scatter" in i.name or "embedding_grad" in i.name] == ["embedding_grad", "scatter_add"]


@pytest.mark.parametrize("base_layout", ["batch:a", "batch:a;other:b", "other:b"])
def test_a_scatter_into_a_sum_that_is_partial_elsewhere_is_right(base_layout):
    other = mm.Dimension("other", 6)
    v, values = variables_of(np.random.default_rng(6), x=[other, V, D], rows=[B, D])
    ids = mm.placeholder("ids", [B], "int32")
    outputs = {"y": mm.scatter_add(mm.reduce_sum(v["x"], other), ids, v["rows"], V)}
    outputs |= {f"d_{n}": g for n, g in zip(v, mm.gradients(mm.reduce_sum(mm.square(outputs["y"])), v.values()))}
    given = {"feeds": {"ids": np.int32([3, 3, 11, 0])}, "values": values}
    one, _ = run(outputs, **given)
    expected = values["x"].sum(0)
    np.add.at(expected, given["feeds"]["ids"], values["rows"])
    assert_close(one["y"], expected, 1e-12)
    found, _ = run(outputs, mesh="a:2;b:2", layout=base_layout, **given)
    for name in outputs:
        assert_close(found[name], one[name], 1e-12, name)


def test_a_split_vocabulary_costs_one_reduction_of_the_rows():
    v, _ = variables_of(np.random.default_rng(6), table=[V, D])
    y = mm.embedding(v["table"], mm.placeholder("ids", [B, L], "int32"), V)
    grad, = mm.gradients(y, [v["table"]], [mm.placeholder("dy", y.shape, "float64")])
    program = mm.compile({"y": y, "grad": grad}, mesh_shape="a:2", layout="vocab:a")
    assert [(c.name, c.payload_bytes) for c in program.collectives()] == [("allreduce", 4 * 6 * 8 * 8)]


def test_shared_dimensions_and_floating_indices_are_refused():
    v, _ = variables_of(np.random.default_rng(6), table=[V, D])
    with pytest.raises(mm.MeshMpiError, match="share d_model=8"):
        mm.embedding(v["table"], mm.placeholder("ids", [D], "int32"), V)
    with pytest.raises(mm.MeshMpiError, match="indices .* are of float32"):
        mm.embedding(v["table"], mm.placeholder("ids", [B]), V)

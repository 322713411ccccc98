"""Cross-entropy: golden case, smoothing, padding, gradients, layouts, communication."""

import numpy as np
import pytest
from ops.checks import assert_close, check_gradients, every_layout, run, variables_of

import mesh_mpi as mm

B, L, V = mm.Dimension("batch", 4), mm.Dimension("length", 3), mm.Dimension("vocab", 12)
TARGETS = np.int32([[0, 1, 2], [9, -1, 4], [5, 6, 7], [8, 3, 9]])


@pytest.mark.parametrize("mesh, layout", [("", ""), ("a:3", "three:a")])
@pytest.mark.parametrize("logits, target, options, expected", [
    ([1, 2, 3], 2, {}, .4076059), ([0, 0, 0], 0, {}, 1.0986123), ([1, 2, 3], 2, {"z_loss": .1}, 1.5687838),
    ([0, 0, 0], 0, {"z_loss": .1}, 1.2193072), ([1, 2, 3], 2, {"label_smoothing": .1}, .5076059)])
def test_cross_entropy_of_three_columns(logits, target, options, expected, mesh, layout):
    d = mm.Dimension("three", 3)
    loss = mm.cross_entropy(mm.placeholder("x", [d]), mm.placeholder("t", [], "int32"), d, **options)
    found, _ = run({"loss": loss}, {"x": np.float32(logits), "t": np.int32(target)}, mesh=mesh, layout=layout)
    assert_close(found["loss"], np.float32(expected), 1e-6)


OPTIONS = [{}, {"n_valid": 10, "label_smoothing": .2, "z_loss": .01, "ignore": 4}]


def reference(x, n_valid=12, label_smoothing=0.0, z_loss=0.0, ignore=None):
    """Cross-entropy in float64, written from its formula."""
    x = x[..., :n_valid]
    lse = np.log(np.exp(x).sum(-1))
    smooth = np.full(x.shape, label_smoothing / n_valid)
    np.put_along_axis(smooth, np.maximum(TARGETS, 0)[..., None], 1 - label_smoothing + label_smoothing / n_valid, -1)
    counted = (TARGETS >= 0) & (TARGETS != ignore)
    return np.where(counted, lse - (smooth * x).sum(-1) + z_loss * lse**2, 0)


@pytest.mark.parametrize("options", OPTIONS)
def test_gradients_equal_differences_and_no_layout_changes_them(options):
    v, values = variables_of(np.random.default_rng(3), x=[B, L, V])
    targets = mm.placeholder("targets", [B, L], "int32")
    loss = mm.cross_entropy(v["x"], targets, V, **options)
    assert_close(run({"loss": loss}, {"targets": TARGETS}, values=values)[0]["loss"], reference(values["x"], **options), 1e-12)
    outputs, feeds = check_gradients(loss, [v["x"]], values, {"targets": TARGETS})
    assert every_layout({"loss_of_rows": loss, **outputs}, ["batch", "length", "vocab"], feeds=feeds, values=values) >= 12


def test_a_rank_whose_columns_are_all_padding_takes_no_part():
    v, values = variables_of(np.random.default_rng(4), x=[B, L, V])
    loss = mm.cross_entropy(v["x"], mm.placeholder("targets", [B, L], "int32"), V, n_valid=3)
    dx, = mm.gradients(loss, [v["x"]])
    given = {"feeds": {"targets": TARGETS % 3}, "values": values}
    one, _ = run({"loss": loss, "dx": dx}, **given)
    four, _ = run({"loss": loss, "dx": dx}, mesh="a:4", layout="vocab:a", **given)
    assert_close(four["loss"], one["loss"], 1e-12)
    assert_close(four["dx"], one["dx"], 1e-12)
    assert not four["dx"][..., 3:].any()


def test_a_split_vocabulary_costs_four_numbers_a_row_and_no_gather():
    v, _ = variables_of(np.random.default_rng(4), x=[B, L, V])
    loss = mm.cross_entropy(v["x"], mm.placeholder("targets", [B, L], "int32"), V)
    dx, = mm.gradients(loss, [v["x"]])
    program = mm.compile({"loss": loss, "dx": dx}, mesh_shape="a:2", layout="vocab:a")
    assert [(c.name, c.reduce, c.payload_bytes) for c in program.collectives()] == [("allreduce", "max", 96), ("allreduce", "sum", 288)]


def test_the_gradient_takes_the_place_of_the_logits():
    m = mm.Dimension("m", 8)
    v, _ = variables_of(np.random.default_rng(4), x=[B, m], w=[m, V])
    loss = mm.cross_entropy(mm.einsum([v["x"], v["w"]], [B, V]), mm.placeholder("targets", [B], "int32"), V)
    program = mm.compile({"dw": mm.gradients(loss, [v["w"]])[0]})
    assert program.arena_bytes < 2 * 4 * 12 * 8 + 8 * 12 * 8 + 5 * 64 + 2000  # one tensor of logits, dw, rows, scratch


def test_faults_are_named_with_their_numbers():
    x, t = mm.placeholder("x", [B, V]), mm.placeholder("t", [B], "int32")
    with pytest.raises(mm.MeshMpiError, match="n_valid=13 columns of vocab=12"):
        mm.cross_entropy(x, t, V, n_valid=13)
    with pytest.raises(mm.MeshMpiError, match="Give one target for each row"):
        mm.cross_entropy(x, mm.placeholder("u", [B, L], "int32"), V)
    with pytest.raises(mm.MeshMpiError, match="targets of float32"):
        mm.cross_entropy(x, mm.placeholder("u", [B]), V)

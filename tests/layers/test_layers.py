"""Layers against formulas in NumPy; their variables, names and errors."""

from __future__ import annotations

import numpy as np
import pytest

import mesh_mpi as mm
from mesh_mpi.errors import DimensionError, DtypeError
from mesh_mpi.layers import Dense, Dropout, Embedding, FeedForward, LayerNorm, LearnedPositions, Masks, RMSNorm, SelfAttention, residual

B, L, D, F, H, K = (mm.Dimension(n, s) for n, s in (("batch", 4), ("length", 6), ("d_model", 8), ("d_ff", 12), ("heads", 2), ("d_kv", 4)))
RNG = np.random.default_rng(0)
X = RNG.standard_normal((4, 6, 8))
T = "float64"


def value(tensor, mesh="", layout="", **feeds):
    """Return the whole value of a tensor, its dimensions in the order of its shape, and the state that holds the variables."""
    program = mm.compile({"y": tensor}, mesh_shape=mesh, layout=layout)
    state = mm.State(program, seed=1)
    out = state.run(program, whole=True, **{n: a for n, a in feeds.items() if n in program.feeds})["y"]
    names = [d.name for d in program.outputs["y"].dims]
    return np.transpose(out, [names.index(n) for n in tensor.shape.names]), state


def x_tensor():
    return mm.placeholder("x", [B, L, D], T)


def test_dense_maps_several_dimensions_to_several():
    layer = Dense([D], [H, K], "q", bias=True, dtype=T)
    y, state = value(layer(x_tensor()), x=X)
    w = state.read("q/weight")
    assert w.shape == (8, 2, 4) and not state.read("q/bias").any()
    np.testing.assert_allclose(y, np.einsum("bld,dhk->blhk", X, w), rtol=1e-12)
    back = Dense([H, K], D, "o", dtype=T)
    y, state = value(back(layer(x_tensor())), x=X)
    np.testing.assert_allclose(y, np.einsum("blhk,hkd->bld", np.einsum("bld,dhk->blhk", X, state.read("q/weight")), state.read("o/weight")), rtol=1e-12)


def test_dense_starts_with_the_deviation_of_its_global_fan_in():
    layer = Dense([mm.Dimension("heads", 8), mm.Dimension("d_kv", 32)], mm.Dimension("d_model", 64), dtype=T)
    assert layer.weight.init.numbers["stddev"] == 256**-0.5
    state = mm.State(mm.compile({"w": layer.weight}, mesh_shape="model:4", layout="heads:model"))
    assert np.std(state.read("dense/weight")) == pytest.approx(1 / 16, rel=0.02)


def test_a_bias_is_added_once_to_a_sum_that_is_split():
    layer = Dense(D, F, bias=True, dtype=T)
    layer.bias.init = mm.ones()
    one, _ = value(layer(x_tensor()), x=X)
    two, _ = value(layer(x_tensor()), "p:2", "d_model:p", x=X)
    np.testing.assert_allclose(two, one, rtol=1e-12)


def test_a_layer_makes_its_variables_once_in_the_scope_of_its_making():
    with mm.scope("decoder"):
        layer = Dense(D, F, "into", dtype=T)
    x = x_tensor()
    with mm.scope("elsewhere"):
        y = layer(x) + layer(x * 2.0)
    program = mm.compile({"y": y})
    assert list(program.variables) == ["decoder/into/weight"]
    assert y.operation.inputs[0].name == "decoder/into/einsum"


def test_a_layer_says_what_is_wrong_with_its_operand():
    layer = Dense(D, F, "into")
    with pytest.raises(DimensionError, match=r"Dense into: the operand \[batch=4, length=6\] has no dimension 'd_model', and d_model=8 is asked for"):
        layer(mm.placeholder("x", [B, L]))
    with pytest.raises(DimensionError, match="has d_model=9, and d_model=8"):
        layer(mm.placeholder("x", [B, mm.Dimension("d_model", 9)]))
    with pytest.raises(DtypeError, match="element type float64 and the layer float32"):
        layer(x_tensor())
    with pytest.raises(DtypeError, match="'int32' is not one of float32, float64"):
        Dense(D, F, dtype="int32")


def test_norms_normalise_the_last_dimension():
    y, _ = value(LayerNorm(D, eps=1e-6, dtype=T)(x_tensor()), x=X)
    np.testing.assert_allclose(y, (X - X.mean(-1, keepdims=True)) / np.sqrt(X.var(-1, keepdims=True) + 1e-6), rtol=1e-12)
    y, state = value(RMSNorm(D, eps=1e-3, dtype=T)(x_tensor()), x=X)
    np.testing.assert_allclose(y, X / np.sqrt((X**2).mean(-1, keepdims=True) + 1e-3), rtol=1e-12)
    assert list(state.variables) == ["norm/scale"] and (state.read("norm/scale") == 1).all()


@pytest.mark.parametrize(("mesh", "layout"), [("", ""), ("model:2", "vocab:model"), ("data:2;model:2", "batch:data;vocab:model")])
def test_an_embedding_looks_up_and_scores_and_its_table_is_padded(mesh, layout):
    layer = Embedding(10, D, multiple=4, dtype=T)
    assert layer.vocab == mm.Dimension("vocab", 12)
    ids = RNG.integers(0, 10, (4, 6)).astype(np.int32)
    y, state = value(layer(mm.placeholder("ids", [B, L], "int32")), mesh, layout, ids=ids)
    table = state.read("embedding/table")
    assert table.shape == (12, 8)
    np.testing.assert_array_equal(y, table[ids])
    y, _ = value(layer.logits(x_tensor()), mesh, layout, x=X)
    np.testing.assert_allclose(y, X @ table.T, rtol=1e-12)


def test_positions_are_cut_to_the_length():
    layer = LearnedPositions(9, D, dtype=T)
    y, state = value(layer(L))
    np.testing.assert_array_equal(y, state.read("positions/table")[:6])
    assert value(layer(mm.Dimension("length", 9)))[0].shape == (9, 8)
    with pytest.raises(DimensionError, match="length=10 positions are asked for and the table has max_length=9"):
        layer(mm.Dimension("length", 10))


def attention_reference(x, state, segments=None):
    q, k, v = (np.einsum("bld,dhk->blhk", x, state.read(f"attention/{n}/weight")) for n in "qkv")
    scores = np.einsum("bthk,bshk->bhts", q, k) / 2.0
    allowed = np.tril(np.ones((6, 6), bool))[None]
    if segments is not None:
        allowed = allowed & (segments[:, :, None] == segments[:, None, :])
    scores = np.where(allowed[:, None], scores, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    return np.einsum("bthk,hkd->btd", np.einsum("bhts,bshk->bthk", p, v), state.read("attention/o/weight"))


@pytest.mark.parametrize(("mesh", "layout"), [("", ""), ("model:2", "heads:model"), ("data:2;model:2", "batch:data;heads:model"),
                                              ("p:2", "length:p"), ("p:2", "query_length:p")])
def test_self_attention_is_causal_and_scaled(mesh, layout):
    layer = SelfAttention(D, H, K, dtype=T)
    y, state = value(layer(x_tensor()), mesh, layout, x=X)
    np.testing.assert_allclose(y, attention_reference(X, state), rtol=1e-11)
    segments = np.array([[1, 1, 2, 2, 2, 0]] * 4, np.int32)
    y, state = value(layer(x_tensor(), segments=mm.placeholder("segments", [B, L], "int32")), mesh, layout, x=X, segments=segments)
    np.testing.assert_allclose(y, attention_reference(X, state, segments), rtol=1e-11)


def test_the_input_gradient_of_attention_costs_one_reduction():
    """Those of k and v are added before they are renamed, those of q join them before they are reduced."""
    x = x_tensor()
    y = SelfAttention(D, H, K, dtype=T)(x)
    dx, = mm.gradients(mm.reduce_sum(y * y), [x])
    program = mm.compile({"dx": dx}, mesh_shape="model:2", layout="heads:model")
    assert [(r.name, r.payload_bytes) for r in program.collectives()] == [("allreduce", X.nbytes)] * 2  # y forward, dx backward


def test_a_residual_stream_that_is_split_is_gathered_once_for_queries_and_once_for_memory():
    x = x_tensor()
    y = residual(x, RMSNorm(D, dtype=T), SelfAttention(D, H, K, dtype=T), Dropout(0.0, dtype=T))
    program = mm.compile({"y": y}, mesh_shape="model:2", layout="length:model;heads:model")
    assert sorted(r.name for r in program.collectives()) == ["allgather", "allgather", "reduce_scatter"]


@pytest.mark.parametrize("activations", ["relu", ("gelu",), ("silu", "linear"), ("sigmoid", "linear", "tanh")])
def test_feed_forward_multiplies_its_activated_projections(activations):
    functions = {"relu": lambda x: np.maximum(x, 0), "silu": lambda x: x / (1 + np.exp(-x)), "linear": lambda x: x, "tanh": np.tanh,
                 "sigmoid": lambda x: 1 / (1 + np.exp(-x)), "gelu": lambda x: x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))}
    layer = FeedForward(D, F, activations, dtype=T)
    y, state = value(layer(x_tensor()), "model:2", "d_ff:model", x=X)
    words = (activations,) if isinstance(activations, str) else activations
    names = ["in"] if len(words) == 1 else [f"in_{i}" for i in range(len(words))]
    hidden = np.prod([functions[w](X @ state.read(f"feed_forward/{n}/weight")) for w, n in zip(words, names)], axis=0)
    np.testing.assert_allclose(y, hidden @ state.read("feed_forward/out/weight"), rtol=1e-11)


def test_an_unknown_activation_is_named_with_the_nearest():
    with pytest.raises(DimensionError, match="no activation 'rely'. Did you mean 'relu'"):
        FeedForward(D, F, "rely")


def masks():
    return Masks(mm.placeholder("step", (), "int64"), mm.placeholder("row_offset", (), "int64"))


def test_dropout_keeps_one_mask_for_all_positions_and_scales_the_rest():
    y, _ = value(Dropout(0.5, dtype=T)(x_tensor(), masks()), x=np.ones_like(X), step=3, row_offset=0)
    assert set(np.unique(y)) == {0.0, 2.0} and (y == y[:, :1]).all()
    x = x_tensor()
    assert Dropout(0.5, dtype=T)(x, None) is x and Dropout(0.0, dtype=T)(x, masks()) is x
    with pytest.raises(DimensionError, match="the rate is 1"):
        Dropout(1)


def test_masks_depend_on_name_step_and_row_and_on_no_layout():
    ones = np.ones((4, 6, 8))

    def mask(name="a", step=3, row_offset=0, mesh="", layout=""):
        return value(Dropout(0.5, name, dtype=T)(x_tensor(), masks()), mesh, layout, x=ones, step=step, row_offset=row_offset)[0]

    first = mask()
    assert (mask(mesh="p:2;q:2", layout="batch:p;d_model:q") == first).all()
    assert (mask("b") != first).any() and (mask(step=4) != first).any()
    assert (mask(row_offset=2)[:2] == first[2:]).all()

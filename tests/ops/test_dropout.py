"""Dropout: the mask as a function of seed, name, step and position."""

import numpy as np
import pytest
from ops.checks import assert_close, check_gradients, every_layout, run, variables_of

import mesh_mpi as mm

B, L, D = mm.Dimension("batch", 12), mm.Dimension("length", 4), mm.Dimension("d_model", 16)
FEEDS = {"step": np.int64(3), "row_offset": np.int64(0)}


def dropped(x, rate=0.25, name="mask", row_dim=B, broadcast_dims=()):
    """Return dropout of ``x`` with its counters fed."""
    return mm.dropout(x, rate, name, mm.placeholder("step", [], "int64"), mm.placeholder("row_offset", [], "int64"), row_dim, broadcast_dims)


def test_kept_elements_are_scaled_and_a_fraction_is_dropped():
    x = mm.full([B, L, D], 1.0)
    y = run({"y": dropped(x)}, FEEDS)[0]["y"]
    assert set(np.unique(y)) == {np.float32(0), np.float32(4 / 3)} and abs((y == 0).mean() - 0.25) < 0.05


def test_rate_0_is_the_tensor_itself():
    x = mm.placeholder("x", [B, D])
    assert dropped(x, rate=0.0) is x


@pytest.mark.parametrize("row_dim, broadcast", [(B, ()), (B, (L,)), (B, (L, D)), (L, ()), (L, (B,)), (None, ()), (None, (L,))])
def test_gradients_equal_differences_and_no_layout_changes_a_bit(row_dim, broadcast):
    v, values = variables_of(np.random.default_rng(9), x=[B, L, D])
    y = dropped(v["x"], row_dim=row_dim, broadcast_dims=broadcast)
    outputs, feeds = check_gradients(y, [v["x"]], values, FEEDS)
    every_layout({"y": y, "dx": outputs["d_x"]}, ["batch", "length", "d_model"], 0, feeds=feeds, values=values, n_least=15)
    mask = run({"y": y}, FEEDS, values=values)[0]["y"] != 0
    for d in broadcast:
        axis = ["batch", "length", "d_model"].index(d.name)
        assert (mask == mask.take([0], axis)).all()


def test_neither_memory_order_nor_microbatches_change_the_mask():
    x = np.random.default_rng(9).standard_normal((12, 4, 16)).astype(np.float32)
    whole = run({"y": dropped(mm.placeholder("x", [B, L, D]), broadcast_dims=[L])}, {**FEEDS, "x": x})[0]["y"]
    e = mm.Dimension("e", 16)
    turned = mm.einsum([mm.placeholder("x", [B, L, D]), mm.placeholder("w", [D, e])], [e, L, B])  # lies otherwise in memory
    turned = mm.rename(mm.transpose(turned, [B, L, e]), {"e": "d_model"})
    found = run({"y": dropped(turned, broadcast_dims=[L])}, {**FEEDS, "x": x, "w": np.eye(16, dtype=np.float32)})[0]["y"]
    assert_close(found, whole, 0)
    third = mm.Dimension("batch", 4)
    part = dropped(mm.placeholder("x", [third, L, D]), broadcast_dims=[L], row_dim=third)
    for i in (0, 4, 8):
        assert_close(run({"y": part}, {**FEEDS, "row_offset": np.int64(i), "x": x[i:i + 4]})[0]["y"], whole[i:i + 4], 0)


def test_seed_step_name_and_scope_change_the_mask():
    x = mm.full([B, D], 1.0)
    with mm.scope("block"):
        scoped = dropped(x)
    base, again = (run({"y": dropped(x)}, FEEDS)[0]["y"] for _ in "ab")
    assert np.array_equal(base, again)
    others = [run({"y": dropped(x)}, FEEDS, seed=1), run({"y": dropped(x)}, {**FEEDS, "step": np.int64(4)}),
              run({"y": dropped(x, name="other")}, FEEDS), run({"y": scoped}, FEEDS)]
    assert not any(np.array_equal(base, found["y"]) for found, _ in others)


def test_faults_are_named():
    x = mm.placeholder("x", [B, L, D])
    with pytest.raises(mm.MeshMpiError, match="rate 1.0"):
        dropped(x, rate=1.0)
    with pytest.raises(mm.MeshMpiError, match="batch .* is broadcast as well"):
        dropped(x, broadcast_dims=[B])
    with pytest.raises(mm.MeshMpiError, match="step is .* of int32. Give an int64 scalar"):
        mm.dropout(x, 0.1, "mask", mm.placeholder("s", [], "int32"), mm.placeholder("row_offset", [], "int64"))

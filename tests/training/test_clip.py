"""The global norm: each logical element once, whatever is split, replicated or tied; and what it costs."""

from __future__ import annotations

import numpy as np
import pytest
from training.optimizing import optimize

import mesh_mpi as mm
from mesh_mpi.optimize import Sgd, clip

RNG = np.random.default_rng(0)
DIMS = {"split": [mm.Dimension("a", 4), mm.Dimension("b", 6)], "replicated": [mm.Dimension("c", 5)], "both": [mm.Dimension("b", 6), mm.Dimension("a", 4)]}
VALUES = {name: RNG.standard_normal([d.size for d in dims]) for name, dims in DIMS.items()}
GRADS = {name: RNG.standard_normal(v.shape) for name, v in VALUES.items()}
NORM = np.sqrt(sum((g**2).sum() for g in GRADS.values()))


@pytest.mark.parametrize(("mesh", "layout", "storage"), [
    ("", "", {}), ("p:2", "a:p", {}), ("p:2;q:2", "a:p;b:q", {}), ("p:4", "a:p", {}), ("p:2", "", {"optimizer": "b:p"}), ("p:2;q:2", "a:q", {"optimizer": "b:p"})])
def test_the_norm_counts_each_element_once(mesh, layout, storage):
    found = optimize(Sgd(), VALUES, GRADS, 1, 1.0, mesh, layout, storage, dims=DIMS, clip_norm=0.5, count=8.0)[0]
    assert found["norm"] == pytest.approx(NORM / 8, rel=1e-14)
    for name, w in VALUES.items():
        np.testing.assert_allclose(found[name], w - GRADS[name] / 8 * min(1.0, 0.5 / (NORM / 8)), rtol=1e-13)


def test_gradients_within_the_bound_are_divided_by_the_count_only():
    found = optimize(Sgd(), VALUES, GRADS, 1, 1.0, dims=DIMS, clip_norm=NORM, count=2.0)[0]
    np.testing.assert_allclose(found["split"], VALUES["split"] - GRADS["split"] / 2, rtol=1e-14)


def test_no_targets_and_no_gradient_change_nothing():
    zeros = {name: np.zeros_like(g) for name, g in GRADS.items()}
    found = optimize(Sgd(), VALUES, zeros, 1, 1.0, dims=DIMS, clip_norm=1.0, count=0.0)[0]
    assert found["applied"] == 1 and found["norm"] == 0
    assert all((found[name] == VALUES[name]).all() for name in VALUES)


def model_gradients():
    """A tied table, a split weight and a replicated scale: gradients that are partial sums over the axis of the batch."""
    batch, d, f = mm.Dimension("batch", 8), mm.Dimension("d", 4), mm.Dimension("f", 6)
    x = mm.placeholder("x", [batch, d], "float64")
    tied = mm.Variable("tied", [f, d], mm.normal(), "float64")
    scale = mm.Variable("scale", [d], mm.ones(), "float64")
    y = mm.einsum([mm.relu(mm.einsum([x * scale, tied], [batch, f])), tied], [batch, d])
    loss = mm.reduce_sum(mm.square(y - x))
    return mm.gradients(loss, [tied, scale]), RNG.standard_normal((8, 4))


@pytest.mark.parametrize(("mesh", "layout"), [("data:2", "batch:data"), ("model:2", "f:model"), ("data:2;model:2", "batch:data;f:model"),
                                              ("p:2;q:2", "d:p;f:q")])
def test_the_norm_of_tied_and_partial_gradients_is_that_of_one_rank(mesh, layout):
    grads, x = model_gradients()
    norms = []
    for how in ({}, {"mesh_shape": mesh, "layout": layout}):
        program = mm.compile({"norm": clip(grads, mm.full((), 8.0, "float64")).norm}, **how)
        norms.append(mm.State(program).run(program, x=x)["norm"])
    assert norms[1] == pytest.approx(norms[0], rel=1e-13)


def test_the_norm_costs_one_reduction_of_one_number():
    grads, _ = model_gradients()
    how = {"mesh_shape": "data:2;model:2", "layout": "batch:data;f:model"}
    with_norm = mm.compile({"a": grads[0], "b": grads[1], "norm": clip(grads, mm.full((), 8.0, "float64")).norm}, **how).collectives()
    without = mm.compile({"a": grads[0], "b": grads[1]}, **how).collectives()
    assert sum(r.payload_bytes for r in with_norm) == sum(r.payload_bytes for r in without) + 8
    assert len(with_norm) == len(without) + 1

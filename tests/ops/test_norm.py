"""Layer and RMS normalisation: golden case, gradients, layouts, communication."""

import numpy as np
import pytest
from ops.checks import assert_close, check_gradients, every_layout, run, variables_of

import mesh_mpi as mm

B, L, D = mm.Dimension("batch", 4), mm.Dimension("length", 6), mm.Dimension("d_model", 12)


def test_layer_norm_of_1_2_3_4():
    d = mm.Dimension("d", 4)
    x = mm.placeholder("x", [d])
    y = mm.layer_norm(x, d, mm.full([d], 1.0), mm.full([d], 0.0))
    for mesh, layout in (("", ""), ("a:2", "d:a"), ("a:4", "d:a")):
        found, _ = run({"y": y}, {"x": np.float32([1, 2, 3, 4])}, mesh=mesh, layout=layout)
        assert_close(found["y"], np.float32([-1.3416404, -.4472136, .4472136, 1.3416404]), 1e-6)


def sample(kind):
    rng = np.random.default_rng(1)
    shapes = {"x": [B, L, D], "scale": [D], **({"bias": [D]} if kind == "layer_norm_bias" else {})}
    v, values = variables_of(rng, **shapes)
    factors = [v[n] for n in ("scale", "bias") if n in v]
    y = mm.rms_norm(v["x"], D, *factors, eps=0.1) if kind == "rms_norm" else mm.layer_norm(v["x"], D, *factors, eps=0.1)
    return y, v, values


KINDS = ["layer_norm", "layer_norm_bias", "rms_norm"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_norm_equals_its_formula_with_eps_inside_the_root(kind):
    y, _, values = sample(kind)
    x = values["x"]
    centred = x if kind == "rms_norm" else x - x.mean(-1, keepdims=True)
    expected = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 0.1) * values["scale"] + values.get("bias", 0)
    assert_close(run({"y": y}, values=values)[0]["y"], expected, 1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_a_norm_equal_differences_and_no_layout_changes_them(kind):
    y, v, values = sample(kind)
    outputs, feeds = check_gradients(y, list(v.values()), values)
    assert every_layout({"y": y, **outputs}, ["batch", "length", "d_model"], feeds=feeds, values=values) >= 12


@pytest.mark.parametrize("kind, forward, backward", [("layer_norm_bias", 2, 1), ("rms_norm", 1, 1)])
def test_a_split_norm_reduces_row_sums_and_gathers_nothing(kind, forward, backward):
    y, v, _ = sample(kind)
    dy = mm.placeholder("dy", y.shape, "float64")
    dx, = mm.gradients(y, [v["x"]], [dy])
    rows = 4 * 6 * 8
    layout = {"mesh_shape": "a:2", "layout": "d_model:a"}
    assert [(c.name, c.payload_bytes) for c in mm.compile({"y": y}, **layout).collectives()] == [("allreduce", rows)] * forward
    both = mm.compile({"y": y, "dx": dx}, **layout).collectives()
    assert len(both) == forward + backward and both[-1].payload_bytes == rows * (2 if "layer" in kind else 1)
    assert not mm.compile({"y": y, "dx": dx}, mesh_shape="a:2", layout="batch:a").collectives()


def test_gradients_of_scale_and_bias_are_reduced_once_over_all_that_splits_the_rows():
    y, v, _ = sample("layer_norm_bias")
    grads = mm.gradients(y, [v["scale"], v["bias"]])
    collectives = mm.compile({"dscale": grads[0], "dbias": grads[1]}, mesh_shape="a:2;b:2", layout="batch:a;length:b").collectives()
    assert [(c.name, c.axes, c.n_members) for c in collectives] == [("allreduce", ("a", "b"), 2)]


def test_a_scale_of_other_dimensions_is_refused():
    with pytest.raises(mm.MeshMpiError, match=r"layer_norm: .*scale.*batch=4.* is to scale or shift d_model=12"):
        mm.layer_norm(mm.placeholder("x", [B, D]), D, mm.placeholder("scale", [B]))

"""Optimizers: golden cases, textbook formulas in NumPy, invariance of layout."""

from __future__ import annotations

import numpy as np
import pytest
from training.optimizing import optimize

import mesh_mpi as mm
from mesh_mpi.optimize import Adafactor, Adam, Sgd
from mesh_mpi.ops import factored_dims

W, G = np.array([[1.0, 2.0], [3.0, 4.0]]), np.array([[0.1, -0.2], [0.3, 0.4]])


def steps(optimizer, n_steps=2, rate=0.1, w=W, g=G, **options):
    return optimize(optimizer, {"w": w}, {"w": g}, n_steps, rate, **options)


def close(found, expected, tolerance=1e-6):
    np.testing.assert_allclose(found, np.array(expected), rtol=tolerance, atol=tolerance)


def test_gradient_descent_goes_down_the_gradient():
    close(steps(Sgd(), 1)[0]["w"], [[0.99, 2.02], [2.97, 3.96]], 1e-12)


def test_momentum_moves_in_the_first_step():
    first, second = steps(Sgd(momentum=0.9))
    close(first["w"], W - 0.1 * G, 1e-12)
    close(second["w"], W - 0.1 * G - 0.1 * 1.9 * G, 1e-12)


def test_adam_with_decay_and_without_bias_correction_gives_the_golden_values():
    first, second = steps(Adam(eps=1e-6, weight_decay=0.01, bias_correction=False))
    close(first["w"], [[0.6828722, 2.3141778], [2.6808057, 3.6797972]])
    close(second["w"], [[0.2573252, 2.7367752], [2.2531974, 3.2511818]])


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-14), ("float32", 1e-6)])
def test_adam_is_the_textbook_formula(dtype, tolerance):
    rng = np.random.default_rng(0)
    w, g = rng.standard_normal((6, 5)), rng.standard_normal((6, 5))
    history = steps(Adam(0.8, 0.95, 1e-7, 0.1), 5, 0.01, w, g, dtype=dtype, count=4.0)
    m = v = np.zeros_like(w)
    for t, found in enumerate(history, 1):
        mean = g / 4.0
        m, v = 0.8 * m + 0.2 * mean, 0.95 * v + 0.05 * mean**2
        w = w - 0.01 * (m / (1 - 0.8**t) / (np.sqrt(v / (1 - 0.95**t)) + 1e-7) + 0.1 * w)
        close(found["w"], w, tolerance)
        close(found["w/adam_m"], m, tolerance)
        close(found["w/adam_v"], v, tolerance)


def test_weight_decay_spares_variables_of_one_dimension_and_biases_of_several():
    values = {"w": np.ones((2, 3)), "scale": np.ones(3), "q/bias": np.ones((2, 3))}
    zero = {name: np.zeros_like(v) for name, v in values.items()}
    found = optimize(Adam(weight_decay=0.5), values, zero, 1, 0.1)[0]
    close(found["w"], 0.95 * np.ones((2, 3)), 1e-14)
    assert (found["scale"] == 1).all() and (found["q/bias"] == 1).all()


def test_adafactor_without_factoring_gives_the_golden_values():
    first, second = steps(Adafactor(), 2, 0.01)
    close(first["w"], [[0.9726139, 2.0273862], [2.9726138, 3.9726140]])
    close(second["w"], [[0.9453768, 2.0546234], [2.9453766, 3.9453769]])
    close(first["w/adafactor_v"], G**2)


def test_factored_adafactor_gives_the_golden_values():
    first, second = steps(Adafactor(min_dim_size_to_factor=2, decay=0.8, multiply_by_parameter_scale=False, clipping_threshold=None))
    close(first["w"], [[0.8267949, 2.2449489], [2.7676210, 3.7809107]])
    close(first["w/adafactor_vr"], [0.01, 0.02])
    close(first["w/adafactor_vc"], [0.005, 0.025])
    close(second["w"], [[0.6976955, 2.4275231], [2.5944159, 3.6176116]])
    close(second["w/adafactor_vr"], [0.018, 0.036])
    close(second["w/adafactor_vc"], [0.009, 0.045])


def test_clipped_adafactor_gives_the_golden_values():
    first, second = steps(Adafactor(min_dim_size_to_factor=2, decay=0.8, multiply_by_parameter_scale=False))
    close(first["w"], [[0.9209431, 2.1118033], [2.8939340, 3.9]])
    close(second["w"], [[0.8418862, 2.2236066], [2.7878680, 3.8]])


def test_adafactor_with_scale_clipping_and_momentum_gives_the_golden_values():
    w, g = np.array([[1.0, 2, 3], [4, 5, 6]]), np.array([[0.1, -0.2, 0.3], [0.4, 0.5, -0.6]])
    first, second = steps(Adafactor(beta1=0.9, min_dim_size_to_factor=2, decay=0.8), 2, 0.1, w, g)
    close(first["w"], [[0.9751962, 2.0379817, 2.9542639], [3.9576943, 4.9595113, 6.0390038]])
    close(first["w/adafactor_vr"], [0.0093333, 0.0513333], 1e-7)
    close(first["w/adafactor_vc"], [0.017, 0.029, 0.045])
    close(second["w"], [[0.9281287, 2.1100554, 2.8674757], [3.8774159, 4.8826804, 6.1130170]])


@pytest.mark.parametrize(("dims", "factored"), [
    ("a:128 b:128", "a b"), ("a:127 b:1024", None), ("a:256 b:128 c:512", "c a"), ("a:4 b:256 c:512", "c b"), ("a:512", None)])
def test_the_two_largest_dimensions_are_factored_if_both_are_large(dims, factored):
    shape = mm.Shape(mm.Dimension(n, int(s)) for n, s in (word.split(":") for word in dims.split()))
    found = factored_dims(shape)
    assert (found and " ".join(d.name for d in found)) == factored


@pytest.mark.parametrize("optimizer", [Adam(weight_decay=0.1), Sgd(momentum=0.9, weight_decay=0.1), Adafactor(min_dim_size_to_factor=4, beta1=0.5, weight_decay=0.1)],
                         ids=["adam", "sgd", "adafactor"])
@pytest.mark.parametrize(("mesh", "layout", "storage"), [
    ("p:2", "a:p", {}), ("p:2", "b:p", {}), ("p:2;q:2", "a:p;b:q", {}), ("p:4", "", {"optimizer": "b:p"}), ("p:2;q:2", "a:q", {"optimizer": "b:p"}),
    ("p:2", "", {"optimizer": "a:p", "parameters": "a:p"})])
def test_no_layout_or_storage_changes_a_step(optimizer, mesh, layout, storage):
    rng = np.random.default_rng(1)
    values = {"w": rng.standard_normal((4, 8)), "x": rng.standard_normal(8)}
    dims = {"w": [mm.Dimension("a", 4), mm.Dimension("b", 8)], "x": [mm.Dimension("b", 8)]}
    grads = {name: rng.standard_normal(v.shape) for name, v in values.items()}
    one, two = (optimize(optimizer, values, grads, 3, 0.1, **how, clip_norm=1.0, dims=dims)[-1]
                for how in ({}, {"mesh": mesh, "layout": layout, "storage": storage}))
    assert one.keys() == two.keys()
    for name in one:
        close(two[name], one[name], 1e-13)


@pytest.mark.parametrize("optimizer", [Adam(), Sgd(momentum=0.9), Adafactor(beta1=0.5)], ids=["adam", "sgd", "adafactor"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_gradient_that_is_not_finite_changes_nothing_to_the_bit(optimizer, bad):
    values = {"w": np.array([[1.0, -0.0], [3.0, 4.0]]), "x": np.ones(3)}
    grads = {"w": np.array([[0.1, bad], [0.3, 0.4]]), "x": np.ones(3)}
    found = optimize(optimizer, values, grads, 1, dtype="float32", dims={"w": [mm.Dimension("a", 2), mm.Dimension("b", 2)], "x": [mm.Dimension("c", 3)]})[0]
    assert found["applied"] == 0
    for name in values:
        assert found[name].tobytes() == values[name].astype(np.float32).tobytes()
    assert all(not found[name].any() for name in found if "/" in name)

"""Optimizer updates against their textbook formulas in float64."""

import numpy as np
import pytest

SHAPES = [(5,), (301, 211), (3, 70, 401)]


def _call(name, outs, ins, **params):
    from mesh_mpi.kernels import contract
    from mesh_mpi.kernels.cpu import KERNELS

    shapes = [o.shape for o in outs], [i.shape for i in ins]
    size = contract.KERNELS[name].scratch_bytes(*shapes, outs[0].dtype, params)
    KERNELS[name](outs, ins, np.empty(size, np.uint8), **params)()


def _scalars(dtype, *values):
    return tuple(np.array(v, np.int64 if isinstance(v, int) else dtype) for v in values)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bias_correction", [True, False])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adam(kernel, close, rng, dtype, shape, bias_correction, weight_decay):
    w, g, m = (rng.standard_normal(shape).astype(dtype) for _ in range(3))
    v = np.abs(rng.standard_normal(shape)).astype(dtype)
    lr, step, scale, apply = _scalars(dtype, 0.125, 3, 0.25, 1)
    params = {"beta1": 0.9, "beta2": 0.98, "eps": 1e-9, "weight_decay": weight_decay, "bias_correction": bias_correction}
    outs = tuple(np.empty_like(w) for _ in range(3))
    kernel("adam", outs, (w, g, m, v, lr, step, scale, apply), **params)
    grad, want_m, want_v = 0.25 * g.astype(np.float64), m.astype(np.float64), v.astype(np.float64)
    want_m = 0.9 * want_m + 0.1 * grad
    want_v = 0.98 * want_v + 0.02 * grad**2
    c1, c2 = (1 - 0.9**3, 1 - 0.98**3) if bias_correction else (1, 1)
    want_w = w - 0.125 * (want_m / c1 / (np.sqrt(want_v / c2) + 1e-9) + weight_decay * w.astype(np.float64))
    for found, expected in zip(outs, (want_w, want_m, want_v), strict=True):
        close(found, expected, 40)
    inplace = w.copy(), m.copy(), v.copy()
    _call("adam", inplace, (inplace[0], g, *inplace[1:], lr, step, scale, apply), **params)
    assert all(np.array_equal(a, b) for a, b in zip(inplace, outs, strict=True))


@pytest.mark.parametrize("name, n_slots", [("adam", 2), ("sgd", 1), ("adafactor_moment", 0)])
def test_a_step_that_is_not_applied_changes_no_bit(rng, dtype, name, n_slots):
    state = [rng.standard_normal((37, 11)).astype(dtype) for _ in range(1 + n_slots)]
    g = np.full((37, 11), np.nan, dtype)
    params, scalars = {
        "adam": ({"beta1": 0.9, "beta2": 0.98, "eps": 1e-9}, _scalars(dtype, 0.1, 1, 1.0, 0)),
        "sgd": ({"momentum": 0.9}, _scalars(dtype, 0.1, 1.0, 0)),
        "adafactor_moment": ({"eps1": 1e-30}, _scalars(dtype, 1.0, 0.9, 0)),
    }[name]
    ins = (state[0], g, *state[1:], *scalars)
    before = [x.copy() for x in state]
    outs = [np.empty_like(x) for x in state]
    _call(name, outs, ins, **params)
    assert all(np.array_equal(a, b) for a, b in zip(outs, before, strict=True))
    _call(name, state, ins, **params)
    assert all(np.array_equal(a, b) for a, b in zip(state, before, strict=True))


@pytest.mark.parametrize("momentum, nesterov", [(0.0, False), (0.9, False), (0.9, True)])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_sgd(kernel, close, rng, dtype, momentum, nesterov, weight_decay):
    w, g, v = (rng.standard_normal((203, 301)).astype(dtype) for _ in range(3))
    scalars = _scalars(dtype, 0.125, 0.5, 1)
    slots = (v,) if momentum else ()
    params = {"momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay}
    outs = tuple(np.empty_like(w) for _ in (w, *slots))
    kernel("sgd", outs, (w, g, *slots, *scalars), **params)
    grad = 0.5 * g.astype(np.float64) + weight_decay * w.astype(np.float64)
    new = momentum * v.astype(np.float64) + grad
    close(outs[0], w - 0.125 * (grad + momentum * new if nesterov else new))
    if momentum:
        close(outs[1], new)
    inplace = [x.copy() for x in (w, *slots)]
    _call("sgd", inplace, (inplace[0], g, *inplace[1:], *scalars), **params)
    assert all(np.array_equal(a, b) for a, b in zip(inplace, outs, strict=True))


@pytest.mark.parametrize("shape, axis0, axis1", [((301, 67), 0, 1), ((301, 67), 1, 0), ((3, 70, 41), 0, 2), ((9, 3, 5), 2, 1)])
def test_adafactor_sums(kernel, close, rng, dtype, shape, axis0, axis1):
    g = rng.standard_normal(shape).astype(dtype)
    square = (0.5 * g.astype(np.float64)) ** 2 + 1e-3
    rows, columns = (np.full(square.sum(a).shape, np.nan, dtype) for a in (axis0, axis1))
    kernel("adafactor_sums", (rows, columns), (g, np.array(0.5, dtype)), axis0=axis0, axis1=axis1, eps1=1e-3)
    close(rows, square.sum(axis0))
    close(columns, square.sum(axis1))


def test_adafactor_moment(kernel, close, rng, dtype):
    v, g = np.abs(rng.standard_normal((400, 211))).astype(dtype), rng.standard_normal((400, 211)).astype(dtype)
    out = np.empty_like(v)
    kernel("adafactor_moment", (out,), (v, g, *_scalars(dtype, 0.5, 0.75, 1)), eps1=1e-3)
    close(out, 0.75 * v.astype(np.float64) + 0.25 * ((0.5 * g.astype(np.float64)) ** 2 + 1e-3))

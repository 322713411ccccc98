"""Normalisations and softmax against a formula in float64."""

import numpy as np
import pytest

SHAPES = [(1, 7), (203, 67), (300, 512), (5, 70001)]


def _layer_norm_grad(dy, x, scale, eps, centred=True):
    mean = x.mean(1, keepdims=True) if centred else 0.0
    rstd = 1 / np.sqrt(((x - mean) ** 2).mean(1, keepdims=True) + eps)
    xhat, g = (x - mean) * rstd, dy * scale
    rest = g.mean(1, keepdims=True) if centred else 0.0
    dx = rstd * (g - rest - xhat * (g * xhat).mean(1, keepdims=True))
    return xhat, rstd[:, 0], dx, (dy * xhat).sum(0), dy.sum(0)


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_layer_norm_and_its_gradient(kernel, close, rng, dtype, shape, has_bias):
    x = (3 + rng.standard_normal((shape[0], shape[1] + 3))).astype(dtype)[:, : shape[1]]
    dy = rng.standard_normal(shape).astype(dtype)
    scale, bias = (rng.standard_normal(shape[1]).astype(dtype) for _ in range(2))
    y, mean, rstd = np.empty(shape, dtype), np.empty(2 * shape[0], dtype)[::2], np.empty(shape[0], dtype)
    ins = (x, scale, bias) if has_bias else (x, scale)
    kernel("layer_norm", (y, mean, rstd), ins, eps=1e-6, has_bias=has_bias)
    wide = [a.astype(np.float64) for a in (dy, x, scale)]
    xhat, want_rstd, *grads = _layer_norm_grad(*wide, 1e-6)
    close(y, xhat * scale + (bias if has_bias else 0))
    close(mean, wide[1].mean(1))
    close(rstd, want_rstd)
    dx, dscale, dbias = np.empty(shape, dtype), np.empty_like(scale), np.empty_like(scale)
    outs = (dx, dscale, dbias) if has_bias else (dx, dscale)
    kernel("layer_norm_grad", outs, (dy, x, mean, rstd, scale), has_bias=has_bias)
    for found, expected in zip(outs, grads, strict=False):
        close(found, expected, 200)
    aliased = dy.copy()
    call_once("layer_norm_grad", (aliased, *outs[1:]), (aliased, x, mean, rstd, scale), has_bias=has_bias)
    assert np.array_equal(aliased, dx)


def call_once(name, outs, ins, **params):
    from mesh_mpi.kernels import contract
    from mesh_mpi.kernels.cpu import KERNELS

    shapes = [o.shape for o in outs], [i.shape for i in ins]
    size = contract.KERNELS[name].scratch_bytes(*shapes, outs[0].dtype, params)
    KERNELS[name](outs, ins, np.empty(size, np.uint8) if size else None, **params)()


@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm_and_its_gradient(kernel, close, rng, dtype, shape):
    x, dy = (rng.standard_normal(shape).astype(dtype) for _ in range(2))
    scale = rng.standard_normal(shape[1]).astype(dtype)
    y, rstd = np.empty(shape, dtype), np.empty(shape[0], dtype)
    kernel("rms_norm", (y, rstd), (x, scale), eps=1e-6)
    wide = [a.astype(np.float64) for a in (dy, x, scale)]
    xhat, want_rstd, want_dx, want_dscale, _ = _layer_norm_grad(*wide, 1e-6, centred=False)
    close(y, xhat * scale)
    close(rstd, want_rstd)
    dx, dscale = np.empty(shape, dtype), np.empty_like(scale)
    kernel("rms_norm_grad", (dx, dscale), (dy, x, rstd, scale))
    close(dx, want_dx, 200)
    close(dscale, want_dscale, 200)
    aliased = x.copy()
    call_once("rms_norm_grad", (aliased, dscale), (dy, aliased, rstd, scale))
    assert np.array_equal(aliased, dx)
    aliased = x.copy()
    call_once("rms_norm", (aliased, rstd), (aliased, scale), eps=1e-6)
    assert np.array_equal(aliased, y)


@pytest.mark.parametrize("shape", SHAPES)
def test_softmax_its_gradient_and_logsumexp(kernel, close, rng, dtype, shape):
    x = (30 * rng.standard_normal(shape)).astype(dtype)
    x[0, : shape[1] // 2] = -np.inf
    dy = rng.standard_normal(shape).astype(dtype)
    wide = x.astype(np.float64)
    e = np.exp(wide - wide.max(1, keepdims=True))
    p = e / e.sum(1, keepdims=True)
    y = np.empty((shape[0], shape[1] + 1), dtype)[:, :-1]
    kernel("softmax", (y,), (x,))
    close(y, p, 200)
    lse = np.empty(shape[0], dtype)
    kernel("logsumexp", (lse,), (x,))
    close(lse, np.log(e.sum(1)) + wide.max(1))
    dx = np.empty(shape, dtype)
    kernel("softmax_grad", (dx,), (y, dy))
    close(dx, p * (dy - (p * dy).sum(1, keepdims=True)), 200)
    for aliased in (0, 1):
        ins = [y.copy(), dy.copy()]
        call_once("softmax_grad", (ins[aliased],), tuple(ins))
        assert np.array_equal(ins[aliased], dx)
    call_once("softmax", (x,), (x,))
    assert np.array_equal(x, y)


def test_a_row_of_minus_infinity_gives_zeros(kernel, dtype):
    x, y, lse = np.full((2, 5), -np.inf, dtype), np.empty((2, 5), dtype), np.empty(2, dtype)
    x[1, 2] = 3
    kernel("softmax", (y,), (x,))
    kernel("logsumexp", (lse,), (x,))
    assert not y[0].any() and y[1, 2] == 1 and np.isneginf(lse[0]) and lse[1] == 3

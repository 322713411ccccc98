"""Layer and RMS normalisation over the last axis, and their gradients.

Suffixes: R rows, D normalised size. A block of rows stays in the L2 cache through all its passes. Row sums go through
BLAS (a product with a vector), three times as fast as ``add.reduce``; sums over rows go through a pairwise tree.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from ..contracts.rows import norm_rows
from .blocks import Arrays, Call, chain, constant, ones, pairwise, run, scratch_arrays, spans, ufunc


def layer_norm(
    outs: Arrays, ins: Arrays, scratch: np.ndarray | None, *, eps: float, has_bias: bool
) -> Callable[[], None]:
    """outs y_RD, mean_R, rstd_R; ins x_RD, scale_D, [bias_D]."""
    y_RD, mean_R, rstd_R = outs
    x_RD, scale_D = ins[:2]
    n_rows, width = x_RD.shape
    params = {"eps": eps, "has_bias": has_bias}
    buffers = scratch_arrays("layer_norm", outs, ins, scratch, params)
    dtype = x_RD.dtype
    average_D = np.full(width, 1 / width, dtype)
    calls: list[Call] = []
    for r0, r1 in spans(n_rows, norm_rows(n_rows, width, dtype.itemsize)):
        x, y = x_RD[r0:r1], y_RD[r0:r1]
        mean, rstd = buffers["a"][: r1 - r0], buffers["b"][: r1 - r0]
        calls += [
            partial(np.matmul, x, average_D, mean),
            ufunc(np.subtract, x, mean[:, None], out=y),
            *_inverse_root(y, rstd, width, eps),
            ufunc(np.multiply, y, rstd[:, None], out=y),
            ufunc(np.multiply, y, scale_D, out=y),
        ]
        if has_bias:
            calls.append(ufunc(np.add, y, ins[2], out=y))
        calls += [partial(np.copyto, mean_R[r0:r1], mean), partial(np.copyto, rstd_R[r0:r1], rstd)]
    return run(calls)


def _inverse_root(x: np.ndarray, rstd: np.ndarray, width: int, eps: float) -> list[Call]:
    """rstd = 1 / sqrt(mean(x^2) + eps) of the rows of x."""
    dtype = x.dtype
    return [
        partial(np.vecdot, x, x, rstd),
        ufunc(np.multiply, rstd, constant(1 / width, dtype), out=rstd),
        ufunc(np.add, rstd, constant(eps, dtype), out=rstd),
        ufunc(np.sqrt, rstd, out=rstd),
        ufunc(np.true_divide, constant(1, dtype), rstd, out=rstd),
    ]


def layer_norm_grad(
    outs: Arrays, ins: Arrays, scratch: np.ndarray | None, *, has_bias: bool
) -> Callable[[], None]:
    """outs dx_RD, dscale_D, [dbias_D]; ins dy_RD, x_RD, mean_R, rstd_R, scale_D."""
    dy_RD, x_RD, mean_R, rstd_R, scale_D = ins
    buffers = scratch_arrays("layer_norm_grad", outs, ins, scratch, {"has_bias": has_bias})
    return _norm_grad(outs, dy_RD, x_RD, mean_R, rstd_R, scale_D, buffers)


def rms_norm(outs: Arrays, ins: Arrays, scratch: np.ndarray | None, *, eps: float) -> Callable[[], None]:
    """outs y_RD, rstd_R; ins x_RD, scale_D."""
    y_RD, rstd_R = outs
    x_RD, scale_D = ins
    n_rows, width = x_RD.shape
    buffers = scratch_arrays("rms_norm", outs, ins, scratch, {"eps": eps})
    calls: list[Call] = []
    for r0, r1 in spans(n_rows, norm_rows(n_rows, width, x_RD.itemsize)):
        x, y, rstd = x_RD[r0:r1], y_RD[r0:r1], buffers["b"][: r1 - r0]
        calls += [
            *_inverse_root(x, rstd, width, eps),
            ufunc(np.multiply, x, rstd[:, None], out=y),
            ufunc(np.multiply, y, scale_D, out=y),
            partial(np.copyto, rstd_R[r0:r1], rstd),
        ]
    return run(calls)


def rms_norm_grad(outs: Arrays, ins: Arrays, scratch: np.ndarray | None) -> Callable[[], None]:
    """outs dx_RD, dscale_D; ins dy_RD, x_RD, rstd_R, scale_D."""
    dy_RD, x_RD, rstd_R, scale_D = ins
    buffers = scratch_arrays("rms_norm_grad", outs, ins, scratch, {})
    return _norm_grad(outs, dy_RD, x_RD, None, rstd_R, scale_D, buffers)


def _norm_grad(outs: Arrays, dy_RD: np.ndarray, x_RD: np.ndarray, mean_R: np.ndarray | None, rstd_R: np.ndarray, scale_D: np.ndarray,
               buffers: dict[str, np.ndarray]) -> Callable[[], None]:
    """dx = rstd (g - mean(g) - xhat mean(g xhat)) with g = dy scale; without ``mean_R`` the term mean(g) is absent.

    With c = x - mean, what is taken from rstd g is c times one number a row, plus another, so xhat is never made.
    """
    dx_RD, n_sums, centred = outs[0], len(outs) - 1, mean_R is not None
    n_rows, width = x_RD.shape
    rows = norm_rows(n_rows, width, x_RD.itemsize)
    ones_R = ones(rows, x_RD.dtype)
    # The scale divided by D, contiguous: products with it are means.
    average_D = buffers["average"]
    levels = buffers["levels"]

    def leaf(block: int, level: int) -> Call:
        r0, r1 = block * rows, min(n_rows, (block + 1) * rows)
        n = r1 - r0
        dy, x, dx = dy_RD[r0:r1], x_RD[r0:r1], dx_RD[r0:r1]
        taken, work = buffers["taken"][:n], buffers["work"][:n]
        shift, factor, rstd = buffers["a"][:n], buffers["b"][:n], buffers["c"][:n]
        calls: list[Call] = [partial(np.copyto, rstd, rstd_R[r0:r1])]
        if centred:
            calls.append(ufunc(np.subtract, x, mean_R[r0:r1, None], out=taken))
        c = taken if centred else x
        calls += [
            ufunc(np.multiply, dy, c, out=work),
            partial(np.matmul, rstd, work, levels[level, 0]),
            partial(np.matmul, work, average_D, factor),
            *(ufunc(np.multiply, factor, rstd, out=factor) for _ in range(3)),
            ufunc(np.multiply, c, factor[:, None], out=taken),
        ]
        if n_sums == 2:
            calls.append(partial(np.matmul, ones_R[:n], dy, levels[level, 1]))
        if centred:
            calls += [
                partial(np.matmul, dy, average_D, shift),
                ufunc(np.multiply, shift, rstd, out=shift),
                ufunc(np.add, taken, shift[:, None], out=taken),
            ]
        calls += [
            ufunc(np.multiply, dy, scale_D, out=work),
            ufunc(np.multiply, work, rstd[:, None], out=work),
            ufunc(np.subtract, work, taken, out=dx),
        ]
        return chain(calls)

    def add(level: int) -> Call:
        here, above = levels[level, :n_sums], levels[level + 1, :n_sums]
        return ufunc(np.add, here, above, out=here)

    if not n_rows:
        return run([partial(out.fill, 0) for out in outs[1:]])
    calls: list[Call] = [ufunc(np.multiply, scale_D, constant(1 / width, x_RD.dtype), out=average_D)]
    calls += pairwise(-(-n_rows // rows), leaf, add)
    calls += [partial(np.copyto, out, levels[0, i]) for i, out in enumerate(outs[1:])]
    return run(calls)


KERNELS = {
    "layer_norm": layer_norm,
    "layer_norm_grad": layer_norm_grad,
    "rms_norm": rms_norm,
    "rms_norm_grad": rms_norm_grad,
}

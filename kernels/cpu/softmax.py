"""``softmax``, its gradient and ``logsumexp`` over the last axis.

Suffixes: R rows, D the size of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from ..contracts.rows import softmax_rows
from .blocks import Arrays, Call, constant, ones, reduction, run, scratch_arrays, spans, ufunc


def row_sums(x: np.ndarray, out: np.ndarray, ones_D: np.ndarray) -> Call:
    """Sums of the rows of ``x``: a product with ones, which BLAS makes three times as fast as ``add.reduce``."""
    return partial(np.matmul, x, ones_D, out)


def exponentials(x: np.ndarray, work: np.ndarray, m: np.ndarray, s: np.ndarray, ones_D: np.ndarray) -> list[Call]:
    """work = exp(x - m), with m the row maxima and s the row sums of work.

    A row of -inf alone gets the lowest finite number as its m, so that it becomes zeros and not NaN.
    """
    lowest = constant(np.finfo(x.dtype).min, x.dtype)
    return [
        reduction(np.maximum, x, 1, m),
        ufunc(np.maximum, m, lowest, out=m),
        ufunc(np.subtract, x, m[:, None], out=work),
        ufunc(np.exp, work, out=work),
        row_sums(work, s, ones_D),
    ]


def softmax(outs: Arrays, ins: Arrays, scratch: np.ndarray | None) -> Callable[[], None]:
    """outs y_RD; ins x_RD."""
    y_RD, x_RD = outs[0], ins[0]
    n_rows, width = x_RD.shape
    buffers = scratch_arrays("softmax", outs, ins, scratch, {})
    ones_D, tiny = ones(width, x_RD.dtype), constant(np.finfo(x_RD.dtype).tiny, x_RD.dtype)
    calls: list[Call] = []
    for r0, r1 in spans(n_rows, softmax_rows(n_rows, width, x_RD.itemsize)):
        y, m, s = y_RD[r0:r1], buffers["a"][: r1 - r0], buffers["b"][: r1 - r0]
        calls += [
            *exponentials(x_RD[r0:r1], y, m, s, ones_D),
            ufunc(np.maximum, s, tiny, out=s),
            ufunc(np.true_divide, constant(1, s.dtype), s, out=s),
            ufunc(np.multiply, y, s[:, None], out=y),
        ]
    return run(calls)


def softmax_grad(outs: Arrays, ins: Arrays, scratch: np.ndarray | None) -> Callable[[], None]:
    """outs dx_RD; ins y_RD, dy_RD."""
    dx_RD, (y_RD, dy_RD) = outs[0], ins
    n_rows, width = y_RD.shape
    buffers = scratch_arrays("softmax_grad", outs, ins, scratch, {})
    calls: list[Call] = []
    for r0, r1 in spans(n_rows, softmax_rows(n_rows, width, y_RD.itemsize)):
        y, dy, n = y_RD[r0:r1], dy_RD[r0:r1], r1 - r0
        work, d = buffers["work"][:n], buffers["a"][:n]
        calls += [
            partial(np.vecdot, y, dy, d),
            ufunc(np.subtract, dy, d[:, None], out=work),
            ufunc(np.multiply, work, y, out=dx_RD[r0:r1]),
        ]
    return run(calls)


def logsumexp(outs: Arrays, ins: Arrays, scratch: np.ndarray | None) -> Callable[[], None]:
    """outs y_R; ins x_RD."""
    y_R, x_RD = outs[0], ins[0]
    n_rows, width = x_RD.shape
    buffers = scratch_arrays("logsumexp", outs, ins, scratch, {})
    ones_D = ones(width, x_RD.dtype)
    calls: list[Call] = []
    for r0, r1 in spans(n_rows, softmax_rows(n_rows, width, x_RD.itemsize)):
        n = r1 - r0
        work, m, s = buffers["work"][:n], buffers["a"][:n], buffers["b"][:n]
        calls += [
            *exponentials(x_RD[r0:r1], work, m, s, ones_D),
            partial(log_plus, s, m, y_R[r0:r1], s),
        ]
    return run(calls)


def log_plus(s: np.ndarray, m: np.ndarray, y: np.ndarray, work: np.ndarray) -> None:
    """y = log(s) + m; -inf where s is 0, quietly. ``work`` may be s."""
    with np.errstate(divide="ignore"):
        np.log(s, work)
    np.add(work, m, y)


KERNELS = {"softmax": softmax, "softmax_grad": softmax_grad, "logsumexp": logsumexp}

"""The optimizers' updates, each in as few passes over a block as NumPy allows.

``apply`` == 0 leaves everything as it was, to the bit. Factors that depend on 0-d inputs are computed once a call, in
float64, and kept in 0-d arrays that the bound passes read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import sqrt

import numpy as np

from ..contracts.updates import sums_rows
from .blocks import Arrays, Call, boxes, chain, constant, ones, pairwise, run, same_view, scratch_arrays, ufunc
from .movement import copy


def _unchanged(outs: Arrays, ins: Arrays) -> Callable[[], None]:
    """What a step that is not applied does: nothing in place, a copy otherwise."""
    calls = [copy((y,), (x,), None) for y, x in zip(outs, ins, strict=True) if not same_view(y, x)]
    return run(calls)


def adam(
    outs: Arrays,
    ins: Arrays,
    scratch: np.ndarray | None,
    *,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float = 0.0,
    bias_correction: bool = True,
) -> Callable[[], None]:
    """outs w, m, v; ins w, g, m, v, lr, step, scale, apply."""
    w, g, m, v, lr, step, scale, apply = ins
    work = scratch_arrays("adam", outs, ins, scratch, {})["work"]
    dtype = w.dtype
    b1, b2 = constant(beta1, dtype), constant(beta2, dtype)
    of_m, of_v, floor, rate, decay = (constant(0, dtype) for _ in range(5))
    calls: list[Call] = []
    for w1, m1, v1, w0, g0, m0, v0 in boxes([*outs, w, g, m, v], work.size):
        t = work[: w1.size].reshape(w1.shape)
        calls += [
            ufunc(np.multiply, g0, of_m, out=t),
            ufunc(np.multiply, m0, b1, out=m1),
            ufunc(np.add, m1, t, out=m1),
            ufunc(np.multiply, g0, of_v, out=t),
            ufunc(np.multiply, t, t, out=t),
            ufunc(np.multiply, v0, b2, out=v1),
            ufunc(np.add, v1, t, out=v1),
            ufunc(np.sqrt, v1, out=t),
            ufunc(np.add, t, floor, out=t),
            ufunc(np.true_divide, m1, t, out=t),
            ufunc(np.multiply, t, rate, out=t),
        ]
        if weight_decay:
            calls.append(ufunc(np.multiply, w0, decay, out=w1))
            w0 = w1
        calls.append(ufunc(np.subtract, w0, t, out=w1))
    passes, unchanged = run(calls), _unchanged(outs, (w, m, v))

    def call() -> None:
        if not int(apply):
            unchanged()
            return
        n, factor, alpha = int(step), float(scale), float(lr)
        of_m.fill((1 - beta1) * factor)
        of_v.fill(sqrt(1 - beta2) * factor)
        # mhat / (sqrt(vhat) + eps) = (root / (1 - beta1^n)) m / (sqrt(v) + eps root), root = sqrt(1 - beta2^n)
        root = sqrt(1 - beta2**n) if bias_correction else 1.0
        floor.fill(eps * root)
        rate.fill(alpha * root / (1 - beta1**n if bias_correction else 1.0))
        decay.fill(1 - alpha * weight_decay)
        passes()

    return call


def sgd(
    outs: Arrays,
    ins: Arrays,
    scratch: np.ndarray | None,
    *,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
) -> Callable[[], None]:
    """outs w, [v]; ins w, g, [v], lr, scale, apply."""
    w, g, slots, (lr, scale, apply) = ins[0], ins[1], ins[2:-3], ins[-3:]
    work = scratch_arrays("sgd", outs, ins, scratch, {})["work"]
    factors = [constant(0, w.dtype) for _ in range(4)]
    fixed = (constant(momentum, w.dtype), constant(weight_decay, w.dtype))
    calls: list[Call] = []
    for box in boxes([*outs, w, g, *slots], work.size):
        t = work[: box[0].size].reshape(box[0].shape)
        if momentum:
            calls += _momentum_passes(box, t, factors, fixed, nesterov)
        else:
            calls += _plain_passes(box, t, factors, weight_decay)
    passes, unchanged = run(calls), _unchanged(outs, (w, *slots))
    grad, rate, decay, rate_momentum = factors

    def call() -> None:
        if not int(apply):
            unchanged()
            return
        alpha, factor = float(lr), float(scale)
        rate.fill(alpha)
        grad.fill(factor)
        decay.fill(1 - alpha * weight_decay)
        rate_momentum.fill(alpha * momentum)
        passes()

    return call


def _plain_passes(box: Sequence[np.ndarray], t: np.ndarray, factors: Arrays, weight_decay: float) -> list[Call]:
    """w = (1 - lr wd) w - lr scale g"""
    w1, w0, g0 = box
    grad, rate, decay, _ = factors
    calls = [ufunc(np.multiply, g0, grad, out=t), ufunc(np.multiply, t, rate, out=t)]
    if weight_decay:
        calls.append(ufunc(np.multiply, w0, decay, out=w1))
        w0 = w1
    return [*calls, ufunc(np.subtract, w0, t, out=w1)]


def _momentum_passes(
    box: Sequence[np.ndarray], t: np.ndarray, factors: Arrays, fixed: Arrays, nesterov: bool
) -> list[Call]:
    """v = mu v + (scale g + wd w), then w -= lr v, or with Nesterov w -= lr (scale g + wd w) + lr mu v"""
    w1, v1, w0, g0, v0 = box
    grad, rate, decay, rate_momentum = factors
    mu, wd = fixed
    calls = [ufunc(np.multiply, v0, mu, out=v1)]
    if wd:
        calls += [ufunc(np.multiply, w0, wd, out=t), ufunc(np.add, v1, t, out=v1)]
    calls += [ufunc(np.multiply, g0, grad, out=t), ufunc(np.add, v1, t, out=v1)]
    if not nesterov:
        return [*calls, ufunc(np.multiply, v1, rate, out=t), ufunc(np.subtract, w0, t, out=w1)]
    calls.append(ufunc(np.multiply, t, rate, out=t))
    if wd:
        calls.append(ufunc(np.multiply, w0, decay, out=w1))
        w0 = w1
    return [
        *calls,
        ufunc(np.subtract, w0, t, out=w1),
        ufunc(np.multiply, v1, rate_momentum, out=t),
        ufunc(np.subtract, w1, t, out=w1),
    ]


def adafactor_sums(
    outs: Arrays, ins: Arrays, scratch: np.ndarray | None, *, axis0: int, axis1: int, eps1: float
) -> Callable[[], None]:
    """outs vr_sum (g without axis0), vc_sum (g without axis1); ins g, scale."""
    g, scale = ins
    axis0, axis1 = axis0 % g.ndim, axis1 % g.ndim
    params = {"axis0": axis0, "axis1": axis1}
    buffers = scratch_arrays("adafactor_sums", outs, ins, scratch, params)
    moved = np.moveaxis(g, (axis0, axis1), (-2, -1))
    # What is left of the pair of axes goes last in each output too.
    vr = np.moveaxis(outs[0], axis1 - (axis0 < axis1), -1)
    vc = np.moveaxis(outs[1], axis0 - (axis1 < axis0), -1)
    calls: list[Call] = []
    for lead in np.ndindex(*moved.shape[:-2]):
        calls += _two_sums(moved[lead], vr[lead], vc[lead], buffers)
    squared, floors = constant(0, g.dtype), (eps1 * g.shape[axis0], eps1 * g.shape[axis1])
    for out, floor in zip(outs, floors, strict=True):
        calls.append(ufunc(np.multiply, out, squared, out=out))
        calls.append(ufunc(np.add, out, constant(floor, g.dtype), out=out))
    passes = run(calls)

    def call() -> None:
        squared.fill(float(scale) ** 2)
        passes()

    return call


def _two_sums(g: np.ndarray, vr: np.ndarray, vc: np.ndarray, buffers: dict[str, np.ndarray]) -> list[Call]:
    """vr = sums of g^2 over rows, vc = over columns, from one pass over g."""
    n_rows, n_columns = g.shape
    rows, levels = sums_rows(n_rows, n_columns, g.itemsize), buffers["levels"]

    def leaf(block: int, level: int) -> Call:
        part = g[block * rows : (block + 1) * rows]
        squares = buffers["squares"][: len(part)]
        return chain(
            [
                ufunc(np.multiply, part, part, out=squares),
                partial(np.matmul, ones(len(part), g.dtype), squares, levels[level]),
                partial(np.matmul, squares, ones(n_columns, g.dtype), vc[block * rows : (block + 1) * rows]),
            ]
        )

    calls = pairwise(-(-n_rows // rows), leaf, lambda i: ufunc(np.add, levels[i], levels[i + 1], out=levels[i]))
    return [*calls, partial(np.copyto, vr, levels[0])]


def adafactor_moment(
    outs: Arrays, ins: Arrays, scratch: np.ndarray | None, *, eps1: float
) -> Callable[[], None]:
    """outs v; ins v, g, scale, decay, apply."""
    v, g, scale, decay, apply = ins
    work = scratch_arrays("adafactor_moment", outs, ins, scratch, {"eps1": eps1})["work"]
    factor, floor, keep = (constant(0, v.dtype) for _ in range(3))
    calls: list[Call] = []
    for v1, v0, g0 in boxes([outs[0], v, g], work.size):
        t = work[: v1.size].reshape(v1.shape)
        calls += [
            ufunc(np.multiply, g0, factor, out=t),
            ufunc(np.multiply, t, t, out=t),
            ufunc(np.add, t, floor, out=t),
            ufunc(np.multiply, v0, keep, out=v1),
            ufunc(np.add, v1, t, out=v1),
        ]
    passes, unchanged = run(calls), _unchanged(outs, (v,))

    def call() -> None:
        if not int(apply):
            unchanged()
            return
        share = 1 - float(decay)
        factor.fill(sqrt(share) * float(scale))
        floor.fill(share * eps1)
        keep.fill(float(decay))
        passes()

    return call


KERNELS = {
    "adam": adam,
    "sgd": sgd,
    "adafactor_sums": adafactor_sums,
    "adafactor_moment": adafactor_moment,
}

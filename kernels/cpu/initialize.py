"""``initialize``: first values of a variable, in float64 from one 64-bit word an element, rounded once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

import numpy as np

from ..contracts.movement import DRAW_ELEMENTS
from .blocks import Arrays, scratch_arrays
from .quantile import normal_quantile
from .random import Draw, Stream, element_strides, open_interval, plan_draws

# Words worth throwing away rather than placing the generator anew.
MAX_GAP = 800
# The normal distribution function at -2: truncated values lie within two standard deviations.
_TAIL = 0.022750131948179207200282637166533


def initialize(
    outs: Arrays,
    ins: Arrays,
    scratch: np.ndarray | None,
    *,
    init: Mapping[str, Any],
    name_key: int,
    global_shape: Sequence[int],
    start: Sequence[int],
) -> Callable[[], None]:
    """outs w; ins seed."""
    w, kind = outs[0], init["kind"]
    fixed = {"zeros": 0.0, "ones": 1.0, "constant": init.get("value", 0.0)}
    if kind in fixed:
        return partial(w.fill, fixed[kind])
    buffers = scratch_arrays("initialize", outs, ins, scratch, {"init": init})
    transform = partial(_TRANSFORMS[kind], init=init, buffers=buffers)
    strides = element_strides(global_shape)
    element = sum(s * stride for s, stride in zip(start, strides, strict=True))
    draws = plan_draws(w.shape, strides, element, DRAW_ELEMENTS, MAX_GAP)
    if not w.size:
        return lambda: None
    batches = _batches(w, draws)
    stream, seed = Stream(name_key), ins[0]
    drawn = buffers["drawn"]

    def call() -> None:
        stream.start(int(seed), 0)
        for batch, pieces, n in batches:
            for draw, first in batch:
                into = buffers["u"][first : first + draw.rows * draw.length]
                if draw.rows == 1:
                    stream.doubles(draw.element, into)
                    continue
                span = drawn[: draw.rows * draw.pitch]
                stream.doubles(draw.element, span)
                rows = span.reshape(draw.rows, draw.pitch)[:, : draw.length]
                np.copyto(into.reshape(draw.rows, draw.length), rows)
            u = buffers["u"][:n]
            open_interval(u)
            transform(u)
            for low, piece in pieces:
                np.copyto(piece, u[low : low + piece.size].reshape(piece.shape), "same_kind")

    return call


def _batches(w: np.ndarray, draws: Sequence[Draw]) -> list[tuple]:
    """(draws with their place in the batch, views of w with theirs, elements): what is transformed at once."""
    batches: list[tuple] = []
    batch: list[tuple[Draw, int]] = []
    first = n = 0
    for draw in draws:
        size = draw.rows * draw.length
        if n + size > DRAW_ELEMENTS:
            batches.append((batch, _c_order(w, first, n), n))
            batch, first, n = [], first + n, 0
        batch.append((draw, n))
        n += size
    return [*batches, (batch, _c_order(w, first, n), n)]


def _c_order(w: np.ndarray, first: int, n: int) -> list[tuple[int, np.ndarray]]:
    """Views that cover elements [first, first + n) of w in C order, each with its place among the n."""
    if w.flags.c_contiguous:
        return [(0, w.reshape(-1)[first : first + n])]
    if w.ndim == 1:
        return [(0, w[first : first + n])]
    inner = prod(w.shape[1:])
    pieces: list[tuple[int, np.ndarray]] = []
    done = 0
    while done < n:
        row, column = divmod(first + done, inner)
        if column == 0 and n - done >= inner:
            rows = (n - done) // inner
            pieces.append((done, w[row : row + rows]))
            done += rows * inner
        else:
            count = min(n - done, inner - column)
            pieces += [(done + low, piece) for low, piece in _c_order(w[row], column, count)]
            done += count
    return pieces


def _uniform(u: np.ndarray, init: Mapping[str, Any], buffers: dict[str, np.ndarray]) -> None:
    low, high = float(init["low"]), float(init["high"])
    np.multiply(u, high - low, u)
    np.add(u, low, u)


def _normal(u: np.ndarray, init: Mapping[str, Any], buffers: dict[str, np.ndarray]) -> None:
    normal_quantile(u, buffers)
    np.multiply(u, float(init.get("stddev", 1.0)), u)
    np.add(u, float(init.get("mean", 0.0)), u)


def _truncated_normal(u: np.ndarray, init: Mapping[str, Any], buffers: dict[str, np.ndarray]) -> None:
    np.multiply(u, 1 - 2 * _TAIL, u)
    np.add(u, _TAIL, u)
    _normal(u, init, buffers)


_TRANSFORMS = {"uniform": _uniform, "normal": _normal, "truncated_normal": _truncated_normal}

KERNELS = {"initialize": initialize}

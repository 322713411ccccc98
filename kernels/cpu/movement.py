"""``copy``, ``fill``, ``iota``, ``slice_at`` and ``write_at``: values that move and stay as they are."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from .blocks import Arrays, Call, collapse, run, same_view, spans

# A transposition writes one cache line of y at a time, from as many lines of x, which these many rows use up.
TILE_ROWS = 128
TILE_BYTES = 64
# Elements of a transposition below which tiles cost more calls than they save time.
MIN_TRANSPOSED = 1024


def copy(outs: Arrays, ins: Arrays, scratch: None) -> Callable[[], None]:
    """outs y; ins x, of one shape."""
    y, x = outs[0], ins[0]
    if same_view(y, x) or y.size == 0:
        return lambda: None
    y, x = collapse([y, x])
    return run(_copies(y, x))


def _copies(y: np.ndarray, x: np.ndarray) -> list[Call]:
    """One copy if both have their unit stride in the last axis, tiles if x has it elsewhere."""
    inner = [a for a in range(x.ndim - 1) if abs(x.strides[a]) == x.itemsize]
    if not inner or abs(x.strides[-1]) <= x.itemsize or x.shape[inner[0]] * x.shape[-1] < MIN_TRANSPOSED:
        return [partial(np.copyto, y, x, "unsafe")]
    y, x = np.moveaxis(y, inner[0], -2), np.moveaxis(x, inner[0], -2)
    calls = []
    for lead in np.ndindex(*y.shape[:-2]):
        for i0, i1 in spans(y.shape[-2], TILE_ROWS):
            for j0, j1 in spans(y.shape[-1], TILE_BYTES // y.itemsize):
                box = (*lead, slice(i0, i1), slice(j0, j1))
                calls.append(partial(np.copyto, y[box], x[box], "unsafe"))
    return calls


def fill(outs: Arrays, ins: Arrays, scratch: None, *, value: float) -> Callable[[], None]:
    """outs y."""
    return partial(outs[0].fill, value)


def iota(outs: Arrays, ins: Arrays, scratch: None, *, axis: int, start: int) -> Callable[[], None]:
    """outs y: start + index along ``axis``."""
    y = outs[0]
    axis %= y.ndim
    values = np.arange(start, start + y.shape[axis]).astype(y.dtype)
    shape = [1] * y.ndim
    shape[axis] = y.shape[axis]
    return partial(np.copyto, y, values.reshape(shape), "unsafe")


def slice_at(outs: Arrays, ins: Arrays, scratch: None, *, axis: int) -> Callable[[], None]:
    """outs y; ins x, index: a window of x as long as y along ``axis``."""
    y = outs[0]
    x, index = ins
    axis %= x.ndim
    moved = np.moveaxis(x, axis, 0)
    target = np.moveaxis(y, axis, 0)
    length = target.shape[0]

    def call() -> None:
        start = int(index)
        if not 0 <= start <= moved.shape[0] - length:
            raise IndexError(
                f"slice_at: a window of {length} at {start} does not fit into {moved.shape[0]} along axis {axis}."
            )
        np.copyto(target, moved[start : start + length], "unsafe")

    return call


def write_at(
    outs: Arrays, ins: Arrays, scratch: None, *, axis: int, start: int, extent: int
) -> Callable[[], None]:
    """outs x; ins x, value, index: the part of value that falls into [start, start + extent) along ``axis``."""
    out = outs[0]
    x, value, index = ins
    axis %= out.ndim
    whole = None if same_view(out, x) else copy((out,), (x,), None)
    target = np.moveaxis(out, axis, 0)
    source = np.moveaxis(value, axis, 0)
    length = source.shape[0]

    def call() -> None:
        if whole is not None:
            whole()
        first = int(index) - start
        low, high = max(0, first), min(extent, first + length)
        if low < high:
            np.copyto(target[low:high], source[low - first : high - first], "unsafe")

    return call


KERNELS = {"copy": copy, "fill": fill, "iota": iota, "slice_at": slice_at, "write_at": write_at}

"""``reduce``: sums, extremes and sums of squares over any axes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from ..contracts.rows import LEAF_ELEMENTS, reduce_leaf
from .blocks import Arrays, Call, collapse, pairwise, reduction, run, scratch_arrays, ufunc

_PLAIN = {"max": np.maximum, "min": np.minimum}


def reduce(
    outs: Arrays, ins: Arrays, scratch: np.ndarray | None, *, axes: Sequence[int], fn: str
) -> Callable[[], None]:
    """outs y: x without ``axes``; ins x."""
    x, y = ins[0], outs[0]
    axes = tuple(sorted(a % x.ndim for a in axes))
    if fn in _PLAIN:
        return reduction(_PLAIN[fn], x, axes, y)
    if x.size == 0:
        return partial(y.fill, 0)
    if not axes:
        return ufunc(np.square if fn == "sum_squares" else np.positive, x, out=y)  # type: ignore[return-value]
    buffers = scratch_arrays("reduce", outs, ins, scratch, {"axes": axes, "fn": fn})
    x, y, reduced = _canonical(x, y, axes)
    return run(_tree(x, y, reduced, buffers["levels"], fn))


def _canonical(x: np.ndarray, y: np.ndarray, axes: Sequence[int]) -> tuple[np.ndarray, np.ndarray, tuple[int, ...]]:
    """x with its axes in memory order and merged where they can be, y to match, and the axes of x to reduce."""
    expanded = np.broadcast_to(np.expand_dims(y, tuple(axes)), x.shape)
    x, wide = collapse([x, expanded])
    # The broadcast gave stride 0 to the reduced axes; no other axis of an output has it.
    reduced = tuple(a for a in range(x.ndim) if wide.strides[a] == 0)
    kept = [a for a in range(x.ndim) if a not in reduced]
    shape, strides = [x.shape[a] for a in kept], [wide.strides[a] for a in kept]
    return x, np.lib.stride_tricks.as_strided(y, shape, strides), reduced


def _tree(x: np.ndarray, y: np.ndarray, axes: Sequence[int], levels: np.ndarray, fn: str) -> list[Call]:
    """A pairwise sum over blocks of the first reduced axis, which strides furthest."""
    if not axes:  # all reduced axes had length 1
        return [ufunc(np.square if fn == "sum_squares" else np.positive, x, out=y)]
    axis = axes[0]
    innermost = axis == x.ndim - 1
    if fn == "sum" and innermost:
        return [reduction(np.add, x, axes[0], y)]  # pairwise in NumPy itself
    rows = LEAF_ELEMENTS if innermost else reduce_leaf(x.shape[axis], y.size)
    buffers = [y, *(level.reshape(y.shape) for level in levels[1:])]

    def leaf(block: int, level: int) -> Call:
        part = x[(slice(None),) * axis + (slice(block * rows, (block + 1) * rows),)]
        return _leaf(part, tuple(axes), buffers[level], fn)

    n = -(-x.shape[axis] // rows)
    return pairwise(n, leaf, lambda level: ufunc(np.add, buffers[level], buffers[level + 1], out=buffers[level]))


def _leaf(x: np.ndarray, axes: tuple[int, ...], y: np.ndarray, fn: str) -> Call:
    """One block's sum."""
    if fn == "sum":
        return reduction(np.add, x, axes, y)
    if axes == (x.ndim - 1,):
        return partial(np.vecdot, x, x, y)
    # einsum multiplies and adds in one pass, so the squares are never stored.
    every = list(range(x.ndim))
    return partial(np.einsum, x, every, x, every, [a for a in every if a not in axes], out=y)


KERNELS = {"reduce": reduce}

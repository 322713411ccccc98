"""``dropout``: x * keep / (1 - rate), keep being a function of the element's place in the whole batch.

The mask of one box of at most 16,384 elements exists at a time; where it is broadcast (over length, as the paper
does), a box of it meets many elements of x.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ..contracts.movement import MASK_ELEMENTS
from .blocks import Arrays, constant, frugal, scratch_arrays, spans
from .random import Draw, Stream, element_strides, keep_threshold, plan_draws

# 16-bit draws worth throwing away rather than placing the generator anew (about 3 us).
MAX_GAP = 3000


def dropout(
    outs: Arrays,
    ins: Arrays,
    scratch: np.ndarray | None,
    *,
    name_key: int,
    rate: float,
    global_shape: Sequence[int],
    start: Sequence[int],
    row_axis: int | None = None,
) -> Callable[[], None]:
    """outs y; ins x, seed, step, row_offset."""
    y, (x, seed, step, row_offset) = outs[0], ins
    buffers = scratch_arrays("dropout", outs, ins, scratch, {})
    keep, mask = buffers["keep"], buffers["mask"]
    scale, threshold = constant(1 / (1 - rate), x.dtype), keep_threshold(rate)
    strides = element_strides(global_shape)
    row_stride = 0 if row_axis is None else strides[row_axis]
    stream = Stream(name_key)
    work = []
    for box, shape, element in _mask_boxes(x.shape, global_shape, start, strides, keep.size):
        n = int(np.prod(shape))
        draws = plan_draws(shape, strides, element, MASK_ELEMENTS - 16, MAX_GAP)
        targets = [keep[d.at : d.at + d.rows * d.length].reshape(d.rows, d.length) for d in draws]
        pairs = list(zip(draws, targets, strict=True))
        box = (*box, ...)  # a view even of a 0-d array
        work.append((pairs, keep[:n], mask[:n], mask[:n].reshape(shape), x[box], y[box]))

    def call() -> None:
        stream.start(int(seed), int(step))
        shift = int(row_offset) * row_stride
        for draws, keep_flat, mask_flat, mask_box, x_box, y_box in work:
            for draw, target in draws:
                fill_keep(stream, draw, shift, threshold, target)
            np.multiply(keep_flat, scale, mask_flat)
            np.multiply(x_box, mask_box, y_box)

    return frugal(call)


def fill_keep(stream: Stream, draw: Draw, shift: int, threshold: np.ndarray, out: np.ndarray) -> None:
    """out [rows, length] = whether to keep each element of ``draw``, moved by ``shift`` elements."""
    values = stream.draws16(draw.element + shift, draw.rows * draw.pitch)
    np.greater_equal(values.reshape(draw.rows, draw.pitch)[:, : draw.length], threshold, out)


def _mask_boxes(
    shape: Sequence[int], global_shape: Sequence[int], start: Sequence[int], strides: Sequence[int], n_elements: int
):
    """(index of x, shape of the mask, its first element) of boxes whose masks have at most ``n_elements``."""
    shared = [g == 1 for g in global_shape]
    sizes = [1 if one else n for one, n in zip(shared, shape, strict=True)]
    axis, inner = len(sizes) - 1, 1
    while axis > 0 and inner * sizes[axis] <= n_elements:
        inner *= sizes[axis]
        axis -= 1
    rows = max(1, n_elements // inner)
    if 0 in shape:
        return
    for lead in np.ndindex(*sizes[:axis]):
        for low, high in spans(sizes[axis], rows) if sizes else [(0, 1)]:
            first = (*lead, low, *[0] * (len(sizes) - axis - 1))
            box_sizes = (*[1] * axis, high - low, *sizes[axis + 1 :])
            index = tuple(
                slice(None) if one else slice(i, i + n)
                for one, i, n in zip(shared, first, box_sizes, strict=False)
            )
            element = sum((i + s) * stride for i, s, stride in zip(first, start, strides, strict=False))
            yield index, box_sizes[: len(sizes)], element


KERNELS = {"dropout": dropout}

"""``elementwise``: a short program of steps, run block by block so that temporaries never leave the cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod

import numpy as np

from ..contracts.elementwise import block_elements
from .blocks import Arrays, Call, boxes, constant, run, scratch_arrays, ufunc
from .functions import COMPOSITE, SIMPLE


def elementwise(
    outs: Arrays,
    ins: Arrays,
    scratch: np.ndarray | None,
    *,
    steps: Sequence[tuple],
    temp_dtypes: Sequence[str] = (),
    in_dtypes: Sequence[str] | None = None,
    out_dtypes: Sequence[str] | None = None,
) -> Callable[[], None]:
    """Outs and ins of one n-d shape; see the contract for the steps."""
    params = {
        "steps": steps,
        "temp_dtypes": tuple(temp_dtypes),
        "in_dtypes": tuple(in_dtypes or (x.dtype.name for x in ins)),
        "out_dtypes": tuple(out_dtypes or (x.dtype.name for x in outs)),
    }
    buffers = scratch_arrays("elementwise", outs, ins, scratch, params)
    block = block_elements(prod(outs[0].shape), params)
    calls: list[Call] = []
    for box in boxes([*outs, *ins], block):
        calls += _bind_box(box[: len(outs)], box[len(outs) :], buffers, steps)
    return run(calls)


def _bind_box(outs: Arrays, ins: Arrays, buffers: dict[str, np.ndarray], steps: Sequence[tuple]) -> list[Call]:
    """The calls of all steps on one block."""
    shape = outs[0].shape
    n = prod(shape)

    def resolve(ref: tuple) -> np.ndarray:
        kind, index = ref
        if kind == "t":
            return buffers[f"t{index}"][:n].reshape(shape)
        return (ins if kind == "i" else outs)[index]

    def work(index: int, dtype: np.dtype) -> np.ndarray:
        return buffers[f"w{index}"][: n * dtype.itemsize].view(dtype).reshape(shape)

    calls: list[Call] = []
    for fn, srcs, dst in steps:
        target = resolve(dst)
        arrays = [None if src[0] == "c" else resolve(src) for src in srcs]
        operands = [
            _number(src[1], arrays, target, fn) if array is None else array
            for src, array in zip(srcs, arrays, strict=True)
        ]
        if fn in SIMPLE:
            calls.append(ufunc(SIMPLE[fn], *operands, out=target))
        elif fn in ("cast", "copy"):
            calls.append(partial(np.copyto, target, operands[0], "unsafe"))
        else:
            calls += COMPOSITE[fn](operands, target, work)
    return calls


def _number(value: float, arrays: list, target: np.ndarray, fn: str) -> np.ndarray:
    """A constant in the dtype of the arrays it meets, unless that would lose its fraction."""
    beside = arrays[1:] if fn == "where" else arrays
    dtype = next((a.dtype for a in beside if a is not None), target.dtype)
    if dtype.kind != "f" and value != int(value):
        dtype = target.dtype if target.dtype.kind == "f" else np.dtype(np.float64)
    return constant(value, dtype)


KERNELS = {"elementwise": elementwise}

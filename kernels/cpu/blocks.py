"""Cutting arrays into blocks when a kernel is bound, so that a call is a flat loop over ready views."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from math import prod

import numpy as np
from numpy.lib.stride_tricks import as_strided

from .. import contract

Call = Callable[[], object]
Arrays = Sequence[np.ndarray]


# NumPy's iterator allocates this many elements for each operand that is broadcast or cast. 8192, the default, costs
# up to 64 KiB an operand and evicts what a block has in the L1 cache; 2048 is as fast or faster everywhere.
_BUFFER_ELEMENTS = 2048


def chain(calls: Sequence[Call]) -> Call:
    """One callable that makes all ``calls`` in order."""
    calls = tuple(calls)
    if len(calls) == 1:
        return calls[0]

    def make_calls() -> None:
        for call in calls:
            call()

    return make_calls


def frugal(function: Call) -> Callable[[], None]:
    """``function`` with small buffers inside NumPy."""

    def call() -> None:
        before = np.setbufsize(_BUFFER_ELEMENTS)
        try:
            function()
        finally:
            np.setbufsize(before)

    return call


def run(calls: Sequence[Call]) -> Callable[[], None]:
    """A kernel's call: all ``calls`` in order, with small buffers inside NumPy."""
    return frugal(chain(calls))


def ufunc(function: np.ufunc, *args: np.ndarray, out: np.ndarray) -> Call:
    """``function(*args)`` into ``out``, bound. Outputs by position are faster, but numpy deprecates it for two."""
    if function is np.maximum or function is np.minimum:
        return partial(function, *args, out=out)
    return partial(function, *args, out)


def reduction(function: np.ufunc, x: np.ndarray, axis: int | tuple[int, ...], out: np.ndarray) -> Call:
    """``function.reduce(x, axis)`` into ``out``, bound."""
    return partial(function.reduce, x, axis, None, out)


def constant(value: float, dtype: np.dtype) -> np.ndarray:
    """A 0-d array: cheaper than a Python number, which numpy would convert at every call."""
    return np.array(value, dtype)


@lru_cache(maxsize=32)
def full(n: int, value: float, dtype: np.dtype) -> np.ndarray:
    """``n`` times ``value``, shared by all kernels: minima and maxima with an array are three times as fast as with
    a number."""
    vector = np.full(n, value, dtype)
    vector.flags.writeable = False
    return vector


@lru_cache(maxsize=64)
def ones(n: int, dtype: np.dtype) -> np.ndarray:
    """A vector of ones that all kernels share; products with it are sums."""
    vector = np.ones(n, dtype)
    vector.flags.writeable = False
    return vector


def scratch_arrays(
    name: str, outs: Arrays, ins: Arrays, scratch: np.ndarray | None, params: dict
) -> dict[str, np.ndarray]:
    """The pieces that the contract of ``name`` lists, carved out of ``scratch``."""
    pieces = contract.KERNELS[name].pieces(
        [out.shape for out in outs], [x.shape for x in ins], outs[0].dtype.name, params
    )
    arrays, offset = {}, 0
    for piece in pieces:
        n_bytes = prod(piece.shape) * contract.itemsize(piece.dtype)
        if scratch is None or offset + n_bytes > scratch.size:
            given = 0 if scratch is None else scratch.size
            raise ValueError(f"{name}: scratch of {given} bytes is too small. Ask contract.scratch_bytes for its size.")
        arrays[piece.name] = scratch[offset : offset + n_bytes].view(piece.dtype).reshape(piece.shape)
        offset += -(-n_bytes // 64) * 64
    return arrays


def spans(n: int, block: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of blocks of ``block`` that cover ``n``."""
    for start in range(0, n, max(1, block)):
        yield start, min(n, start + block)


def same_view(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether both are exactly the same elements in the same order."""
    return (
        a.__array_interface__["data"][0] == b.__array_interface__["data"][0]
        and a.shape == b.shape
        and a.strides == b.strides
        and a.dtype == b.dtype
    )


def collapse(arrays: Arrays) -> list[np.ndarray]:
    """The same elements with as few axes as all ``arrays`` (of one shape) allow, the first one's memory order last."""
    shape = arrays[0].shape
    axes = sorted((a for a in range(len(shape)) if shape[a] != 1), key=lambda a: -abs(arrays[0].strides[a]))
    merged: list[list] = []  # [size, strides of each array]
    for axis in axes:
        strides = [x.strides[axis] for x in arrays]
        if merged and all(up == down * shape[axis] for up, down in zip(merged[-1][1], strides, strict=True)):
            merged[-1] = [merged[-1][0] * shape[axis], strides]
        else:
            merged.append([shape[axis], strides])
    sizes = tuple(size for size, _ in merged)
    return [
        as_strided(x, sizes, tuple(strides[i] for _, strides in merged), writeable=x.flags.writeable)
        for i, x in enumerate(arrays)
    ]


def boxes(arrays: Arrays, n_elements: int) -> Iterator[tuple[np.ndarray, ...]]:
    """Blocks of at most ``n_elements`` that cover ``arrays``, which share one shape."""
    if prod(arrays[0].shape) == 0:
        return
    arrays = collapse(arrays)
    shape = arrays[0].shape
    axis, inner = len(shape) - 1, 1
    while axis > 0 and inner * shape[axis] <= n_elements:
        inner *= shape[axis]
        axis -= 1
    if axis < 0:  # one element
        yield tuple(arrays)
        return
    rows = max(1, n_elements // inner)
    for lead in np.ndindex(*shape[:axis]):
        for start, stop in spans(shape[axis], rows):
            yield tuple(x[(*lead, slice(start, stop))] for x in arrays)


def pairwise(n: int, leaf: Callable[[int, int], Call], add: Callable[[int], Call]) -> list[Call]:
    """Calls that sum blocks 0..n-1 as a balanced tree.

    ``leaf(block, level)`` puts a block's sum into buffer ``level``; ``add(level)`` adds buffer level + 1 to buffer
    level. The sum ends in buffer 0. Column sums made in one sweep lose a digit and more in float32; this does not.
    """
    calls: list[Call] = []

    def visit(start: int, stop: int, level: int) -> None:
        if stop - start == 1:
            calls.append(leaf(start, level))
            return
        middle = (start + stop + 1) // 2
        visit(start, middle, level)
        visit(middle, stop, level + 1)
        calls.append(add(level))

    if n:
        visit(0, n, 0)
    return calls

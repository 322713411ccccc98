"""``matmul``: BLAS through ``numpy.matmul``, which takes transposed and strided operands as they are.

Suffixes: M, N, K sizes of the product.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from ..contracts.products import accumulate_block
from .blocks import Arrays, Call, run, scratch_arrays, spans, ufunc


def matmul(
    outs: Arrays, ins: Arrays, scratch: np.ndarray | None, *, accumulate: bool = False
) -> Callable[[], None]:
    """outs c[.., M, N]; ins a[.., M, K], b[.., K, N]."""
    c, (a, b) = outs[0], ins
    for name, x in (("a", a), ("b", b)):
        _check_operand(name, x)
    if c.shape[-1] > 1 and c.strides[-1] != c.itemsize:
        raise ValueError(f"matmul: c has last stride {c.strides[-1]}, not {c.itemsize}. Copy to it in a step after.")
    if not accumulate:
        a, b, c = _one_product(a, b, c)
        return partial(np.matmul, a, b, c)
    product = scratch_arrays("matmul", outs, ins, scratch, {"accumulate": True})["product"]
    rows, columns = accumulate_block(c.shape[-2], c.shape[-1], c.itemsize)
    calls: list[Call] = []
    for lead in np.ndindex(*c.shape[:-2]):
        for m0, m1 in spans(c.shape[-2], rows):
            for n0, n1 in spans(c.shape[-1], columns):
                part = product[: (m1 - m0) * (n1 - n0)].reshape(m1 - m0, n1 - n0)
                block = c[lead][m0:m1, n0:n1]
                calls.append(partial(np.matmul, a[lead][m0:m1], b[lead][:, n0:n1], part))
                calls.append(ufunc(np.add, block, part, out=block))
    return run(calls)


def _check_operand(name: str, x: np.ndarray) -> None:
    """BLAS needs a unit stride and the other one at least as long as the row; numpy would copy, or loop in C."""
    rows, columns = x.strides[-2:]
    n_rows, n_columns = x.shape[-2:]
    by_rows = (n_columns <= 1 or columns == x.itemsize) and (n_rows <= 1 or rows >= n_columns * x.itemsize)
    by_columns = (n_rows <= 1 or rows == x.itemsize) and (n_columns <= 1 or columns >= n_rows * x.itemsize)
    if x.dtype.kind == "f" and not (by_rows or by_columns):
        raise ValueError(
            f"matmul: {name} has shape {x.shape} and strides {x.strides}, which BLAS does not take. "
            "Copy it to a contiguous array first."
        )


def _one_product(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A batch whose right operand is the same for all becomes one tall product."""
    if c.ndim != 3 or b.strides[0] != 0 or a.strides[0] == 0 or c.shape[0] == 1:
        return a, b, c
    n_batch, n_rows, _ = c.shape
    for x in (a, c):
        if x.strides[0] != n_rows * x.strides[1]:
            return a, b, c
    # Rows follow one another over the whole batch, so these reshapes are views.
    return (
        np.lib.stride_tricks.as_strided(a, (n_batch * n_rows, a.shape[2]), a.strides[1:]),
        b[0],
        np.lib.stride_tricks.as_strided(c, (n_batch * n_rows, c.shape[2]), c.strides[1:]),
    )


KERNELS = {"matmul": matmul}

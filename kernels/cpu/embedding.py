"""``embedding``: rows of a table; ``scatter_add`` and ``embedding_grad``: its adjoint.

Suffixes: R rows, V rows of this slice of the table, D embedded size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from ..contracts.movement import LOOKUP_ROWS
from .blocks import Arrays, Call, constant, run, scratch_arrays, spans, ufunc
from .movement import copy

# Rows scattered between two conversions of indices to Python numbers, which take memory.
SCATTER_ROWS = 512


def embedding(outs: Arrays, ins: Arrays, scratch: np.ndarray | None, *, offset: int) -> Callable[[], None]:
    """outs y_RD; ins table_VD, ids_R."""
    y_RD, (table_VD, ids_R) = outs[0], ins
    buffers = scratch_arrays("embedding", outs, ins, scratch, {"offset": offset})
    # np.take would copy a table that is not contiguous, and buffer an output that is not.
    direct = y_RD.flags.c_contiguous and y_RD.dtype == table_VD.dtype
    take = _take if table_VD.flags.c_contiguous else _take_by_row
    rows = LOOKUP_ROWS if direct else len(buffers["rows"])
    rows = min(rows, len(buffers["index"]))
    last = constant(len(table_VD) - 1, np.int64)
    calls: list[Call] = []
    for r0, r1 in spans(len(y_RD), rows):
        n = r1 - r0
        local, clipped, y = buffers["inside"][:n], buffers["index"][:n], y_RD[r0:r1]
        calls += [
            ufunc(np.subtract, ids_R[r0:r1], constant(offset, np.int64), out=local),
            ufunc(np.maximum, local, constant(0, np.int64), out=clipped),
            ufunc(np.minimum, clipped, last, out=clipped),
        ]
        target = y if direct else buffers["rows"][:n]
        calls.append(partial(take, table_VD, clipped, target))
        if not direct:
            calls.append(partial(np.copyto, y, target, "unsafe"))
        calls.append(partial(_clear_outside, y, local, clipped))
    return run(calls)


def _take(table: np.ndarray, index: np.ndarray, out: np.ndarray) -> None:
    # Any mode but "clip" makes numpy gather into a copy of out first.
    table.take(index, axis=0, out=out, mode="clip")


def _take_by_row(table: np.ndarray, index: np.ndarray, out: np.ndarray) -> None:
    for row, i in zip(out, index, strict=True):
        row[...] = table[i]


def _clear_outside(y: np.ndarray, local: np.ndarray, clipped: np.ndarray) -> None:
    """Zeros where the id was not in this slice: its index had to be clipped."""
    outside = local != clipped
    if outside.any():
        y[outside] = 0


def scatter_add(outs: Arrays, ins: Arrays, scratch: None, *, offset: int) -> Callable[[], None]:
    """outs table_VD; ins table_VD, ids_R, dy_RD."""
    table, ids_R, dy_RD = ins
    calls: list[Call] = [copy((outs[0],), (table,), None), *_scatter(outs[0], ids_R, dy_RD, offset)]
    return run(calls)


def embedding_grad(outs: Arrays, ins: Arrays, scratch: None, *, offset: int) -> Callable[[], None]:
    """outs table_VD; ins ids_R, dy_RD."""
    return run([partial(outs[0].fill, 0), *_scatter(outs[0], ins[0], ins[1], offset)])


def _scatter(table_VD: np.ndarray, ids_R: np.ndarray, dy_RD: np.ndarray, offset: int) -> list[Call]:
    return [
        partial(_add_rows, table_VD, ids_R[r0:r1], dy_RD[r0:r1], offset)
        for r0, r1 in spans(len(ids_R), SCATTER_ROWS)
    ]


def _add_rows(table: np.ndarray, ids: np.ndarray, dy: np.ndarray, offset: int) -> None:
    """Row after row: as fast as ``np.add.at`` for rows of this width, and the order of the sums is plain."""
    add, n = np.add, len(table)
    for i, row in zip(ids.tolist(), dy, strict=True):
        i -= offset
        if 0 <= i < n:
            target = table[i]
            add(target, row, target)


KERNELS = {"embedding": embedding, "scatter_add": scatter_add, "embedding_grad": embedding_grad}

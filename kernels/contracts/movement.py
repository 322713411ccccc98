"""Contracts of the kernels that place, gather or draw values without a reduction."""

from __future__ import annotations

from math import prod

from .base import (
    KernelContract,
    Params,
    Piece,
    Shapes,
    aliases,
    all_bytes,
    block_rows,
    flops_per_input,
    no_flops,
    no_pieces,
    output_bytes,
)  # fmt: skip

# Rows of a table looked up at once: the indices of a block stay small whatever the batch.
LOOKUP_ROWS = 1024
# Mask elements decided at once (16 bits each) and initial values drawn at once (64 bits each).
MASK_ELEMENTS = 16384
DRAW_ELEMENTS = 6144


def embedding_pieces(out_shapes: Shapes, in_shapes: Shapes, dtype: str, params: Params) -> tuple[Piece, ...]:
    """Return the scratch of ``embedding`` kernels, array by array."""
    n_rows, width = out_shapes[0]
    rows = block_rows(n_rows, 0 if width == 0 else 8 * width)
    rows = min(rows, LOOKUP_ROWS)
    return (
        Piece("index", (rows,), "int64"),
        Piece("inside", (rows,), "int64"),
        Piece("rows", (rows, width), dtype),
    )


def dropout_pieces(out_shapes: Shapes, in_shapes: Shapes, dtype: str, params: Params) -> tuple[Piece, ...]:
    """Return the scratch of ``dropout`` kernels, array by array."""
    n = min(MASK_ELEMENTS, max(1, prod(out_shapes[0])))
    return (Piece("keep", (n,), "bool"), Piece("mask", (n,), dtype))


def initialize_pieces(out_shapes: Shapes, in_shapes: Shapes, dtype: str, params: Params) -> tuple[Piece, ...]:
    """Return the scratch of ``initialize`` kernels, array by array."""
    if params["init"]["kind"] in ("zeros", "ones", "constant"):
        return ()
    return tuple(Piece(name, (DRAW_ELEMENTS,), "float64") for name in ("u", "drawn", "r", "num", "den"))


def _lookup_bytes(out_shapes: Shapes, in_shapes: Shapes, item: int, params: Params) -> int:
    return 2 * item * prod(out_shapes[0]) + 8 * prod(out_shapes[0][:1])


def _scatter_bytes(out_shapes: Shapes, in_shapes: Shapes, item: int, params: Params) -> int:
    return 3 * item * prod(in_shapes[-1])


def _scatter_grad_bytes(out_shapes: Shapes, in_shapes: Shapes, item: int, params: Params) -> int:
    return item * (prod(out_shapes[0]) + 3 * prod(in_shapes[-1]))


def _added(out_shapes: Shapes, in_shapes: Shapes, params: Params) -> int:
    return prod(in_shapes[-1])


def _window_bytes(out_shapes: Shapes, in_shapes: Shapes, item: int, params: Params) -> int:
    return 2 * item * min(prod(out_shapes[0]), prod(in_shapes[1]) or 1)


CONTRACTS = (
    KernelContract(
        name="copy",
        doc="outs y; ins x of the same shape, any strides, any dtypes (cast as astype does).",
        pieces=no_pieces, flops=no_flops, bytes_moved=all_bytes, may_alias=aliases((0, 0)), error_eps=0.5,
    ),
    KernelContract(
        name="fill",
        doc="outs y; no ins; param value.",
        pieces=no_pieces, flops=no_flops, bytes_moved=output_bytes, may_alias=aliases(), error_eps=0.5,
    ),
    KernelContract(
        name="iota",
        doc="outs y; no ins; y[..., i, ...] = start + i along axis. params axis, start.",
        pieces=no_pieces, flops=no_flops, bytes_moved=output_bytes, may_alias=aliases(), error_eps=0.5,
    ),
    KernelContract(
        name="slice_at",
        doc="outs y; ins x, index (0-d): y = x[index : index + y.shape[axis]] along axis. params axis.",
        pieces=no_pieces, flops=no_flops,
        bytes_moved=lambda outs, ins, item, params: 2 * item * prod(outs[0]),
        may_alias=aliases(), error_eps=0.0,
    ),
    KernelContract(
        name="write_at",
        doc="outs x; ins x, value, index (0-d, global): writes value at [index, index + value.shape[axis]) of a "
        "dimension of which x holds [start, start + extent); only the part inside. params axis, start, extent.",
        pieces=no_pieces, flops=no_flops, bytes_moved=_window_bytes, may_alias=aliases((0, 0)), error_eps=0.0,
    ),
    KernelContract(
        name="embedding",
        doc="outs y_RD; ins table_VD, ids_R: y = table[id - offset], zeros where that lies outside. params offset.",
        pieces=embedding_pieces, flops=no_flops, bytes_moved=_lookup_bytes, may_alias=aliases(), error_eps=0.0,
    ),
    KernelContract(
        name="scatter_add",
        doc="outs table_VD; ins table_VD, ids_R, dy_RD: table[id - offset] += dy in the order of the rows; "
        "ids outside are skipped. params offset.",
        pieces=no_pieces, flops=_added, bytes_moved=_scatter_bytes, may_alias=aliases((0, 0)), error_eps=1.0,
    ),
    KernelContract(
        name="embedding_grad",
        doc="outs table_VD; ins ids_R, dy_RD: zeros, then scatter_add. params offset.",
        pieces=no_pieces, flops=_added, bytes_moved=_scatter_grad_bytes, may_alias=aliases(), error_eps=1.0,
    ),
    KernelContract(
        name="dropout",
        doc="outs y; ins x, seed (uint64 0-d), step (int64 0-d), row_offset (int64 0-d): y = x * keep / (1 - rate), "
        "keep a function of the element's global index. params name_key, rate, global_shape (1 where broadcast), "
        "start (0 where broadcast), row_axis (the first axis that is not broadcast, or None).",
        pieces=dropout_pieces, flops=flops_per_input(1),
        bytes_moved=lambda outs, ins, item, params: 2 * item * prod(outs[0]),
        may_alias=aliases((0, 0)), error_eps=1.0,
    ),
    KernelContract(
        name="initialize",
        doc="outs w; ins seed (uint64 0-d). params init {kind: normal | truncated_normal | uniform | zeros | ones | "
        "constant, mean, stddev | low, high | value}, name_key, global_shape, start.",
        pieces=initialize_pieces, flops=no_flops, bytes_moved=output_bytes, may_alias=aliases(), error_eps=0.5,
    ),
)  # fmt: skip



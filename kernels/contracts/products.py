"""Contract of the matrix product."""

from __future__ import annotations

from math import prod

from .base import KernelContract, Params, Piece, Shapes, aliases, all_bytes, block_rows

# An accumulated product passes through scratch by blocks of rows. Fewer rows make BLAS pack the right operand again
# and again; a whole L2 cache keeps that under a tenth.
ACCUMULATE_BYTES = 1024 * 1024


def accumulate_rows(n_rows: int, n_columns: int, item: int) -> int:
    """Rows of the product that go through scratch at once."""
    return block_rows(n_rows, max(1, n_columns * item), ACCUMULATE_BYTES)


def matmul_pieces(out_shapes: Shapes, in_shapes: Shapes, dtype: str, params: Params) -> tuple[Piece, ...]:
    if not params.get("accumulate", False):
        return ()
    n_rows, n_columns = out_shapes[0][-2:]
    item = 8 if dtype == "float64" else 4
    return (Piece("product", (accumulate_rows(n_rows, n_columns, item), n_columns), dtype),)


def _flops(out_shapes: Shapes, in_shapes: Shapes, params: Params) -> int:
    return 2 * prod(out_shapes[0]) * in_shapes[0][-1]


CONTRACTS = (
    KernelContract(
        name="matmul",
        doc="outs c[.., M, N] with a unit last stride; ins a[.., M, K], b[.., K, N], each with a unit stride in one of "
        "its last two axes; 2-d, or 3-d with one leading size (stride 0 where broadcast). "
        "param accumulate: adds into c.",
        pieces=matmul_pieces, flops=_flops, bytes_moved=all_bytes, may_alias=aliases(), error_eps=1.0,
    ),
)  # fmt: skip



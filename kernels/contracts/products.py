"""Contract of the matrix product."""

from __future__ import annotations

from math import prod

from .base import KernelContract, Params, Piece, Shapes, aliases, all_bytes, block_rows, itemsize

# An accumulated product passes through scratch in blocks, as large as half an L2 cache of 1 MiB lets them be: BLAS
# packs its operands again for each block, which narrow ones would make expensive.
ACCUMULATE_BYTES = 512 * 1024
ACCUMULATE_COLUMNS = 512


def accumulate_block(n_rows: int, n_columns: int, item: int) -> tuple[int, int]:
    """Rows and columns of the product that go through scratch at once."""
    columns = max(1, min(n_columns, ACCUMULATE_COLUMNS))
    return block_rows(n_rows, columns * item, ACCUMULATE_BYTES), columns


def matmul_pieces(out_shapes: Shapes, in_shapes: Shapes, dtype: str, params: Params) -> tuple[Piece, ...]:
    """Return the scratch of ``matmul`` kernels, array by array."""
    if not params.get("accumulate", False):
        return ()
    rows, columns = accumulate_block(*out_shapes[0][-2:], itemsize(dtype))
    return (Piece("product", (rows * columns,), dtype),)


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



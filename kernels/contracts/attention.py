"""Contracts of attention and its gradient."""

from __future__ import annotations

from math import prod

from .base import KernelContract, Params, Piece, Shapes, aliases, block_rows, itemsize

# Scores that exist at once: a block of query rows by all memory, in the gradient a block of memory rows by all
# queries. Up to half an L2 cache of 1 MiB, rows make the products faster by more than the sweeps over scores lose.
SCORE_BYTES = 512 * 1024
MIN_ROWS = 32
MAX_ROWS = 256
# With causality every block computes half a square too much, so a quarter of the length, or 128, is enough.
MAX_CAUSAL_ROWS = 128
# The products do * o whose sums over K the gradient needs, made for all heads at once.
PRODUCT_BYTES = 64 * 1024


def score_rows(n_rows: int, n_columns: int, item: int, causal: bool) -> int:
    """Rows of one block of scores."""
    most = max(MIN_ROWS, min(MAX_CAUSAL_ROWS, n_columns // 4)) if causal else MAX_ROWS
    rows = SCORE_BYTES // max(1, n_columns * item) // MIN_ROWS * MIN_ROWS
    return max(1, min(n_rows, max(MIN_ROWS, min(most, rows))))


def product_rows(n_queries: int, n_heads: int, width: int, item: int) -> int:
    """Query rows whose products do * o are made at once."""
    return block_rows(n_queries, n_heads * width * item, PRODUCT_BYTES)


def _extra(in_shapes: Shapes, dtype: str, params: Params, rows: int, columns: int) -> tuple[Piece, ...]:
    """What segments and dropout need besides."""
    _, n_memory, n_heads, _ = in_shapes[1]
    pieces: tuple[Piece, ...] = ()
    if params.get("has_segments", False):
        pieces += (Piece("bias", (rows, columns), dtype), Piece("differs", (rows, columns), "bool"))
    if params.get("dropout", 0.0):
        pieces += (Piece("keep", (n_heads, n_memory), "bool"), Piece("mask", (n_heads, n_memory), dtype))
    return pieces


def attention_pieces(out_shapes: Shapes, in_shapes: Shapes, dtype: str, params: Params) -> tuple[Piece, ...]:
    """Return the scratch of ``attention`` kernels, array by array."""
    _, n_queries, _, width = in_shapes[0]
    n_memory = in_shapes[1][1]
    rows = score_rows(n_queries, n_memory, itemsize(dtype), params.get("causal", False))
    pieces = (
        Piece("scores", (rows, n_memory), dtype),
        Piece("output", (rows, width), dtype),
        Piece("s", (in_shapes[0][2], n_queries), dtype),
    )
    if params.get("dropout", 0.0):
        pieces += (Piece("value", (n_memory, width), dtype),)
    return pieces + _extra(in_shapes, dtype, params, rows, n_memory)


def attention_grad_pieces(out_shapes: Shapes, in_shapes: Shapes, dtype: str, params: Params) -> tuple[Piece, ...]:
    """Return the scratch of ``attention_grad`` kernels, array by array."""
    _, n_queries, n_heads, width = in_shapes[0]
    rows = score_rows(in_shapes[1][1], n_queries, itemsize(dtype), params.get("causal", False))
    products = product_rows(n_queries, n_heads, width, itemsize(dtype))
    pieces = (
        Piece("weights", (rows, n_queries), dtype),
        Piece("dscores", (rows, n_queries), dtype),
        Piece("part", (n_queries, width), dtype),
        Piece("products", (products, n_heads, width), dtype),
        Piece("d_by_row", (n_queries, n_heads), dtype),
        Piece("d", (n_heads, n_queries), dtype),
        Piece("lse", (n_heads, n_queries), dtype),
    )
    return pieces + _extra(in_shapes, dtype, params, rows, n_queries)


def visible_scores(in_shapes: Shapes, params: Params) -> int:
    """Scores that causality leaves, exactly: what an ideal kernel would compute for one batch entry and head."""
    n_queries, n_memory = in_shapes[0][1], in_shapes[1][1]
    if not params.get("causal", False):
        return n_queries * n_memory
    offset = params.get("query_offset", 0)
    return sum(max(0, min(n_memory, offset + i + 1)) for i in range(n_queries))


def _flops(products: int):
    def flops(out_shapes: Shapes, in_shapes: Shapes, params: Params) -> int:
        n_batch, _, n_heads, width = in_shapes[0]
        return n_batch * n_heads * visible_scores(in_shapes, params) * (2 * products * width + 5)

    return flops


def _bytes(out_shapes: Shapes, in_shapes: Shapes, item: int, params: Params) -> int:
    return item * sum(prod(s) for s in (*out_shapes, *in_shapes))


_DOC = (
    "params scale, causal, query_offset (global index of query row 0), has_segments, dropout (rate; 0.0 is off), and "
    "with dropout name_key, heads_global, memory_global, head_start, row_start. Position of memory j is j; causal: "
    "j <= query_offset + i. Equal segments attend. Dropout acts on the weights, one mask for all queries: element "
    "((row * heads_global) + head) * memory_global + j with row = row_offset + row_start + b."
)

CONTRACTS = (
    KernelContract(
        name="attention",
        doc="outs o_BTHK, lse_BHT; ins q_BTHK, k_BSHK, v_BSHK, [segments_q_BT, segments_k_BS], [seed, step, "
        "row_offset] with dropout; 4-d views with a unit last stride. A row that attends to nothing gives 0 and "
        "lse -inf. " + _DOC,
        pieces=attention_pieces, flops=_flops(2), bytes_moved=_bytes, may_alias=aliases(), error_eps=4.0,
    ),
    KernelContract(
        name="attention_grad",
        doc="outs dq_BTHK, dk_BSHK, dv_BSHK; ins q, k, v, o, lse, do, [segments_q, segments_k], [seed, step, "
        "row_offset]. " + _DOC,
        pieces=attention_grad_pieces, flops=_flops(5), bytes_moved=_bytes, may_alias=aliases(), error_eps=4.0,
    ),
)  # fmt: skip

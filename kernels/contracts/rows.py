"""Contracts of the reductions and of the kernels that normalise rows."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from .base import (
    BLOCK_BYTES,
    KernelContract,
    Params,
    Piece,
    Shapes,
    aliases,
    all_bytes,
    block_rows,
    flops_per_input,
    itemsize,
    n_blocks,
    tree_depth,
)  # fmt: skip

# Elements that one leaf of a pairwise sum adds up plainly, and the rows within which it stays.
LEAF_ELEMENTS = 16384
LEAF_MIN_ROWS = 32
LEAF_MAX_ROWS = 256
# A block of fewer rows than this cannot spread the cost of its NumPy calls.
MIN_ROWS = 4


def reduce_leaf(n_rows: int, n_columns: int) -> int:
    """Rows of one leaf when ``n_rows`` are added up pairwise."""
    rows = LEAF_ELEMENTS // max(1, n_columns)
    return max(1, min(n_rows, max(LEAF_MIN_ROWS, min(LEAF_MAX_ROWS, rows))))


def reduce_pieces(out_shapes: Shapes, in_shapes: Shapes, dtype: str, params: Params) -> tuple[Piece, ...]:
    """Return the scratch of ``reduce`` kernels, array by array."""
    fn, axes = params["fn"], params["axes"]
    shape = tuple(in_shapes[0])
    if fn not in ("sum", "sum_squares") or not axes or 0 in shape:
        return ()
    n_reduced, n_kept = prod(shape[a] for a in axes), prod(out_shapes[0])
    # Enough levels whichever of the reduced axes can be merged; the first level is the output itself.
    depth = tree_depth(n_blocks(n_reduced, reduce_leaf(n_reduced, n_kept)))
    return (Piece("levels", (depth, n_kept), dtype),)


def norm_rows(n_rows: int, width: int, item: int) -> int:
    """Rows of a block of a normalisation: input, output and two work arrays."""
    return block_rows(n_rows, 4 * width * item, 2 * BLOCK_BYTES)


def norm_pieces(out_shapes: Shapes, in_shapes: Shapes, dtype: str, params: Params) -> tuple[Piece, ...]:
    """Return the scratch of ``norm`` kernels, array by array."""
    n_rows, width = in_shapes[0]
    rows = norm_rows(n_rows, width, itemsize(dtype))
    return (Piece("a", (rows,), dtype), Piece("b", (rows,), dtype))


def norm_grad_pieces(out_shapes: Shapes, in_shapes: Shapes, dtype: str, params: Params) -> tuple[Piece, ...]:
    """Return the scratch of ``norm_grad`` kernels, array by array."""
    n_rows, width = in_shapes[0]
    rows = norm_rows(n_rows, width, itemsize(dtype))
    depth = tree_depth(n_blocks(n_rows, rows))
    return (
        Piece("taken", (rows, width), dtype),
        Piece("work", (rows, width), dtype),
        Piece("a", (rows,), dtype),
        Piece("b", (rows,), dtype),
        Piece("c", (rows,), dtype),
        Piece("levels", (depth, 2, width), dtype),
        Piece("average", (width,), dtype),
    )


def softmax_rows(n_rows: int, width: int, item: int) -> int:
    """Rows of a block of a softmax or a cross-entropy: one row may be a whole vocabulary."""
    return min(n_rows, max(MIN_ROWS, block_rows(n_rows, 2 * width * item)))


def softmax_pieces(out_shapes: Shapes, in_shapes: Shapes, dtype: str, params: Params) -> tuple[Piece, ...]:
    """Return the scratch of ``softmax`` kernels, array by array."""
    rows = softmax_rows(*in_shapes[0], itemsize(dtype))
    return (Piece("a", (rows,), dtype), Piece("b", (rows,), dtype))


def softmax_work_pieces(out_shapes: Shapes, in_shapes: Shapes, dtype: str, params: Params) -> tuple[Piece, ...]:
    """Return the scratch of ``softmax_work`` kernels, array by array."""
    n_rows, width = in_shapes[0]
    rows = softmax_rows(n_rows, width, itemsize(dtype))
    return (Piece("work", (rows, width), dtype), *softmax_pieces(out_shapes, in_shapes, dtype, params))


def _row_numbers(n_rows: int, dtype: str, floats: Sequence[str]) -> tuple[Piece, ...]:
    """What a cross-entropy keeps of each row."""
    flags = tuple(Piece(name, (n_rows,), "bool") for name in ("ignored", "inside", "flag"))
    return (*(Piece(name, (n_rows,), dtype) for name in floats), *flags, Piece("index", (n_rows,), "int64"))


def cross_entropy_pieces(out_shapes: Shapes, in_shapes: Shapes, dtype: str, params: Params) -> tuple[Piece, ...]:
    """Return the scratch of ``cross_entropy`` kernels, array by array."""
    n_rows, width = in_shapes[0]
    rows = softmax_rows(n_rows, width, itemsize(dtype))
    vectors = _row_numbers(n_rows, dtype, ("m", "s", "at", "total", "term"))
    return (Piece("work", (rows, width), dtype), *vectors)


def cross_entropy_grad_pieces(
    out_shapes: Shapes, in_shapes: Shapes, dtype: str, params: Params
) -> tuple[Piece, ...]:
    """Return the scratch of ``cross_entropy_grad`` kernels, array by array."""
    return _row_numbers(in_shapes[0][0], dtype, ("s", "at", "total"))


def finish_pieces(out_shapes: Shapes, in_shapes: Shapes, dtype: str, params: Params) -> tuple[Piece, ...]:
    """Return the scratch of ``cross_entropy_finish``: one row of work for each number a row."""
    return _row_numbers(in_shapes[0][0], dtype, ("term",))


CONTRACTS = (
    KernelContract(
        name="reduce",
        doc="outs y, x without the axes; ins x. params axes, fn: sum | max | min | sum_squares.",
        pieces=reduce_pieces, flops=flops_per_input(2), bytes_moved=all_bytes, may_alias=aliases(), error_eps=0.1,
    ),
    KernelContract(
        name="layer_norm",
        doc="outs y_RD, mean_R, rstd_R; ins x_RD, scale_D, [bias_D]. params eps, has_bias.",
        pieces=norm_pieces, flops=flops_per_input(7), bytes_moved=all_bytes,
        may_alias=aliases((0, 0)), error_eps=1.0,
    ),
    KernelContract(
        name="layer_norm_grad",
        doc="outs dx_RD, dscale_D, [dbias_D]; ins dy_RD, x_RD, mean_R, rstd_R, scale_D. params has_bias.",
        pieces=norm_grad_pieces, flops=flops_per_input(14), bytes_moved=all_bytes,
        may_alias=aliases((0, 0), (0, 1)), error_eps=1.0,
    ),
    KernelContract(
        name="rms_norm",
        doc="outs y_RD, rstd_R; ins x_RD, scale_D. params eps.",
        pieces=norm_pieces, flops=flops_per_input(4), bytes_moved=all_bytes,
        may_alias=aliases((0, 0)), error_eps=1.0,
    ),
    KernelContract(
        name="rms_norm_grad",
        doc="outs dx_RD, dscale_D; ins dy_RD, x_RD, rstd_R, scale_D.",
        pieces=norm_grad_pieces, flops=flops_per_input(10), bytes_moved=all_bytes,
        may_alias=aliases((0, 0), (0, 1)), error_eps=1.0,
    ),
    KernelContract(
        name="softmax",
        doc="outs y_RD; ins x_RD; softmax over D. A row of -inf alone gives zeros.",
        pieces=softmax_pieces, flops=flops_per_input(5), bytes_moved=all_bytes,
        may_alias=aliases((0, 0)), error_eps=4.0,
    ),
    KernelContract(
        name="softmax_grad",
        doc="outs dx_RD; ins y_RD, dy_RD: y * (dy - sum(y * dy)).",
        pieces=softmax_work_pieces, flops=flops_per_input(4), bytes_moved=all_bytes,
        may_alias=aliases((0, 0), (0, 1)), error_eps=4.0,
    ),
    KernelContract(
        name="logsumexp",
        doc="outs y_R; ins x_RD.",
        pieces=softmax_work_pieces, flops=flops_per_input(4), bytes_moved=all_bytes,
        may_alias=aliases(), error_eps=4.0,
    ),
    KernelContract(
        name="cross_entropy",
        doc="outs loss_R, lse_R; ins logits_RV, targets_R. params vocab (columns from there on are padding), "
        "label_smoothing, z_loss, ignore (int or None). loss = lse - on x_t - off sum of the other x + z_loss lse^2, "
        "off = label_smoothing / vocab, on = 1 - label_smoothing + off; 0 where the target is < 0 or ignore.",
        pieces=cross_entropy_pieces, flops=flops_per_input(5), bytes_moved=all_bytes,
        may_alias=aliases(), error_eps=4.0,
    ),
    KernelContract(
        name="cross_entropy_grad",
        doc="outs dlogits_RV; ins logits_RV, targets_R, lse_R, dloss_R. params as cross_entropy, and offset: the "
        "global index of this slice's first column. 0 in padding columns and ignored rows.",
        pieces=cross_entropy_grad_pieces, flops=flops_per_input(3), bytes_moved=all_bytes,
        may_alias=aliases((0, 0)), error_eps=4.0,
    ),
    KernelContract(
        name="cross_entropy_max",
        doc="outs m_R; ins logits_RV: the largest valid logit of this slice, -inf if it has none. "
        "params offset, vocab.",
        pieces=lambda outs, ins, dtype, params: (), flops=flops_per_input(1), bytes_moved=all_bytes,
        may_alias=aliases(), error_eps=0.0,
    ),
    KernelContract(
        name="cross_entropy_sums",
        doc="outs s_3R: sum of exp(x - m), logit of the target or 0 if it is elsewhere, sum of valid logits; "
        "ins logits_RV, targets_R, m_R. params offset, vocab.",
        pieces=cross_entropy_pieces, flops=flops_per_input(4), bytes_moved=all_bytes,
        may_alias=aliases(), error_eps=4.0,
    ),
    KernelContract(
        name="cross_entropy_finish",
        doc="outs loss_R, lse_R; ins m_R, s_3R (both over all slices), targets_R. params as cross_entropy.",
        pieces=finish_pieces, flops=flops_per_input(8), bytes_moved=all_bytes,
        may_alias=aliases(), error_eps=4.0,
    ),
)  # fmt: skip

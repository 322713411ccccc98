"""Contracts of the optimizers' fused updates."""

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
    itemsize,
    n_blocks,
    tree_depth,
)  # fmt: skip

# Operands of a block, so that it stays in the L2 cache through all its passes.
ADAM_BYTES = 320 * 1024


def update_elements(n_elements: int, item: int) -> int:
    """Elements of one block of an update: weight, gradient, two slots and a work array."""
    return max(1, min(n_elements, ADAM_BYTES // (5 * item) // 1024 * 1024))


def update_pieces(out_shapes: Shapes, in_shapes: Shapes, dtype: str, params: Params) -> tuple[Piece, ...]:
    """Return the scratch of ``update`` kernels, array by array."""
    return (Piece("work", (update_elements(prod(out_shapes[0]), itemsize(dtype)),), dtype),)


def sums_rows(n_rows: int, n_columns: int, item: int) -> int:
    """Rows of a block of the two-way sums of squares."""
    return block_rows(n_rows, max(1, 2 * n_columns * item))


def sums_pieces(out_shapes: Shapes, in_shapes: Shapes, dtype: str, params: Params) -> tuple[Piece, ...]:
    """Return the scratch of ``sums`` kernels, array by array."""
    n_rows, n_columns = in_shapes[0][params["axis0"]], in_shapes[0][params["axis1"]]
    rows = sums_rows(n_rows, n_columns, itemsize(dtype))
    depth = tree_depth(n_blocks(n_rows, rows))
    return (Piece("squares", (rows, n_columns), dtype), Piece("levels", (depth, n_columns), dtype))


CONTRACTS = (
    KernelContract(
        name="adam",
        doc="outs w, m, v; ins w, g, m, v, lr, step (from 1), scale, apply (0-d). params beta1, beta2, eps, "
        "weight_decay, bias_correction. g is multiplied by scale; w -= lr (mhat / (sqrt(vhat) + eps) + weight_decay w);"
        " apply == 0 leaves all as they are, to the bit.",
        pieces=update_pieces, flops=flops_per_input(14), bytes_moved=all_bytes,
        may_alias=aliases((0, 0), (1, 2), (2, 3)), error_eps=4.0,
    ),
    KernelContract(
        name="sgd",
        doc="outs w, [v]; ins w, g, [v], lr, scale, apply (0-d). params momentum, nesterov, weight_decay. "
        "g = scale g + weight_decay w; v = momentum v + g; w -= lr v (nesterov: lr (g + momentum v)). "
        "v is there when momentum is not 0.",
        pieces=update_pieces, flops=flops_per_input(6), bytes_moved=all_bytes,
        may_alias=lambda params, o, i: (o, i) == (0, 0) or (bool(params.get("momentum")) and (o, i) == (1, 2)),
        error_eps=4.0,
    ),
    KernelContract(
        name="adafactor_sums",
        doc="outs vr_sum (g without axis0), vc_sum (g without axis1); ins g, scale (0-d): sums of "
        "scale^2 g^2 + eps1. params axis0, axis1, eps1.",
        pieces=sums_pieces, flops=flops_per_input(3), bytes_moved=all_bytes, may_alias=aliases(), error_eps=1.0,
    ),
    KernelContract(
        name="adafactor_moment",
        doc="outs v; ins v, g, scale, decay, apply (0-d): v = decay v + (1 - decay) (scale^2 g^2 + eps1). params eps1.",
        pieces=update_pieces, flops=flops_per_input(5), bytes_moved=all_bytes,
        may_alias=aliases((0, 0)), error_eps=4.0,
    ),
)  # fmt: skip

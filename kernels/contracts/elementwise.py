"""Contract of ``elementwise``: a short program of steps over arrays of one shape."""

from __future__ import annotations

from math import prod

from .base import KernelContract, Params, Piece, Shapes, itemsize, sizes

# What all operands of a block take together. A step or two stream through memory whatever the block, and then few
# large blocks are best; longer programs still find their temporaries in an L2 cache of 1 MiB.
ELEMENTWISE_BYTES = 512 * 1024

# How many work arrays a function needs besides its operands, and how many operations it counts as.
_SIMPLE = (
    "add sub mul div neg abs sign exp log sqrt square reciprocal sin cos tanh pow maximum minimum floordiv mod "
    "less less_equal greater greater_equal equal not_equal logical_and logical_or logical_not isfinite relu"
).split()
FUNCTIONS: dict[str, tuple[int, int]] = {
    **{name: (0, 1) for name in _SIMPLE},
    "rsqrt": (0, 2), "cast": (0, 0), "copy": (0, 0), "where": (2, 1),
    "sigmoid": (0, 5), "softplus": (1, 6), "silu": (1, 6), "gelu": (1, 8), "elu": (2, 4), "selu": (2, 5),
    "leaky_relu": (1, 2), "relu_grad": (1, 1), "leaky_relu_grad": (2, 3), "sigmoid_grad": (1, 3),
    "tanh_grad": (1, 3), "softplus_grad": (1, 5), "silu_grad": (2, 8), "gelu_grad": (3, 14),
    "elu_grad": (1, 3), "selu_grad": (3, 7),
}  # fmt: skip


def block_elements(n_elements: int, params: Params) -> int:
    """Elements of one block, so that all operands, temporaries and work arrays stay within the budget."""
    per_element = sum(_widths(params)) + max(_widths(params), default=8) * n_work(params)
    return min(n_elements, max(1024, ELEMENTWISE_BYTES // max(1, per_element) // 1024 * 1024))


def _widths(params: Params) -> list[int]:
    """Bytes of an element of each operand and temporary."""
    return [itemsize(d) for key in ("in_dtypes", "out_dtypes", "temp_dtypes") for d in params.get(key, ())]


def n_work(params: Params) -> int:
    """Work arrays that the most demanding step needs."""
    return max((FUNCTIONS[fn][0] for fn, _, _ in params["steps"]), default=0)


def pieces(out_shapes: Shapes, in_shapes: Shapes, dtype: str, params: Params) -> tuple[Piece, ...]:
    """Return the scratch of ``elementwise``: temporaries, and work arrays for functions that need them."""
    block = block_elements(prod(out_shapes[0]), params)
    temps = tuple(Piece(f"t{i}", (block,), d) for i, d in enumerate(params.get("temp_dtypes", ())))
    # A work array is as wide as the widest operand, whatever it is used for.
    width = max(_widths(params), default=8)
    return temps + tuple(Piece(f"w{i}", (block * width,), "uint8") for i in range(n_work(params)))


def _flops(out_shapes: Shapes, in_shapes: Shapes, params: Params) -> int:
    return prod(out_shapes[0]) * sum(FUNCTIONS[fn][1] for fn, _, _ in params["steps"])


def _bytes(out_shapes: Shapes, in_shapes: Shapes, item: int, params: Params) -> int:
    widths = [itemsize(d) for key in ("in_dtypes", "out_dtypes") for d in params.get(key, ())]
    if not widths:
        return item * (sizes(out_shapes) + sizes(in_shapes))
    return prod(out_shapes[0]) * sum(widths)


def _may_alias(params: Params, out_index: int, in_index: int) -> bool:
    """Safe if the input is not read after the step that first writes the output, and the dtypes are one."""
    outs, ins = params.get("out_dtypes"), params.get("in_dtypes")
    if outs is None or ins is None or outs[out_index] != ins[in_index]:
        return False
    written = False
    for _, srcs, dst in params["steps"]:
        if written and ("i", in_index) in [tuple(src) for src in srcs]:
            return False
        written = written or tuple(dst) == ("o", out_index)
    return True


CONTRACTS = (
    KernelContract(
        name="elementwise",
        doc="outs k arrays of one n-d shape; ins arrays of that shape (stride 0 where broadcast). "
        "params steps: ((fn, srcs, dst), ...) with refs ('i', n) input, ('o', n) output, ('t', n) temporary, "
        "('c', number) constant; temp_dtypes, in_dtypes, out_dtypes: names of dtypes.",
        pieces=pieces, flops=_flops, bytes_moved=_bytes, may_alias=_may_alias, error_eps=8.0,
    ),
)  # fmt: skip

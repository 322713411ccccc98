"""The form of a contract, and the block sizes that contracts and kernels must agree on.

A contract lists its scratch as named pieces, and the kernel carves the same list out of the bytes it is given,
so the two cannot drift apart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

Shape = Sequence[int]
Shapes = Sequence[Shape]
Params = Mapping[str, Any]

# What a block's operands may take together: a quarter of an L2 cache of 1 MiB, so that nothing else is evicted.
BLOCK_BYTES = 256 * 1024
ALIGNMENT = 64

_ITEMSIZE = {
    "bool": 1, "int8": 1, "uint8": 1, "int16": 2, "uint16": 2, "float16": 2,
    "int32": 4, "uint32": 4, "float32": 4, "int64": 8, "uint64": 8, "float64": 8, "intp": 8,
}  # fmt: skip


class Piece(NamedTuple):
    """One array in a kernel's scratch."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class KernelContract:
    """What a kernel promises to the layers above.

    pieces       (out_shapes, in_shapes, dtype, params) -> the arrays in its scratch; dtype is the first output's
    flops        (out_shapes, in_shapes, params) -> arithmetic operations, a transcendental counted as one
    bytes_moved  (out_shapes, in_shapes, itemsize, params) -> bytes read and written once each, caches ideal
    may_alias    (params, out_index, in_index) -> may that output be exactly the same view as that input
    error_eps    bound on the error, in eps of the dtype per element of the longest reduction, relative to the
                 sum of magnitudes
    version      hashed into the program's digest; change it when results change
    """

    name: str
    doc: str
    pieces: Callable[[Shapes, Shapes, str, Params], tuple[Piece, ...]]
    flops: Callable[[Shapes, Shapes, Params], int]
    bytes_moved: Callable[[Shapes, Shapes, int, Params], int]
    may_alias: Callable[[Params, int, int], bool]
    error_eps: float
    version: str = "1"

    def scratch_bytes(self, out_shapes: Shapes, in_shapes: Shapes, dtype: Any, params: Params) -> int:
        """The exact size of the scratch array that the kernel takes; 0 means it takes None."""
        pieces = self.pieces(out_shapes, in_shapes, dtype_name(dtype), params)
        return sum(align(prod(piece.shape) * itemsize(piece.dtype)) for piece in pieces)


def dtype_name(dtype: Any) -> str:
    """'float32' of a NumPy dtype, a NumPy scalar type or the string itself, without importing NumPy."""
    name = dtype if isinstance(dtype, str) else getattr(dtype, "name", None) or getattr(dtype, "__name__", str(dtype))
    if name not in _ITEMSIZE:
        raise ValueError(f"kernels: dtype {name!r} is unknown. Use one of {', '.join(_ITEMSIZE)}.")
    return name


def itemsize(dtype: Any) -> int:
    """Bytes of one element."""
    return _ITEMSIZE[dtype_name(dtype)]


def align(n_bytes: int) -> int:
    """Round up to whole cache lines."""
    return -(-n_bytes // ALIGNMENT) * ALIGNMENT


def block_rows(n_rows: int, row_bytes: int, budget: int = BLOCK_BYTES) -> int:
    """How many rows of ``row_bytes`` (all operands together) make one block; at least one."""
    return max(1, min(n_rows, budget // max(1, row_bytes)))


def n_blocks(n_rows: int, rows: int) -> int:
    """Blocks of ``rows`` that cover ``n_rows``."""
    return -(-n_rows // rows) if n_rows else 0


def tree_depth(n_leaves: int) -> int:
    """Levels that a pairwise sum of ``n_leaves`` partial results keeps at once."""
    return max(1, (max(1, n_leaves) - 1).bit_length() + 1)


def sizes(shapes: Shapes) -> int:
    """Elements of all shapes together."""
    return sum(prod(shape) for shape in shapes)


def no_pieces(out_shapes: Shapes, in_shapes: Shapes, dtype: str, params: Params) -> tuple[Piece, ...]:
    """Return no scratch."""
    return ()


def no_flops(out_shapes: Shapes, in_shapes: Shapes, params: Params) -> int:
    """Return 0: the kernel moves only."""
    return 0


def flops_per_input(n: int) -> Callable[[Shapes, Shapes, Params], int]:
    """``n`` operations for each element of the first input."""
    return lambda out_shapes, in_shapes, params: n * prod(in_shapes[0])


def all_bytes(out_shapes: Shapes, in_shapes: Shapes, item: int, params: Params) -> int:
    """Every operand once."""
    return item * (sizes(out_shapes) + sizes(in_shapes))


def output_bytes(out_shapes: Shapes, in_shapes: Shapes, item: int, params: Params) -> int:
    """Return the bytes of the outputs alone: inputs are not read, or are the outputs' own memory."""
    return item * sizes(out_shapes)


def aliases(*pairs: tuple[int, int]) -> Callable[[Params, int, int], bool]:
    """Only these (output, input) pairs may be the same view."""
    return lambda params, out_index, in_index: (out_index, in_index) in pairs

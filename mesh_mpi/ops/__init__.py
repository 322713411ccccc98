"""The operations of the language, one family a file.

Invariant: importing this package registers every operation and fills the table of Python operators.
"""

from .einsum import einsum
from .elementwise import FUNCTIONS, cast, stop_gradient, where
from .movement import pad, relayout, rename, reshape, slice, transpose
from .reduce import add_n, broadcast, full, range_of, reduce_logsumexp, reduce_max, reduce_mean, reduce_min, reduce_sum

globals().update(FUNCTIONS)

__all__ = ["add_n", "broadcast", "cast", "einsum", "full", "pad", "range_of", "reduce_logsumexp", "reduce_max", "reduce_mean", "reduce_min",
           "reduce_sum", "relayout", "rename", "reshape", "slice", "stop_gradient", "transpose", "where", *FUNCTIONS]

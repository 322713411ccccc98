"""The operations of the language, one family a file.

Invariant: importing this package registers every operation and fills the table of Python operators.
"""

from .einsum import einsum
from .elementwise import FUNCTIONS, cast, stop_gradient, where
from .reduce import add_n, broadcast, full, range_of, reduce_logsumexp, reduce_max, reduce_mean, reduce_min, reduce_sum

globals().update(FUNCTIONS)

__all__ = ["add_n", "broadcast", "cast", "einsum", "full", "range_of", "reduce_logsumexp", "reduce_max", "reduce_mean", "reduce_min",
           "reduce_sum", "stop_gradient", "where", *FUNCTIONS]

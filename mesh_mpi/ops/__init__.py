"""The operations of the language, one family a file.

Invariant: importing this package registers every operation and fills the table of Python operators.
"""

from .attention import DropoutArgs, attention
from .dropout import dropout
from .einsum import einsum
from .elementwise import FUNCTIONS, cast, stop_gradient, where
from .embedding import embedding, scatter_add
from .loss import cross_entropy
from .movement import pad, relayout, rename, reshape, slice, transpose
from .norm import layer_norm, rms_norm
from .optimizer import adam_update, sgd_update
from .reduce import add_n, broadcast, full, range_of, reduce_logsumexp, reduce_max, reduce_mean, reduce_min, reduce_sum

globals().update(FUNCTIONS)

__all__ = ["DropoutArgs", "adam_update", "add_n", "attention", "broadcast", "cast", "cross_entropy", "dropout", "einsum", "embedding", "full",
           "layer_norm", "pad", "range_of", "reduce_logsumexp", "reduce_max", "reduce_mean", "reduce_min", "reduce_sum", "relayout", "rename",
           "reshape", "rms_norm", "scatter_add", "sgd_update", "slice", "stop_gradient", "transpose", "where", *FUNCTIONS]

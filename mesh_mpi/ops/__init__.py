"""The operations of the language, one family a file.

Invariant: importing this package registers every operation and fills the table of Python operators.
"""

from .attention import DropoutArgs, attention
from .dropout import dropout
from .dynamic import slice_at, write
from .einsum import einsum
from .elementwise import FUNCTIONS, cast, stop_gradient, where
from .embedding import embedding, scatter_add
from .loss import cross_entropy
from .movement import pad, relayout, rename, reshape, slice, transpose
from .norm import layer_norm, rms_norm
from .optimizer import adafactor_update, adam_update, factored_dims, sgd_update
from .reduce import add_n, broadcast, full, range_of, reduce_logsumexp, reduce_max, reduce_mean, reduce_min, reduce_sum, reduce_sum_squares
from .softmax import log_softmax, softmax

globals().update(FUNCTIONS)

__all__ = ["adafactor_update", "adam_update", "add_n", "attention", "broadcast", "cast", "cross_entropy", "dropout", "DropoutArgs", "einsum",
           "embedding", "factored_dims", "full", "layer_norm", "log_softmax", "pad", "range_of", "reduce_logsumexp", "reduce_max", "reduce_mean",
           "reduce_min", "reduce_sum", "reduce_sum_squares", "relayout", "rename", "reshape", "rms_norm", "scatter_add", "sgd_update", "slice",
           "slice_at", "softmax", "stop_gradient", "transpose", "where", "write", *FUNCTIONS]

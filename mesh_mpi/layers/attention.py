"""Self-attention of many heads.

Invariant: inside, the sequence is called ``query_length`` and ``memory_length``, so that the residual stream's ``length`` may be split
while attention has it whole; keys and values share one renamed operand, so that their input gradients are added before anything moves.
"""

from __future__ import annotations

from ..dims import Dimension
from ..graph.initializers import normal
from ..graph.tensor import Tensor
from ..ops import attention
from .dense import Dense
from .dropout import Dropout, Masks
from .layer import Layer, renamed


class SelfAttention(Layer):
    """softmax(q k / sqrt(d_kv)) v for each head, from and to ``d_model``; the scale is part of the operation.

    Variables ``<name>/{q,k,v}/weight`` [d_model, heads, d_kv], standard deviation d_model**-0.5, and ``<name>/o/weight``
    [heads, d_kv, d_model], standard deviation (heads * d_kv)**-0.5; with ``bias`` also a bias each.
    ``dropout`` is the rate on the weights, whose masks are the same for all queries of a row.

    Shape   x [batch, length, d_model] -> [batch, length, d_model]; segments [batch, length] of integers, equal ones see each other.
    Comm    heads split: one reduction of the result forward, one of the input's gradient backward.
    Raises  DimensionError if ``x`` lacks ``length`` or ``d_model``; DtypeError if its element type is another.
    """

    def __init__(self, d_model: Dimension, heads: Dimension, d_kv: Dimension, name: str = "attention", dropout: float = 0.0,
                 causal: bool = True, bias: bool = False, length: str = "length", dtype: str = "float32"):
        super().__init__(name, dtype)
        self.d_model, self.heads, self.d_kv = d_model, heads, d_kv
        self.causal, self.length = causal, length
        with self.inside():
            into = normal(d_model.size**-0.5)
            self.q, self.k, self.v = (Dense(d_model, [heads, d_kv], n, bias, into, dtype) for n in ("q", "k", "v"))
            self.o = Dense([heads, d_kv], d_model, "o", bias, normal((heads.size * d_kv.size) ** -0.5), dtype)
            self.dropout = Dropout(dropout, "weights_dropout", dtype=dtype)

    def __call__(self, x: Tensor, masks: Masks | None = None, segments: Tensor | None = None) -> Tensor:
        """Attend; shapes and communication as the class says."""
        self.require(x, [self.d_model])
        with self.inside():
            queries, memory = renamed(x, self.length, "query_length"), renamed(x, self.length, "memory_length")
            of_queries = of_memory = None
            if segments is not None:
                of_queries, of_memory = renamed(segments, self.length, "query_length"), renamed(segments, self.length, "memory_length")
            y = attention(self.q(queries), self.k(memory), self.v(memory), "query_length", "memory_length", self.d_kv, causal=self.causal,
                          query_segments=of_queries, memory_segments=of_memory, dropout=self.dropout.of_weights(masks), heads=self.heads)
            return renamed(self.o(y), "query_length", self.length)

"""Self-attention of many heads.

Invariant: inside, the sequence is called ``query_length`` and ``memory_length``, so that the residual stream's ``length`` may be split
while attention has it whole; keys and values share one renamed operand, so that their input gradients are added before anything moves.
"""

from __future__ import annotations

from typing import NamedTuple

from ..dims import Dimension
from ..graph.initializers import normal
from ..graph.tensor import Tensor
from ..graph.variable import Variable
from ..ops import attention, broadcast, full, reduce_sum, write
from .dense import Dense
from .dropout import Dropout, Masks
from .layer import Layer, renamed


class KeysValues(NamedTuple):
    """What an attention remembers of the positions it has seen: ``k`` and ``v`` [batch, memory_length, heads, d_kv]."""

    k: Tensor
    v: Tensor


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
        return self.remembering(x, masks, segments)[0]

    def remembering(self, x: Tensor, masks: Masks | None = None, segments: Tensor | None = None) -> tuple[Tensor, KeysValues]:
        """Attend, and return also the keys and values, of which :meth:`through` makes use; shapes and communication as the class says."""
        self.require(x, [self.d_model])
        with self.inside():
            queries, memory = renamed(x, self.length, "query_length"), renamed(x, self.length, "memory_length")
            of_queries = of_memory = None
            if segments is not None:
                of_queries, of_memory = renamed(segments, self.length, "query_length"), renamed(segments, self.length, "memory_length")
            known = KeysValues(self.k(memory), self.v(memory))
            y = attention(self.q(queries), *known, "query_length", "memory_length", self.d_kv, causal=self.causal,
                          query_segments=of_queries, memory_segments=of_memory, dropout=self.dropout.of_weights(masks), heads=self.heads)
            return renamed(self.o(y), "query_length", self.length), known

    def caches(self, batch: Dimension, memory_length: Dimension) -> KeysValues:
        """Make the variables ``<name>/{k,v}_cache`` [batch, memory_length, heads, d_kv], zeros, which lie as the layout says."""
        dims = [batch, memory_length, self.heads, self.d_kv]
        with self.inside():
            return KeysValues(*(Variable(f"{n}_cache", dims, dtype=self.dtype, storage_class="cache", trainable=False) for n in ("k", "v")))

    def through(self, x: Tensor, caches: KeysValues, at: Tensor, seen: Tensor) -> tuple[Tensor, KeysValues]:
        """Attend from one position, whose number is ``at``, to itself and what the caches know; return also the new caches.

        Shape   x [batch, d_model], at: an integer scalar, seen [batch, memory_length] int32: 1 up to ``at``, 0 beyond -> [batch, d_model],
                and caches [batch, memory_length, heads, d_kv] with the position's keys and values written.
        Comm    heads split: one reduction of the result. The memory is gathered where a rule splits it.
        Raises  DimensionError if ``x`` lacks ``d_model``; DtypeError if its element type is another.
        """
        self.require(x, [self.d_model])
        with self.inside():
            memory = caches.k.shape.get("memory_length")
            batch, one = seen.shape.get(*(n for n in seen.shape.names if n != memory.name)), Dimension("new_length", 1)
            new = KeysValues(*(write(cache, {memory: at}, of(x)) for cache, of in zip(caches, (self.k, self.v))))
            q = broadcast(self.q(x), [batch, one, self.heads, self.d_kv])
            y = attention(q, *new, one, memory, self.d_kv, causal=False, query_segments=full([batch, one], 1, "int32"),
                          memory_segments=seen, heads=self.heads)
            return self.o(reduce_sum(y, one)), new

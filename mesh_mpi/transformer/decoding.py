"""The language model one position at a time: what it knows of earlier ones lies in caches of keys and values.

Invariant: position for position the logits are those of the whole forward pass, to rounding; the variables are the model's own, and caches
are written in place.
"""

from __future__ import annotations

from typing import NamedTuple

from ..dims import Dimension
from ..errors import DimensionError
from ..graph.tensor import Tensor
from ..graph.variable import Variable
from ..layers import KeysValues, residual
from ..ops import broadcast, cast, less_equal, range_of, rename, slice_at
from .language_model import LanguageModel


class Decoded(NamedTuple):
    """``logits`` [batch, vocab] of the symbol that follows a position; ``updates``: each cache with its new value, for ``compile``."""

    logits: Tensor
    updates: list[tuple[Variable, Tensor]]


class Decoder:
    """A language model with caches for ``batch`` rows of as many positions as the model has."""

    def __init__(self, lm: LanguageModel, batch: Dimension):
        self.lm, self.batch = lm, batch
        self.memory_length = Dimension("memory_length", lm.model.length)
        self.caches = [layer.attention.caches(batch, self.memory_length) for layer in lm.layers]

    def prefill(self, inputs: Tensor, last: Tensor) -> Decoded:
        """Go through whole rows at once and fill the caches; what stands after position ``last`` does not matter.

        Shape   inputs [batch, length] of integers, length that of the model; last: an integer scalar -> logits [batch, vocab] of position ``last``.
        Comm    that of the model's forward pass; a split ``loss_length`` is gathered.
        Grad    none is meant.
        Raises  DimensionError if the inputs have another batch or length.
        """
        if set(inputs.shape) != {self.batch, Dimension("length", self.memory_length.size)}:
            raise DimensionError(f"Decoder: the inputs are {inputs.shape}. Give [{self.batch}, length={self.memory_length.size}].")
        x, known = self.lm.embedded(inputs), []
        for layer in self.lm.layers:
            x = _layer(layer, x, lambda y, layer=layer: _kept(known, layer.attention.remembering(y)))
        x = slice_at(rename(x, {"length": "loss_length"}), "loss_length", last)
        return Decoded(self.lm.scores(x), self._updates(known))

    def step(self, ids: Tensor, at: Tensor) -> Decoded:
        """Go through one position, number ``at`` from 0 on in every row.

        Shape   ids [batch] of integers, at: an integer scalar -> logits [batch, vocab].
        Comm    with ``heads`` and ``d_ff`` split: two reductions of [batch, d_model] a layer; with ``vocab`` split: one more.
        Grad    none is meant.
        Raises  DimensionError if ``ids`` has another batch; DtypeError if ``at`` is no integer scalar.
        """
        if set(ids.shape) != {self.batch}:
            raise DimensionError(f"Decoder: the ids are {ids.shape}. Give [{self.batch}].")
        seen = broadcast(cast(less_equal(range_of(self.memory_length, at.dtype), at), "int32"), [self.batch, self.memory_length])
        x, known = self.lm.embedding(ids) + self.lm.positions.one(at), []
        for layer, caches in zip(self.lm.layers, self.caches):
            x = _layer(layer, x, lambda y, layer=layer, caches=caches: _kept(known, layer.attention.through(y, caches, at, seen)))
        return Decoded(self.lm.scores(x), self._updates(known))

    def _updates(self, known: list[KeysValues]) -> list[tuple[Variable, Tensor]]:
        return [pair for caches, new in zip(self.caches, known) for pair in zip(caches, new)]


def _layer(layer, x: Tensor, attend) -> Tensor:
    """Apply a layer of the model, without dropout, with another way to attend."""
    x = residual(x, layer.attention_norm, attend, layer.attention_dropout)
    return residual(x, layer.feed_forward_norm, layer.feed_forward, layer.feed_forward_dropout)


def _kept(known: list[KeysValues], attended: tuple[Tensor, KeysValues]) -> Tensor:
    """Note the keys and values of one attention; return what it computed."""
    known.append(attended[1])
    return attended[0]

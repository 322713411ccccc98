"""The decoder-only language model: pre-norm residual layers of causal self-attention and feed-forward.

Invariant: the residual stream is [batch, length, d_model]. The look-up calls the sequence embedding_length, attention query_length and
memory_length, the feed-forward ffn_length, the softmax loss_length, so that each of these regions may be laid out by a rule of its own;
where the rules agree, renaming is free.
"""

from __future__ import annotations

from typing import NamedTuple

from ..config import Config
from ..dims import Dimension
from ..errors import DimensionError
from ..graph.scope import inside, scope, scoped
from ..graph.tensor import Tensor
from ..layers import Dropout, Embedding, FeedForward, LayerNorm, LearnedPositions, Masks, RMSNorm, SelfAttention, residual
from ..layers.layer import renamed
from ..ops import cast, cross_entropy, full, greater_equal, logical_and, not_equal, reduce_sum, rename


class LossParts(NamedTuple):
    """``loss_sum``: the sum over the targets that count, in nats; ``n_targets``: how many those are; both scalars. ``logits``: see the model."""

    loss_sum: Tensor
    n_targets: Tensor
    logits: Tensor


class _Layer:
    """One layer's parts: attention and feed-forward, each with its norm and the dropout of its branch."""

    def __init__(self, lm: LanguageModel, name: str):
        m, t = lm.model, lm.dtype
        self.path = scoped(name)
        with scope(name):
            self.attention_norm = lm.norm("attention_norm")
            self.attention = SelfAttention(lm.d_model, lm.heads, lm.d_kv, "attention", m.attention_dropout_rate, True, m.biases, dtype=t)
            self.attention_dropout = Dropout(m.dropout, "attention_dropout", dtype=t)
            self.feed_forward_norm = lm.norm("feed_forward_norm")
            self.feed_forward = FeedForward(lm.d_model, lm.d_ff, m.activations, "feed_forward", m.dropout, m.biases, dtype=t)
            self.feed_forward_dropout = Dropout(m.dropout, "feed_forward_dropout", dtype=t)

    def __call__(self, x: Tensor, masks: Masks | None, segments: Tensor | None) -> Tensor:
        with inside(self.path):
            x = residual(x, self.attention_norm, lambda y: self.attention(y, masks, segments), self.attention_dropout, masks)
            return residual(x, self.feed_forward_norm, lambda y: self.feed_forward(y, masks), self.feed_forward_dropout, masks)


class LanguageModel:
    """A language model by the ``model`` section of a configuration; its variables are made here, in the scopes ``embedding``, ``positions``,
    ``layer_0`` ..., ``final_norm`` and, with an untied embedding, ``softmax``.

    ``dtype`` is float32 or float64. Targets below 0, or equal to ``ignore``, do not count.
    """

    def __init__(self, model: Config.model, dtype: str = "float32", ignore: int | None = None):
        self.model, self.dtype, self.ignore = model, dtype, ignore
        self.d_model, self.d_ff = Dimension("d_model", model.d_model), Dimension("d_ff", model.d_ff)
        self.heads, self.d_kv = Dimension("heads", model.heads), Dimension("d_kv", model.d_kv)
        stddev = model.embedding_stddev or (model.d_model**-0.5 if model.tied_embedding else 1.0)
        self.embedding = Embedding(model.vocab_size, self.d_model, "embedding", model.vocab_multiple, stddev, dtype=dtype)
        self.positions = LearnedPositions(model.length, self.d_model, "positions", stddev, dtype)
        self.embedding_dropout = Dropout(model.dropout, "embedding_dropout", dtype=dtype)
        self.layers = [_Layer(self, f"layer_{i}") for i in range(model.layers)]
        self.final_norm = self.norm("final_norm")
        self.softmax = self.embedding if model.tied_embedding else Embedding(
            model.vocab_size, self.d_model, "softmax", model.vocab_multiple, dtype=dtype)

    def norm(self, name: str):
        """Make a norm over d_model of the configured kind."""
        kind = LayerNorm if self.model.norm == "layer" else RMSNorm
        return kind(self.d_model, name, self.model.norm_eps, dtype=self.dtype)

    def embedded(self, inputs: Tensor, positions: Tensor | None = None) -> Tensor:
        """Return the residual stream's first value: the symbols' rows and the positions'.

        Shape   inputs, positions [batch, length] of integers -> [batch, length, d_model].
        Comm    with ``vocab`` split: one reduction of the result.
        Grad    to the two tables; with ``vocab`` split: no communication.
        Raises  DimensionError if ``inputs`` has no dimension ``length``, or a longer one than the model.
        """
        length = inputs.shape.get("length")
        if length is None:
            raise DimensionError(f"LanguageModel: the inputs are {inputs.shape}. Give [batch, length].")
        looked_up = rename(self.embedding(rename(inputs, {"length": "embedding_length"})), {"embedding_length": "length"})
        return looked_up + (self.positions(length) if positions is None else self.positions.at(positions))

    def scores(self, x: Tensor) -> Tensor:
        """Return the logits of a last residual value: normalised, scaled if so configured, times the softmax's table.

        Shape   x [..., d_model] -> [..., vocab]; ``length`` becomes ``loss_length``.
        Comm    none, unless ``d_model`` is split.
        Grad    with ``vocab`` split: one reduction of the gradient of x.
        Raises  DimensionError if ``x`` lacks ``d_model``.
        """
        x = renamed(self.final_norm(x), "length", "loss_length")
        if self.model.scale_logits:
            x = x * self.model.d_model**-0.5
        return self.softmax.logits(x)

    def logits(self, inputs: Tensor, masks: Masks | None = None, segments: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        """Return the scores of the symbol that follows each position; columns from ``vocab_size`` on are padding.

        Shape   inputs [batch, length] of integers; segments [batch, length] of integers, 0 for padding: positions see their own segment
                only; positions [batch, length] of integers, the index within the segment (default: within the row) -> [batch, loss_length, vocab].
        Comm    with ``heads`` and ``d_ff`` split: two reductions of [batch, length, d_model] a layer; with ``vocab`` split: one more.
        Grad    two more of the same size a layer, and the sums of the parameters' gradients over the axes that split the batch.
        Raises  DimensionError if ``inputs`` has no dimension ``length``, or a longer one than the model.
        """
        x = self.embedding_dropout(self.embedded(inputs, positions), masks)
        for layer in self.layers:
            x = layer(x, masks, segments)
        return self.scores(x)

    def loss(self, inputs: Tensor, targets: Tensor, masks: Masks | None = None, segments: Tensor | None = None, training: bool = True,
             positions: Tensor | None = None, logit_scale: float = 1.0) -> LossParts:
        """Return the summed cross-entropy of ``targets`` and the number of them that count, before any division.

        Label smoothing and z-loss are as configured in training and off otherwise; logits are multiplied by ``logit_scale``. Where the
        configuration's ``loss_denominator`` is ``all``, the number is that of all positions.

        Shape   inputs, targets, segments, positions [batch, length] of integers -> two scalars, and logits [batch, loss_length, vocab].
        Comm    that of :meth:`logits`; with ``vocab`` split: a maximum and three sums of [batch, loss_length]; both scalars are
                partial sums over the axes that split the batch.
        Grad    of the loss only.
        Raises  DimensionError if inputs and targets differ in shape.
        """
        if targets.shape != inputs.shape:
            raise DimensionError(f"LanguageModel: the inputs are {inputs.shape} and the targets {targets.shape}. Give one target a position.")
        logits = self.logits(inputs, masks, segments, positions)
        if logit_scale != 1.0:
            logits = logits * logit_scale
        targets = rename(targets, {"length": "loss_length"})
        loss = cross_entropy(logits, targets, self.softmax.vocab, n_valid=self.model.vocab_size, ignore=self.ignore,
                             label_smoothing=self.model.label_smoothing if training else 0.0, z_loss=self.model.z_loss if training else 0.0)
        if self.model.loss_denominator == "all":
            return LossParts(reduce_sum(loss), full((), float(targets.shape.size), self.dtype), logits)
        counts = greater_equal(targets, 0)
        if self.ignore is not None:
            counts = logical_and(counts, not_equal(targets, self.ignore))
        return LossParts(reduce_sum(loss), reduce_sum(cast(counts, self.dtype)), logits)

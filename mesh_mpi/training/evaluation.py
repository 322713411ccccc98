"""The loss of a model on text, and what it means: a token, a word and a byte.

Invariant: every row counts once, whatever the mesh and the batch; nothing here takes a gradient or has an optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..compiler.compile import compile
from ..compiler.program import Program
from ..config import Config
from ..data.vocabulary import EOS, PAD
from ..dims import Dimension
from ..errors import ConfigError
from ..graph.variable import placeholder
from ..log import say
from ..runtime.agreement import on_rank_0
from ..runtime.banner import place
from ..runtime.state import State
from ..transformer import LanguageModel
from .batches import HeldOut, open_held_out
from .trained import open_trained

ROWS_AT_ONCE = 1024


class TextCounts(NamedTuple):
    """What stands in rows: ``n_tokens`` (each document's end is one), ``n_bytes`` of the decoded text, ``n_words`` between white space."""

    n_tokens: int
    n_bytes: int
    n_words: int


class Evaluation(NamedTuple):
    """``loss_sum`` in nats over ``n_rows`` rows, and what stands in them."""

    loss_sum: float
    n_rows: int
    counts: TextCounts

    @property
    def loss(self) -> float:
        """Nats a token."""
        return self.loss_sum / max(self.counts.n_tokens, 1)

    @property
    def bits_per_byte(self) -> float:
        """Bits a byte."""
        return self.loss_sum / max(self.counts.n_bytes, 1) / math.log(2)

    def perplexity(self, n: int) -> float:
        """Return the perplexity over ``n`` parts of the same text: tokens, words or bytes."""
        exponent = self.loss_sum / max(n, 1)
        return math.exp(exponent) if exponent < 700 else math.inf

    def figures(self) -> dict:
        """Return everything by name, for a line of JSON."""
        c = self.counts
        return {"loss": self.loss, "perplexity_token": self.perplexity(c.n_tokens), "perplexity_word": self.perplexity(c.n_words),
                "perplexity_byte": self.perplexity(c.n_bytes), "bits_per_byte": self.bits_per_byte, "tokens": c.n_tokens, "words": c.n_words,
                "bytes": c.n_bytes, "rows": self.n_rows, "loss_sum": self.loss_sum}


def evaluation_program(config: Config, logit_scale: float = 1.0) -> Program:
    """Compile the summed loss of one batch of packed rows: the model forward, without dropout, smoothing or z-loss.

    Feeds: inputs, targets, segments, positions, int32 [batch, length]; the batch is a microbatch of the configuration.
    Communication: none. Raises LayoutError, MeshError or DimensionError, with every fault found.
    """
    c = config
    model = LanguageModel(c.model, c.float_type, ignore=PAD)
    dims = [Dimension("batch", c.n_sequences // c.n_microbatches), Dimension("length", c.model.length)]
    inputs, targets, segments, positions = (placeholder(name, dims, "int32") for name in ("inputs", "targets", "segments", "positions"))
    parts = model.loss(inputs, targets, None, segments, training=False, positions=positions, logit_scale=logit_scale)
    return compile({"loss_sum": parts.loss_sum}, [], c.mesh_shape, c.layout, c.storage, "evaluate", c.strict_layout)


def evaluate(state: State, program: Program, held_out: HeldOut, at_most: int = 0) -> Evaluation:
    """Return the loss over all held-out batches, or the first ``at_most`` (0: all), and the counts of their rows.

    Comm    that of the program, and one broadcast of the counts. Raises DataError if rows cannot be read.
    """
    n_rows, total = held_out.n_rows(at_most), 0.0
    for feeds in held_out.all(at_most):
        total += float(state.run(program, **feeds)["loss_sum"])
    counts = on_rank_0(state.machine, "evaluate", lambda: count_text(held_out.tokens, n_rows))
    return Evaluation(total, n_rows, counts)


def count_text(tokens, n_rows: int) -> TextCounts:
    """Return what stands in the first ``n_rows`` rows of tokens; a word that goes on in the next row counts once."""
    n_tokens = n_bytes = n_words = 0
    in_word = False
    for first in range(0, n_rows, ROWS_AT_ONCE):
        ids = tokens.rows(range(first, min(n_rows, first + ROWS_AT_ONCE)))["targets"].ravel()
        ids = ids[ids != PAD]
        n_tokens += len(ids)
        documents = [tokens.vocabulary.decode(part) for part in np.split(ids, np.flatnonzero(ids == EOS) + 1)]
        n_bytes += sum(map(len, documents))
        text = b" ".join(documents)
        n_words += len(text.split()) - (in_word and not text[:1].isspace() and bool(text))
        in_word = not text[-1:].isspace() if text else in_word
    return TextCounts(n_tokens, n_bytes, n_words)


def evaluate_checkpoint(source: str, overrides: Sequence[str] = (), data: str | None = None, logit_scale: float = 1.0, at_most: int = 0) -> Evaluation:
    """Evaluate a run's latest checkpoint, or a given one, on its ``data.valid`` or on other ``data``.

    Comm    collective. Raises MeshMpiError, alike on every rank, for whatever a user can mend.
    """
    if not math.isfinite(logit_scale) or at_most < 0:
        raise ConfigError(f"evaluate: the logit scale is {logit_scale} and the number of batches {at_most}. Give a number, and at least 0 batches (0: all).")
    if data == "":
        raise ConfigError("evaluate: --data is empty. Give a token file or bundled:sotu, or leave --data out.")
    trained = open_trained(source, overrides, "evaluate")
    if data is None and trained.config.data.valid is None:
        raise ConfigError(f"evaluate: the run of {source} has no data.valid. Give --data with a token file, or --data bundled:sotu.")
    held_out = open_held_out(trained.config, data)
    program = evaluation_program(trained.config, logit_scale)
    state = trained.state([program])
    say(place(state))
    return evaluate(state, program, held_out, at_most)

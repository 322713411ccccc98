"""Text continued by a trained model.

Invariant: what is chosen at a position is a function of the logits there, the seed, the number of the sample and the position; no mesh and no
layout enters it. Logits themselves differ between layouts by rounding: in float64 by some 1e-15, which changes no text, in float32
by some 1e-6, so that of two symbols as close as that another may be chosen.

Suffixes of arrays: N samples, L positions, V symbols.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..compiler.compile import compile
from ..compiler.program import Program
from ..config import Config
from ..data.vocabulary import EOS, PAD, ByteVocabulary
from ..dims import Dimension
from ..errors import ConfigError
from ..graph.variable import placeholder
from ..kernels.cpu.random import Stream, open_interval
from ..keys import name_key
from ..log import say
from ..runtime.banner import place
from ..transformer import Decoder, LanguageModel
from .trained import open_trained

END, ENOUGH, FULL = "the document's end", "as many tokens as asked for", "the model's length"


class Choice(NamedTuple):
    """How a symbol is chosen: the likeliest at ``temperature`` 0, else by probabilities of logits / temperature, among the ``top_k`` likeliest (0: all)."""

    temperature: float = 1.0
    top_k: int = 0
    seed: int = 0

    def check(self) -> None:
        """Raise ConfigError for numbers without meaning."""
        if not 0 <= self.temperature < float("inf") or self.top_k < 0 or not 0 <= self.seed < 2**64:
            raise ConfigError(f"generate: the temperature is {self.temperature}, top_k {self.top_k} and the seed {self.seed}. Give a temperature and a "
                              "top_k of at least 0 (0: the likeliest; all symbols), and a seed from 0 to 2**64 - 1.")

    def of(self, logits_V: np.ndarray, sample: int, position: int) -> int:
        """Return the symbol chosen from float64 logits; equal ones go to the lowest number. Padding is never chosen."""
        scores = np.array(logits_V, np.float64)
        scores[PAD] = -np.inf
        if not self.temperature:
            return int(scores.argmax())
        if 0 < self.top_k < len(scores):
            scores[np.argsort(-scores, kind="stable")[self.top_k:]] = -np.inf
        u = np.empty(len(scores))
        stream = Stream(name_key(f"generate {sample}"))
        stream.start(self.seed, position)
        stream.doubles(0, u)
        open_interval(u)
        return int((scores / self.temperature - np.log(-np.log(u))).argmax())  # Gumbel's way to draw by softmax probabilities


SAMPLED = Choice()


class Sample(NamedTuple):
    """One continuation, without the prompt: its bytes, its tokens (an end among them), and why it stopped."""

    text: bytes
    n_tokens: int
    stopped: str


class Writer:
    """A trained model and its two programs: one that goes through a prompt at once, one for each further position."""

    def __init__(self, trained, n_samples: int):
        c: Config = trained.config
        self.length, self.vocabulary = c.model.length, ByteVocabulary()
        if c.model.vocab_size < self.vocabulary.size:
            raise ConfigError(f"generate: model.vocab_size is {c.model.vocab_size}, and text has {self.vocabulary.size} symbols (bytes, padding and end). "
                              "Train on a token file.")
        self.n_rows = -(-n_samples // c.n_replicas) * c.n_replicas  # whole on every slice of the batch
        self.prefill, self.step = decoding_programs(c, self.n_rows)
        self.state = trained.state([self.prefill, self.step])

    def logits(self, out: dict) -> np.ndarray:
        """Return float64 [rows, symbols] of a run's output, without the vocabulary's padding."""
        return np.asarray(out["logits"], np.float64)[:, :self.vocabulary.size]

    def continued(self, prompt: bytes, n_tokens: int, choice: Choice, n_samples: int) -> list[Sample]:
        """Return ``n_samples`` continuations of ``prompt``, alike on every rank.

        Shape   a step computes [rows, d_model]; logits [rows, vocab] are gathered whole.
        Comm    that of the programs, one gather and one broadcast of the chosen symbols a token.
        """
        ids, room = self.vocabulary.encode(prompt), self.length - len(prompt)
        inputs_NL = np.zeros((self.n_rows, self.length), np.int32)
        inputs_NL[:, 1:len(ids) + 1] = ids
        at, chosen = len(ids), []
        out = self.state.run(self.prefill, whole=["logits"], inputs=inputs_NL, at=at)
        ended = np.zeros(n_samples, bool)
        for i in range(min(n_tokens, room)):
            if i:
                new_N = np.zeros(self.n_rows, np.int32)
                new_N[:n_samples] = chosen[-1]
                out = self.state.run(self.step, whole=["logits"], ids=new_N, at=at)
            logits, machine = self.logits(out), self.state.machine
            picked = [PAD if ended[n] else choice.of(logits[n], n, at) for n in range(n_samples)] if machine.rank == 0 else None
            chosen.append(np.array(machine.broadcast(picked), np.int64))  # one rank chooses: replicas need not agree to the last bit
            ended |= chosen[-1] == EOS
            at += 1
            if ended.all():
                break
        limit = ENOUGH if n_tokens <= room else FULL
        return [self._sample(np.array([c[n] for c in chosen], np.int64), limit) for n in range(n_samples)]

    def _sample(self, ids: np.ndarray, limit: str) -> Sample:
        return Sample(self.vocabulary.decode(ids), int(np.count_nonzero(ids != PAD)), END if EOS in ids else limit)


def decoding_programs(config: Config, n_rows: int) -> tuple[Program, Program]:
    """Compile the programs ``prefill`` (feeds inputs [batch, length] and at) and ``step`` (ids [batch] and at), which share variables.

    Communication: none. Raises LayoutError, MeshError or DimensionError, with every fault found.
    """
    c, batch = config, Dimension("batch", n_rows)
    decoder = Decoder(LanguageModel(c.model, c.float_type), batch)
    at = placeholder("at", (), "int64")
    first = decoder.prefill(placeholder("inputs", [batch, Dimension("length", c.model.length)], "int32"), at)
    prefill = compile({"logits": first.logits}, first.updates, c.mesh_shape, c.layout, c.storage, "prefill")
    then = decoder.step(placeholder("ids", [batch], "int32"), at)
    return prefill, compile({"logits": then.logits}, then.updates, c.mesh_shape, c.layout, c.storage, "step", like=prefill)


def generate(source: str, prompt: bytes, overrides: Sequence[str] = (), n_tokens: int = 100, choice: Choice = SAMPLED, n_samples: int = 1) -> list[Sample]:
    """Continue ``prompt`` with a run's latest checkpoint, or a given one; a text never grows beyond the model's length.

    Comm    collective. Raises MeshMpiError, alike on every rank: a prompt that leaves no position, or whatever else a user can mend.
    """
    choice.check()
    if n_tokens < 1 or n_samples < 1:
        raise ConfigError(f"generate: {n_samples} samples of {n_tokens} tokens were asked for. Give at least 1 of each.")
    trained = open_trained(source, overrides, "generate")
    length = trained.config.model.length
    if len(prompt) >= length:
        raise ConfigError(f"generate: the prompt has {len(prompt):,} tokens and the model's length is {length:,}, which has to hold at least one more. "
                          f"Give at most {length - 1:,} tokens (bytes).")
    writer = Writer(trained, n_samples)
    say(place(writer.state))
    return writer.continued(prompt, n_tokens, choice, n_samples)

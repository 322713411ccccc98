"""Which bytes a row of a step's batch holds.

Invariant: a row is a function of seed, step and global row; a rank makes its own rows only, and ranks that hold the same rows make the
same ones. Nothing is kept between steps, so that a run resumes anywhere from the step's number, on any mesh.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from ..config import Config
from ..data.order import MIX, mixed, permuted
from ..errors import ConfigError, ShapeError
from ..keys import name_key

ENTROPY_TOKENS = 1 << 24  # of rows whose frequencies are counted at the start of a run: within a second
ENTROPY_ROWS = 1024  # read at once


class ByteBatches:
    """Next-byte prediction over an array of bytes: windows of ``length`` bytes, in an order drawn anew for each epoch.

    ``data`` uint8 [n_bytes]; a step takes ``n_rows`` rows. Row r of step s (from 1) is window number (s - 1) n_rows + r of the endless
    sequence of epochs; within an epoch each window, and so each byte as an input, comes at most once. The last n_bytes - 1 mod length
    bytes are never inputs.

    Raises ShapeError if the data holds no whole window.
    """

    def __init__(self, data: np.ndarray, length: int, n_rows: int, seed: int):
        self.data, self.length, self.n_rows, self.seed = data, length, n_rows, seed
        self.n_windows = (len(data) - 1) // length
        if data.dtype != np.uint8 or data.ndim != 1 or self.n_windows < 1:
            raise ShapeError(f"batches: data of {data.dtype} {list(data.shape)} and sequences of {length}. Give at least {length + 1} bytes (uint8).")

    def starts(self, step: int, rows: slice) -> np.ndarray:
        """Return the index of the first byte of each of ``rows`` (global, a range) of a step, int64 [rows]."""
        sequence = np.arange(rows.start, rows.stop, dtype=np.int64) + (step - 1) * self.n_rows
        epochs, numbers = np.divmod(sequence, self.n_windows)
        windows = np.empty_like(numbers)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            windows[chosen] = permuted(numbers[chosen], self.n_windows, name_key(f"batches {self.seed} {epoch}"))
        return windows * self.length

    def feeds(self, step: int) -> dict[str, Callable]:
        """Return what a step is fed: callables that give int32 [rows, positions] for (rows, positions) slices of inputs and targets."""
        return {"inputs": lambda slices: self._cut(step, slices, 0), "targets": lambda slices: self._cut(step, slices, 1)}

    def _cut(self, step: int, slices, shift: int) -> np.ndarray:
        rows, positions = slices
        index = self.starts(step, rows)[:, None] + np.arange(positions.start + shift, positions.stop + shift)
        return self.data[index].astype(np.int32)


class SyntheticBatches:
    """Symbols drawn evenly from ``vocab_size`` by seed, step, row and position: for measurements, and tests without a text."""

    def __init__(self, vocab_size: int, length: int, n_rows: int, seed: int):
        self.vocab_size, self.length, self.n_rows, self.seed = vocab_size, length, n_rows, seed

    def feeds(self, step: int) -> dict[str, Callable]:
        """Return what a step is fed: callables that give int32 [rows, positions] for (rows, positions) slices of inputs and targets."""
        return {"inputs": lambda slices: self._cut(step, slices, 0), "targets": lambda slices: self._cut(step, slices, 1)}

    def rows_consumed(self, step: int) -> int:
        """Return how many rows have been taken when ``step`` steps are done."""
        return step * self.n_rows

    def start(self, step: int) -> None:
        """Nothing is read ahead."""

    def close(self) -> None:
        """Nothing is open."""

    def _cut(self, step: int, slices, shift: int) -> np.ndarray:
        rows, positions = slices
        row = np.arange(rows.start, rows.stop, dtype=np.uint64)[:, None] * np.uint64(self.length + 1)
        index = row + np.arange(positions.start + shift, positions.stop + shift, dtype=np.uint64)
        key = np.uint64(name_key(f"synthetic {self.seed} {step}"))
        return (mixed(index * MIX[0] + key) % np.uint64(self.vocab_size)).astype(np.int32)


def open_batches(config: Config):
    """Return the batches of ``data.train``: synthetic, or rows of a token file or of a bundled text.

    Raises DataError if the rows cannot be read or do not fit the model.
    """
    c, m = config, config.model
    if not c.data.is_packed:
        return SyntheticBatches(m.vocab_size, m.length, c.n_sequences, c.seed)
    from ..data.batches import Batches  # these need h5py
    from ..data.source import open_rows

    rows = open_rows(c.data.train, "train", m.length, m.vocab_size)
    return Batches(rows, c.n_sequences, c.seed, c.data.shuffle, c.data.prefetch)


class HeldOut:
    """The rows of ``data.valid``, each once, in batches of a microbatch's size; ``tokens`` are the rows themselves."""

    def __init__(self, batches):
        self.batches, self.tokens = batches, batches.tokens

    def n_rows(self, at_most: int = 0) -> int:
        """Return how many rows stand in all batches, or in the first ``at_most``."""
        n = self.tokens.n_rows
        return min(n, at_most * self.batches.n_sequences) if at_most else n

    def all(self, at_most: int = 0) -> Iterator[dict[str, Callable]]:
        """Yield the feeds of all batches, or of the first ``at_most`` (0: all)."""
        n = self.batches.n_steps
        for step in range(1, (min(n, at_most) if at_most else n) + 1):
            yield self.batches.feeds(step)


def open_held_out(config: Config, source: str | None = None) -> HeldOut:
    """Return the held-out rows of a configuration, or those of another ``source``. Raises DataError as :func:`open_batches`."""
    from ..data.batches import Batches
    from ..data.source import open_rows

    c = config
    rows = open_rows(source or c.data.valid, "valid", c.model.length, c.model.vocab_size)
    return HeldOut(Batches(rows, c.n_sequences // c.n_microbatches, c.seed, prefetch=0, once=True))


def read_bytes(path: str | Path) -> np.ndarray:
    """Return the bytes of a file, uint8 [n_bytes]; a name that ends in .gz is uncompressed. Raises ConfigError if it cannot be read."""
    try:
        raw = Path(path).read_bytes()
        return np.frombuffer(gzip.decompress(raw) if str(path).endswith(".gz") else raw, np.uint8)
    except OSError as error:
        raise ConfigError(f"data: {path} cannot be read: {error}. Give the path of a text, plain or .gz.") from None


def unigram_entropy_of_rows(tokens) -> float | None:
    """Return the entropy of the frequencies of the tokens that count, in nats a token; None for rows of more than ENTROPY_TOKENS, which take long."""
    if tokens.n_rows * tokens.length > ENTROPY_TOKENS:
        return None
    counts = np.zeros(tokens.vocab_size, np.int64)
    for first in range(0, tokens.n_rows, ENTROPY_ROWS):
        targets = tokens.rows(range(first, min(tokens.n_rows, first + ENTROPY_ROWS)))["targets"]
        counts += np.bincount(targets.ravel(), minlength=tokens.vocab_size)
    counts[0] = 0  # padding
    p = counts[counts > 0] / max(1, counts.sum())
    return float(-(p * np.log(p)).sum())


def unigram_entropy(data: np.ndarray) -> float:
    """Return the entropy of the distribution of bytes, in nats a byte: what a model reaches that knows frequencies only."""
    counts = np.bincount(np.asarray(data, np.uint8).ravel(), minlength=256).astype(np.float64)
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log(p)).sum())

"""The feeds of each step, from rows of tokens.

Invariant: row r of step s is a function of the seed, s and r alone. Ranks that ask for the same rows get the same ones, on any mesh, and
whether they were read ahead or not; the number of the step is all that a resumed run needs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np

from ..errors import ShapeError
from .order import RowOrder
from .prefetch import Prefetch
from .rows import FEEDS
from .tokens import TokenRows

Key = tuple[int, int, int, int]  # first and last row of the batch, first and last position: what a slice asks for


class Batches:
    """Batches of ``n_sequences`` rows of ``tokens`` a step, in an order drawn anew for each epoch (``shuffle``) or in the file's.

    The sequence is endless and leaves out nothing: a batch may hold the end of an epoch and the start of the next. With ``once`` the rows
    come once, in the file's order, and padding follows: ``n_steps`` steps see all of them, whatever the batch (for evaluation).
    ``prefetch``: steps read ahead on a thread once :meth:`start` was called; 0: none.
    """

    def __init__(self, tokens: TokenRows, n_sequences: int, seed: int, shuffle: bool = True, prefetch: int = 2, once: bool = False):
        if n_sequences < 1:
            raise ShapeError(f"batches: {n_sequences} sequences a step. Give at least 1.")
        self.tokens, self.n_sequences, self.prefetch, self.once = tokens, n_sequences, prefetch, once
        self.order = RowOrder(tokens.n_rows, seed, shuffle and not once)
        self.n_steps = -(-tokens.n_rows // n_sequences)  # that hold every row at least once
        self._lock, self._step, self._recent = threading.Lock(), 0, {}
        self._ahead: Prefetch | None = None
        self._wants_ahead = False

    def rows(self, step: int, rows: slice) -> np.ndarray:
        """Return which rows of the data stand at ``rows`` (a range of the batch) of a step (from 1), int64; -1: padding."""
        places = np.arange(rows.start, rows.stop, dtype=np.int64)
        if self.once:
            numbers = places + (step - 1) * self.n_sequences
            return np.where(numbers < self.tokens.n_rows, numbers, -1)
        return self.order.row(step, places, self.n_sequences)

    def feeds(self, step: int) -> dict[str, Callable]:
        """Return what a step is fed: ``inputs``, ``targets``, ``segments`` and ``positions``, each a callable(slices) that gives int32
        [rows, positions] of (rows, positions) slices of the batch. Those of one step share one reading. The arrays are read only."""
        return {name: lambda slices, name=name: self._get(step, _key(slices))[name] for name in FEEDS}

    def rows_consumed(self, step: int) -> int:
        """Return how many rows have been taken when ``step`` steps are done."""
        return step * self.n_sequences

    def epochs(self, step: int) -> float:
        """Return how often the data has been gone through when ``step`` steps are done."""
        return self.rows_consumed(step) / self.tokens.n_rows

    def start(self, step: int, slices: Sequence[tuple[slice, slice]] | None = None) -> None:
        """Start reading ahead from ``step`` on: the (rows, positions) ``slices`` of the batch that this process holds.

        Without ``slices``: those that the next step asks for, from the step after it on.
        """
        self.close()
        self._wants_ahead = self.prefetch > 0
        if slices is not None and self._wants_ahead:
            self._ahead = Prefetch(self._read, self.prefetch, step, list(dict.fromkeys(map(_key, slices))))

    def close(self) -> None:
        """Stop reading ahead."""
        self._wants_ahead = False
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None

    def __enter__(self) -> Batches:
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def _get(self, step: int, key: Key) -> dict[str, np.ndarray]:
        with self._lock:
            if step != self._step:
                self._turn_to(step)
            if key not in self._recent:
                ahead = self._ahead
                known = ahead is not None and ahead.covers(step, key)
                self._recent[key] = ahead.get(step, key) if known else self._read(step, key)
            return self._recent[key]

    def _turn_to(self, step: int) -> None:
        """Begin with another step: forget the last one, and read ahead what it asked for if the thread does not yet, or does other steps."""
        asked = tuple(self._recent)
        self._step, self._recent = step, {}
        if not self._wants_ahead:
            return
        if self._ahead is not None and not all(self._ahead.covers(step, key) for key in asked or self._ahead.keys):
            self._ahead.close()
            self._ahead = None
        if self._ahead is None and asked:
            self._ahead = Prefetch(self._read, self.prefetch, step, asked)

    def _read(self, step: int, key: Key) -> dict[str, np.ndarray]:
        first, last, begin, end = key
        arrays = self.tokens.rows(self.rows(step, slice(first, last)), slice(begin, end))
        for array in arrays.values():
            array.flags.writeable = False
        return arrays


def _key(slices: tuple[slice, slice]) -> Key:
    rows, positions = slices
    return rows.start, rows.stop, positions.start, positions.stop

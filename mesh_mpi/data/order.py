"""Which row of a data set stands at which place of which step.

Invariant: the order is a function of the seed, the epoch and the number of rows, takes constant memory, and knows no mesh and no rank.
"""

from __future__ import annotations

import numpy as np

from ..errors import DataError
from ..keys import name_key

N_ROUNDS = 6  # of the Feistel network; four already hide the input's order
MIX = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


class RowOrder:
    """An endless sequence of epochs, each a permutation of the ``n_rows`` rows chosen by ``seed`` and the epoch's number.

    Without ``shuffle`` each epoch is 0 ... n_rows - 1. A batch may hold the end of one epoch and the start of the next: no row is left
    out. Raises DataError for less than one row.
    """

    def __init__(self, n_rows: int, seed: int, shuffle: bool = True):
        if n_rows < 1:
            raise DataError(f"row order: the data has {n_rows} rows. Give at least one.")
        self.n_rows, self.seed, self.shuffle = n_rows, seed, shuffle

    def row(self, step: int, i, batch: int) -> np.ndarray:
        """Return the data row at places ``i`` (a number or an int array, from 0) of step ``step`` (from 1) with ``batch`` rows a step; int64.

        That is the row at place (step - 1) * batch + i of the sequence of epochs.
        """
        epochs, places = np.divmod(np.asarray(i, np.int64) + (step - 1) * batch, self.n_rows)
        if not self.shuffle:
            return places
        rows = np.empty_like(places)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            rows[chosen] = permuted(places[chosen], self.n_rows, name_key(f"rows {self.seed} {epoch}"))
        return rows


def permuted(index: np.ndarray, n: int, key: int) -> np.ndarray:
    """Return where a permutation of 0 ... n - 1, chosen by the 64-bit ``key``, takes each ``index`` (int64, below ``n``).

    A Feistel network on the next even power of two, walked until the result is below ``n``: constant memory whatever ``n``.
    """
    half = max(1, (max(n - 1, 1).bit_length() + 1) // 2)
    keys = mixed(np.arange(1, N_ROUNDS + 1, dtype=np.uint64) * MIX[0] + np.uint64(key))
    result, walking = np.asarray(index, np.uint64).copy(), np.ones(np.shape(index), bool)
    while walking.any():
        x = _feistel(result[walking], np.uint64(half), keys)
        result[walking] = x
        walking[walking] = x >= np.uint64(n)
    return result.astype(np.int64)


def mixed(x: np.ndarray) -> np.ndarray:
    """Return 64-bit words well mixed (the finaliser of splitmix64); arithmetic is modulo 2**64."""
    with np.errstate(over="ignore"):
        x = (x ^ (x >> np.uint64(30))) * MIX[1]
        x = (x ^ (x >> np.uint64(27))) * MIX[2]
    return x ^ (x >> np.uint64(31))


def _feistel(x: np.ndarray, half: np.uint64, keys: np.ndarray) -> np.ndarray:
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = x >> half, x & mask
    for key in keys:
        left, right = right, left ^ (mixed(right + key) & mask)
    return (left << half) | right

"""What stands in arrays on disk, in figures: statistics of one file, differences of two.

Invariant: arrays are read in blocks of 8 MiB, so files of any size take the same memory; no MPI.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import h5py
import numpy as np

from .format import Dataset, Description, describe, opened
from .streaming import blocks


class Statistics(NamedTuple):
    """Of one array: ``minimum``, ``maximum``, ``mean``, ``rms`` over its finite elements (NaN if there are none), the share of ``zeros``
    among all, and how many are ``not_finite``."""

    dataset: Dataset
    minimum: float
    maximum: float
    mean: float
    rms: float
    zeros: float
    not_finite: int


class Difference(NamedTuple):
    """Of one array in two files: how many elements differ, the largest |a - b|, and the largest |a - b| / max(|a|, |b|).

    Where only one of two elements is a number, both are infinite.
    """

    dataset: Dataset
    n_different: int
    absolute: float
    relative: float


class Comparison(NamedTuple):
    """``only_in_a``, ``only_in_b``: arrays that the other file lacks; ``other_shapes``: pairs; ``differences``: of all others, also equal ones."""

    a: Description
    b: Description
    only_in_a: list[Dataset]
    only_in_b: list[Dataset]
    other_shapes: list[tuple[Dataset, Dataset]]
    differences: list[Difference]

    @property
    def same(self) -> bool:
        """Whether both files hold the same arrays with the same values."""
        return not (self.only_in_a or self.only_in_b or self.other_shapes or any(d.n_different for d in self.differences))


def statistics(path) -> Iterator[Statistics]:
    """Yield the statistics of each array of a checkpoint, a run's latest or a file of tokens. Raises CheckpointError."""
    found = describe(path)
    with opened(found.path) as file:
        for dataset in found.datasets:
            yield _statistics(file[dataset.path], dataset)


def compare(a, b) -> Comparison:
    """Compare two checkpoints (folders, files, or runs: their latest) array by array. Raises CheckpointError."""
    first, second = describe(a), describe(b)
    in_a, in_b = ({d.path: d for d in found.datasets} for found in (first, second))
    shared = [(d, in_b[path]) for path, d in in_a.items() if path in in_b]
    with opened(first.path) as file_a, opened(second.path) as file_b:
        differences = [_difference(file_a[x.path], file_b[x.path], x) for x, y in shared if x.shape == y.shape]
    return Comparison(first, second, [d for path, d in in_a.items() if path not in in_b], [d for path, d in in_b.items() if path not in in_a],
                      [(x, y) for x, y in shared if x.shape != y.shape], differences)


def _blocks(item: h5py.Dataset) -> Iterator[tuple[slice, ...]]:
    return blocks(item.shape, 8)  # computed with in float64


def _statistics(item: h5py.Dataset, dataset: Dataset) -> Statistics:
    low, high, total, squares, n_zeros, n_finite = np.inf, -np.inf, 0.0, 0.0, 0, 0
    for block in _blocks(item):
        x = np.asarray(item[block], np.float64)
        n_zeros += x.size - np.count_nonzero(x)
        x = x[np.isfinite(x)]
        n_finite += x.size
        if x.size:
            low, high = min(low, x.min()), max(high, x.max())
            total, squares = total + x.sum(), squares + np.square(x).sum()
    if not n_finite:
        low = high = total = squares = np.nan
    n = max(n_finite, 1)
    return Statistics(dataset, float(low), float(high), float(total / n), float(np.sqrt(squares / n)), n_zeros / max(dataset.size, 1),
                      dataset.size - n_finite)


def _difference(a: h5py.Dataset, b: h5py.Dataset, dataset: Dataset) -> Difference:
    n_different, absolute, relative = 0, 0.0, 0.0
    for block in _blocks(a):
        x, y = (np.asarray(item[block], np.float64) for item in (a, b))
        differs = (x != y) & ~(np.isnan(x) & np.isnan(y))
        n = int(np.count_nonzero(differs))
        if n:
            n_different += n
            x, y = x[differs], y[differs]
            with np.errstate(all="ignore"):
                gap = _finite_or_inf(np.abs(x - y))
                share = _finite_or_inf(gap / np.maximum(np.abs(x), np.abs(y)))
            absolute, relative = max(absolute, float(gap.max())), max(relative, float(share.max()))
    return Difference(dataset, n_different, absolute, relative)


def _finite_or_inf(x: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(x), x, np.inf)

"""Dimensions and random inputs of the samples."""

from __future__ import annotations

import numpy as np
from oracles.harness import Given

from mesh_mpi import Dimension

A, B, C = Dimension("a", 4), Dimension("b", 6), Dimension("c", 8)
ROWS, COLUMNS = Dimension("rows", 4), Dimension("columns", 6)


def normal(rng, shape):
    """Standard normal numbers."""
    return rng.standard_normal(shape)


def positive(rng, shape):
    """Numbers from 0.5 to 2."""
    return rng.uniform(0.5, 2.0, shape)


def apart(rng, shape):
    """Numbers of both signs, at least 0.1 from 0 and 0.01 from one another, so that no corner lies within a difference step."""
    n = int(np.prod(shape))
    values = 0.1 + 2.0 * (np.arange(n) + 0.5) / n
    return (rng.permutation(values) * rng.choice([-1.0, 1.0], n)).reshape(shape)


def truth(rng, shape):
    """Truth values."""
    return rng.integers(0, 2, shape).astype(bool)


def whole(low: int, high: int):
    """Whole numbers from ``low`` up to, but not including, ``high``."""
    return lambda rng, shape: rng.integers(low, high, shape)


def constant(value):
    """The same number everywhere."""
    return lambda rng, shape: np.full(shape, value)


def floats(*dims, draw=normal, is_variable=False) -> Given:
    """A floating input."""
    return Given(dims, draw, "float", is_variable)


def integers(*dims, draw=None, dtype="int32") -> Given:
    """A whole-number input."""
    return Given(dims, draw or whole(-5, 6), dtype)


def booleans(*dims) -> Given:
    """A truth-valued input."""
    return Given(dims, truth, "bool")

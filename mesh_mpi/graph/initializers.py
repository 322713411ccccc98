"""Initial values of variables, as functions of seed, name and position.

Invariant: an initialiser is plain data; sizes in it are global, so no layout changes a value.
"""

from __future__ import annotations

import math

from ..dims import as_shape


class Initializer:
    """Plain data: ``kind`` and its numbers, as the kernel ``initialize`` takes them."""

    __slots__ = ("kind", "numbers")

    def __init__(self, kind: str, **numbers: float):
        self.kind, self.numbers = kind, numbers

    def __repr__(self):
        return f"{self.kind}({', '.join(f'{k}={v:g}' for k, v in self.numbers.items())})"


def zeros() -> Initializer:
    """All zeros."""
    return Initializer("zeros")


def ones() -> Initializer:
    """All ones."""
    return Initializer("ones")


def constant_value(value: float) -> Initializer:
    """The same number everywhere."""
    return Initializer("constant", value=float(value))


def normal(stddev: float = 1.0, mean: float = 0.0) -> Initializer:
    """Normal numbers, from one 64-bit word an element by the inverse distribution function (Wichura, AS 241)."""
    return Initializer("normal", mean=float(mean), stddev=float(stddev))


def truncated_normal(stddev: float = 1.0, mean: float = 0.0) -> Initializer:
    """Normal numbers cut at two standard deviations; ``stddev`` is that of the uncut distribution."""
    return Initializer("truncated_normal", mean=float(mean), stddev=float(stddev))


def uniform(low: float = 0.0, high: float = 1.0) -> Initializer:
    """Numbers spread evenly over [low, high)."""
    return Initializer("uniform", low=float(low), high=float(high))


def fan_in_normal(fan_in_dims, scale: float = 1.0) -> Initializer:
    """Normal numbers of standard deviation sqrt(scale / fan-in); the fan-in is the product of the *global* sizes."""
    return normal(math.sqrt(scale / as_shape(fan_in_dims).size))

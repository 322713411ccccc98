"""Kernels in NumPy, blocked so that what they work on stays in the cache. ``KERNELS`` has them by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import (
    attention,
    cross_entropy,
    dropout,
    elementwise,
    embedding,
    initialize,
    matmul,
    movement,
    norm,
    optimizer,
    reduce,
    softmax,
)

KERNELS: dict[str, Callable[..., Any]] = {
    name: factory
    for family in (
        elementwise,
        movement,
        matmul,
        reduce,
        norm,
        softmax,
        cross_entropy,
        embedding,
        attention,
        dropout,
        initialize,
        optimizer,
    )
    for name, factory in family.KERNELS.items()
}

__all__ = ["KERNELS"]

"""Feeds: what a run is given, checked and cut to this rank's slices.

Invariant: every check happens before the first collective of a run, and its text is the same on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..compiler.listing import placed_text
from ..compiler.program import Bound, Program
from ..errors import DtypeError, GraphError, ShapeError, nearest
from .memory import Memory


class Feed:
    """One feed of a bound program: ``pieces`` are (global slices, arrays of the ranks here that hold them)."""

    __slots__ = ("bound", "pieces")

    def __init__(self, program: Program, bound: Bound, memories: Sequence[Memory]):
        self.bound = bound
        by_slices: dict[tuple, tuple[tuple[slice, ...], list[np.ndarray]]] = {}
        for memory in memories:
            slices = bound.slices(program.mesh, memory.coordinate)
            key = tuple((s.start, s.stop) for s in slices)
            by_slices.setdefault(key, (slices, []))[1].append(memory.view(program.plan, bound.value))
        self.pieces = list(by_slices.values())

    def fill(self, given: Any) -> None:
        """Copy the slices of ``given`` into place.

        ``given`` is the whole array, a number for a feed without dimensions, or ``callable(slices)``, asked for each slice.
        Raises ShapeError or DtypeError.
        """
        name, dtype = self.bound.name, np.dtype(self.bound.value.dtype)
        if callable(given):
            for slices, views in self.pieces:
                array = np.asarray(given(slices))
                _check(f"feed {name}, slice {_slices_text(slices)}", array, views[0].shape, self.bound, dtype)
                for view in views:
                    np.copyto(view, array, casting="unsafe")
            return
        array = np.asarray(given)
        _check(f"feed {name}", array, self.bound.shape, self.bound, dtype)
        for slices, views in self.pieces:
            for view in views:
                np.copyto(view, array[slices], casting="unsafe")


def check_names(program: Program, given: dict[str, Any], filled: Sequence[str] = ("seed",)) -> None:
    """Raise GraphError for feeds that are missing or unknown; those in ``filled`` come from the state itself."""
    wanted = [name for name in program.feeds if name not in filled]
    missing = [name for name in wanted if name not in given]
    unknown = [name for name in given if name not in wanted]
    if missing:
        shown = ", ".join(f"{n}{placed_text(program.feeds[n].dims, program.feeds[n].placement)}" for n in missing)
        raise GraphError(f"run {program.name}: no feed for {shown}. Give each as a keyword: state.run(program, {missing[0]}=array).")
    if unknown:
        raise GraphError(f"run {program.name}: there is no placeholder {unknown[0]!r}.{nearest(unknown[0], wanted)}"
                         + ("" if wanted else " This program takes no feeds."))


def _slices_text(slices) -> str:
    return "[" + ", ".join(f"{s.start}:{s.stop}" for s in slices) + "]"


def _check(what: str, array: np.ndarray, shape: tuple[int, ...], bound: Bound, dtype: np.dtype) -> None:
    if array.shape != shape:
        dims = ", ".join(map(repr, bound.dims))
        raise ShapeError(f"{what}: an array of shape {list(array.shape)} was given, and {bound.name}[{dims}] takes {list(shape)}. "
                         "Feed the global array, or a callable that returns the slice it is asked for.")
    check_dtype(what, array, dtype)


def check_dtype(what: str, array: np.ndarray, dtype: np.dtype) -> None:
    """Raise DtypeError if ``array`` cannot become ``dtype`` without a change of kind or, for whole numbers, of value."""
    if array.dtype == dtype:
        return
    if array.dtype.kind in "iu" and dtype.kind in "iu":
        limits = np.iinfo(dtype)
        low, high = (int(array.min()), int(array.max())) if array.size else (0, 0)
        if low < limits.min or high > limits.max:
            raise DtypeError(f"{what}: {array.dtype} numbers from {low} to {high} do not fit {dtype} ({limits.min} to {limits.max}). "
                             "Declare the placeholder wider, or feed smaller numbers.")
    elif not np.can_cast(array.dtype, dtype, "same_kind"):
        raise DtypeError(f"{what}: an array of {array.dtype} was given for {dtype}. Convert it yourself: array.astype({dtype.name!r}).")

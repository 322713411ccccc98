"""Values: the arrays of one rank, as the program knows them before any memory exists.

Invariant: a value is either a root, contiguous in the order of its shape, or a strided view of a
root; shapes and strides are the same on every rank, offsets are linear in the coordinate.
"""

from __future__ import annotations

import itertools
import math

ITEMSIZE = {"float32": 4, "float64": 8, "int32": 4, "int64": 8, "bool": 1, "uint64": 8, "uint8": 1}
_numbers = itertools.count()


class Offset:
    """A number that depends on the rank's coordinate: ``constant + sum(coordinate(axis) * factor)``."""

    __slots__ = ("constant", "terms")

    def __init__(self, constant: int = 0, terms: tuple[tuple[str, int], ...] = ()):
        self.constant, self.terms = constant, tuple((a, f) for a, f in terms if f)

    def __add__(self, other):
        if not isinstance(other, Offset):
            return Offset(self.constant + other, self.terms)
        merged = dict(self.terms)
        for axis, factor in other.terms:
            merged[axis] = merged.get(axis, 0) + factor
        return Offset(self.constant + other.constant, tuple(merged.items()))

    def __mul__(self, factor: int):
        return Offset(self.constant * factor, tuple((a, f * factor) for a, f in self.terms))

    def at(self, coordinate: dict[str, int]) -> int:
        """Return the number at ``coordinate``."""
        return self.constant + sum(coordinate[a] * f for a, f in self.terms)

    def __repr__(self):
        parts = [f"{a}*{f}" for a, f in self.terms]
        if self.constant or not parts:
            parts.insert(0, str(self.constant))
        return "+".join(parts)


class Value:
    """One array of a rank. ``strides`` and ``offset`` count elements within the root."""

    __slots__ = ("number", "root", "shape", "dtype", "strides", "offset", "kind", "name")

    def __init__(self, shape, dtype, root=None, strides=None, offset=None, kind="temporary", name=""):
        self.number = next(_numbers)
        self.shape, self.dtype = tuple(shape), dtype
        self.root: Value = root or self
        self.strides = tuple(strides) if strides is not None else contiguous(self.shape)
        self.offset = offset or Offset()
        self.kind, self.name = kind, name

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def n_bytes(self) -> int:
        """The size in bytes."""
        return self.size * ITEMSIZE[self.dtype]

    @property
    def is_whole(self) -> bool:
        """True if this value is its whole root, in the root's order (lengths of 1 aside)."""
        root = self.root
        return root is self or (self.size == root.size and not self.offset.terms and not self.offset.constant
                                and self.is_contiguous)

    @property
    def is_contiguous(self) -> bool:
        """True if the elements lie one behind the other in the order of the shape."""
        expected = 1
        for n, s in zip(reversed(self.shape), reversed(self.strides)):
            if n != 1:
                if s != expected:
                    return False
                expected *= n
        return True

    def view(self, shape, strides, offset=None) -> Value:
        """Return another view of the same root."""
        return Value(shape, self.dtype, self.root, strides, self.offset if offset is None else offset, self.kind, self.name)

    def permuted(self, order) -> Value:
        """Return the view with its indices in another order."""
        if tuple(order) == tuple(range(len(self.shape))):
            return self
        return self.view([self.shape[i] for i in order], [self.strides[i] for i in order])

    def reshaped(self, shape) -> Value | None:
        """Return the view with another shape of equal size, or None if it is not strided."""
        strides = merge_strides(self.shape, self.strides, tuple(shape))
        return None if strides is None else (self if tuple(shape) == self.shape else self.view(shape, strides))


def contiguous(shape) -> tuple[int, ...]:
    """Return the strides (elements) of a contiguous array."""
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))


def merge_strides(old_shape, old_strides, new_shape) -> tuple[int, ...] | None:
    """Return strides that show a strided array in another shape without a copy, or None."""
    old = [(n, s) for n, s in zip(old_shape, old_strides) if n != 1]
    new = [n for n in new_shape if n != 1]
    strides, i, j = [], 0, 0
    while i < len(old) and j < len(new):
        i0, j0, n_old, n_new = i, j, old[i][0], new[j]
        while n_old != n_new:
            if n_old < n_new:
                i += 1
                n_old *= old[i][0]
            else:
                j += 1
                n_new *= new[j]
        if any(old[k][1] != old[k + 1][0] * old[k + 1][1] for k in range(i0, i)):
            return None
        step, group = old[i][1], []
        for n in reversed(new[j0:j + 1]):
            group.append(step)
            step *= n
        strides += reversed(group)
        i, j = i + 1, j + 1
    kept = iter(strides)
    return tuple(next(kept) if n != 1 else 1 for n in new_shape)

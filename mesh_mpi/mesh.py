"""The mesh of ranks: named axes with sizes.

Invariant: rank numbers and coordinates are row-major, the last axis fastest, so that neighbours
on the last axis are neighbours in rank number and normally share a node.
"""

from __future__ import annotations

import itertools
import math

from .errors import MeshError


class Mesh:
    """A Cartesian mesh of ranks, ``Mesh("data:4;model:2")`` or ``Mesh({"data": 4, "model": 2})``.

    Raises MeshError for an empty name, a doubled axis or a size that is no positive number.
    """

    __slots__ = ("axes", "names", "shape", "size")

    def __init__(self, axes: Mesh | str | dict[str, int] = ""):
        self.axes: dict[str, int] = _parse(axes)
        self.names = tuple(self.axes)
        self.shape = tuple(self.axes.values())
        self.size = math.prod(self.shape)

    def __eq__(self, other):
        return isinstance(other, Mesh) and tuple(self.axes.items()) == tuple(other.axes.items())

    def __hash__(self):
        return hash(tuple(self.axes.items()))

    def __repr__(self):
        return "[" + ", ".join(f"{name}={size}" for name, size in self.axes.items()) + "]"

    def coordinate(self, rank: int) -> dict[str, int]:
        """Return the coordinate of ``rank`` on every axis."""
        coordinate = {}
        for name, size in reversed(self.axes.items()):
            rank, coordinate[name] = divmod(rank, size)
        return {name: coordinate[name] for name in self.names}

    def rank(self, coordinate: dict[str, int]) -> int:
        """Return the rank at ``coordinate``."""
        rank = 0
        for name, size in self.axes.items():
            rank = rank * size + coordinate[name]
        return rank

    def extent(self, axes) -> int:
        """Return the number of ranks along ``axes`` together."""
        return math.prod(self.axes[a] for a in axes)

    def groups(self, axes) -> list[list[int]]:
        """Return the ranks of each group that differs along ``axes`` only, row-major over ``axes`` in mesh order."""
        inner = [a for a in self.names if a in axes]
        outer = [a for a in self.names if a not in axes]
        groups = []
        for fixed in itertools.product(*(range(self.axes[a]) for a in outer)):
            base = dict(zip(outer, fixed))
            groups.append([self.rank({**base, **dict(zip(inner, moved))})
                           for moved in itertools.product(*(range(self.axes[a]) for a in inner))])
        return groups


def _parse(axes) -> dict[str, int]:
    if isinstance(axes, Mesh):
        return dict(axes.axes)
    if isinstance(axes, dict):
        pairs = [(str(name), size) for name, size in axes.items()]
    else:
        pairs = [_pair(part, axes) for part in str(axes).replace(",", ";").split(";") if part.strip()]
    parsed: dict[str, int] = {}
    for name, size in pairs:
        try:
            number = int(size)
        except (TypeError, ValueError):
            number = 0
        if not name or number < 1 or number != float(size):
            raise MeshError(f"mesh: axis {name!r} has size {size!r}. Write mesh_shape as \"data:2;model:2\", sizes at least 1.")
        if name in parsed:
            raise MeshError(f"mesh: axis {name!r} stands twice in {axes!r}. Give each axis one size.")
        parsed[name] = number
    return parsed


def _pair(part: str, whole: str) -> tuple[str, str]:
    name, colon, size = part.strip().partition(":")
    if not colon or not name.strip() or not size.strip():
        raise MeshError(f"mesh: {part.strip()!r} in {whole!r} is no axis:size. Write mesh_shape as \"data:2;model:2\".")
    try:
        float(size)
    except ValueError:
        raise MeshError(f"mesh: axis {name.strip()!r} has size {size.strip()!r} in {whole!r}. Sizes are whole numbers of at least 1.") from None
    return name.strip(), size.strip()

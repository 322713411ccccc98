"""Placement: how a tensor lies on the mesh.

Invariant: along each axis a tensor is split over one dimension, replicated, or a partial sum; a
dimension may lie on several axes, the outermost first.
"""

from __future__ import annotations


class Placement:
    """``splits`` maps a dimension name to its axes (outermost first); ``partial`` is the tuple of axes with partial sums."""

    __slots__ = ("splits", "partial", "key")

    def __init__(self, splits: dict[str, tuple[str, ...]] | None = None, partial=()):
        self.splits = {d: tuple(a) for d, a in (splits or {}).items() if a}
        self.partial = tuple(sorted(partial))
        self.key = (tuple(sorted(self.splits.items())), self.partial)

    def __eq__(self, other):
        return isinstance(other, Placement) and self.key == other.key

    def __hash__(self):
        return hash(self.key)

    def __repr__(self):
        parts = [f"{d}:{'*'.join(a)}" for d, a in sorted(self.splits.items())]
        parts += [f"partial:{a}" for a in self.partial]
        return "{" + ", ".join(parts) + "}"

    def axes_of(self, dim: str) -> tuple[str, ...]:
        """Return the axes that split ``dim``."""
        return self.splits.get(dim, ())

    @property
    def split_axes(self) -> set[str]:
        """All axes that split some dimension (for membership only: never iterate over it)."""
        return {a for axes in self.splits.values() for a in axes}

    def resolved(self) -> Placement:
        """Return the same splits without partial sums."""
        return Placement(self.splits) if self.partial else self

    def with_partial(self, axes) -> Placement:
        """Return the same splits, partial over ``axes``."""
        return Placement(self.splits, axes)

    def renamed(self, names: dict[str, str]) -> Placement:
        """Return the placement after dimensions were renamed."""
        return Placement({names.get(d, d): a for d, a in self.splits.items()}, self.partial)

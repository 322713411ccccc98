"""Layout rules: which dimension is split over which mesh axis.

Invariant: rules are pure text until they meet a mesh; ``Rules.check`` reports every fault at once.
"""

from __future__ import annotations

from .errors import LayoutError, nearest
from .mesh import Mesh

STORAGE_CLASSES = ("parameters", "optimizer")
"""The classes of variables that ``storage`` rules may name."""


class Rules:
    """An ordered list of rules ``dimension:axis``, as in ``Rules("batch:data;d_ff:model;heads:model")``.

    Mesh-TensorFlow's strings work as they are. A dimension may stand in one rule only, and a rule once.
    """

    __slots__ = ("pairs", "text")

    def __init__(self, rules: Rules | str | dict[str, str] | list | None = ""):
        if isinstance(rules, Rules):
            self.pairs = rules.pairs
        elif isinstance(rules, dict):
            self.pairs = tuple((str(k), str(v)) for k, v in rules.items())
        elif isinstance(rules, (list, tuple)):
            self.pairs = tuple((str(k), str(v)) for k, v in rules)
        else:
            self.pairs = tuple(_pair(part, rules) for part in str(rules or "").replace(",", ";").split(";") if part.strip())
        self.text = ";".join(f"{d}:{a}" for d, a in self.pairs)

    def __repr__(self):
        return f"Rules({self.text!r})"

    def __eq__(self, other):
        return isinstance(other, Rules) and self.pairs == other.pairs

    def __hash__(self):
        return hash(self.pairs)

    def axes_of(self, dim: str) -> tuple[str, ...]:
        """Return the axes that split ``dim``, the outermost first."""
        return tuple(axis for name, axis in self.pairs if name == dim)

    def faults(self, mesh: Mesh, dims, where: str = "layout") -> list[str]:
        """Return a message for every rule that is wrong for this mesh and these dimension names."""
        found, seen = [], {}
        for dim, axis in self.pairs:
            if axis not in mesh.axes:
                found.append(f"{where}: rule {dim}:{axis} names axis {axis!r}, but the mesh is {mesh}.{_other_axis(axis, mesh)}")
            if dims is not None and dim not in dims:
                found.append(f"{where}: rule {dim}:{axis} names dimension {dim!r}, which no tensor has.{nearest(dim, sorted(dims))}")
            if dim in seen:
                found.append(f"{where}: dimension {dim!r} stands in two rules, {dim}:{seen[dim]} and {dim}:{axis}. Keep one of them."
                             if seen[dim] != axis else f"{where}: rule {dim}:{axis} stands twice. Delete one.")
            seen.setdefault(dim, axis)
        return found


def _pair(part: str, whole: str) -> tuple[str, str]:
    dim, colon, axis = (word.strip() for word in part.partition(":"))
    if not colon or not dim or not axis:
        raise LayoutError(f"layout: {part.strip()!r} in {whole!r} is no dimension:axis. Write layout as \"batch:data;d_ff:model\".")
    return dim, axis


def _other_axis(axis: str, mesh: Mesh) -> str:
    hint = nearest(axis, mesh.names)
    return hint if "mean" in hint else f"{hint} Rules belong to a mesh: change layout together with mesh_shape."

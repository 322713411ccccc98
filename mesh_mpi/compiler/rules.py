"""Where rules become placements, and every fault of a configuration is found at once.

Invariant: a tensor's placement depends on its own dimensions and its class of rules only.
"""

from __future__ import annotations

from ..dims import Dimension, Shape
from ..errors import LayoutError, nearest
from ..graph.variable import Variable
from ..layout import STORAGE_CLASSES, Rules
from ..mesh import Mesh
from ..spmd.placement import Placement


class PlacementRules:
    """The two lists of rules: ``layout`` for computation, ``storage`` by class on top of it for variables."""

    def __init__(self, mesh: Mesh, layout: Rules, storage: dict[str, Rules], strict: bool = False):
        self.mesh, self.layout, self.storage, self.strict = mesh, layout, storage, strict
        self._axes: dict[str, dict[str, tuple[str, ...]]] = {}
        self._placements: dict[tuple, Placement] = {}
        for name in ("compute", "accumulator", "cache", *STORAGE_CLASSES):
            axes = {d: layout.axes_of(d)[:1] for d, _ in layout.pairs}
            for d, a in storage.get(name, Rules()).pairs:
                if a not in axes.get(d, ()):
                    axes[d] = (*axes.get(d, ()), a)
            self._axes[name] = {d: tuple(x for x in a if mesh.axes.get(x, 1) > 1) for d, a in axes.items()}

    def axes_of(self, rules_class: str, dim: str) -> tuple[str, ...]:
        """Return the axes of more than one rank that split ``dim`` under a class of rules."""
        return self._axes[rules_class].get(dim, ())

    def placement(self, rules_class: str, shape: Shape) -> Placement:
        """Return the placement of a tensor of ``shape`` under a class of rules."""
        key = (rules_class, shape.names)
        found = self._placements.get(key)
        if found is None:
            rules = self._axes[rules_class]
            found = self._placements[key] = Placement({n: rules[n] for n in shape.names if rules.get(n)})
        return found

    def conflict(self, rules_class: str, dims, whole=frozenset()) -> tuple[Dimension, Dimension, str] | None:
        """Return two dimensions of one index space that the rules put on the same axis, or None."""
        taken: dict[str, Dimension] = {}
        rules = self._axes[rules_class]
        for dim in dims:
            if dim.name in whole:
                continue
            for axis in rules.get(dim.name, ()):
                if axis in taken and taken[axis].name != dim.name:
                    return taken[axis], dim, axis
                taken[axis] = dim
        return None


def check(rules: PlacementRules, operations, known=()) -> tuple[list[str], tuple[str, ...]]:
    """Raise one LayoutError with every fault of mesh and rules against these operations.

    ``known`` are further dimension names that rules may speak of. Returns the warnings, and all known names.
    """
    mesh = rules.mesh
    dims: dict[str, dict[int, Dimension]] = {}
    for op in operations:
        for t in op.outputs:
            for d in t.shape:
                dims.setdefault(d.name, {})[d.size] = d
    names = tuple(dict.fromkeys((*dims, *known)))
    faults = rules.layout.faults(mesh, names)
    for name, listed in rules.storage.items():
        if name not in STORAGE_CLASSES:
            faults.append(f"storage: there is no class of variables {name!r}.{nearest(name, STORAGE_CLASSES)}")
        faults += listed.faults(mesh, names, f"storage of {name}")
    if not faults:
        faults = _indivisible(rules, dims) + _conflicts(rules, operations)
    if faults:
        raise LayoutError("\n".join(dict.fromkeys(faults)))
    used = {a for _, a in rules.layout.pairs} | {a for r in rules.storage.values() for _, a in r.pairs}
    warnings = [f"no rule uses axis {a!r} of mesh {mesh}: its {n} ranks do the same work." for a, n in mesh.axes.items() if n > 1 and a not in used]
    return warnings, names


def _indivisible(rules, dims) -> list[str]:
    faults = []
    for rules_class in ("compute", *STORAGE_CLASSES):
        for name, sizes in dims.items():
            axes = rules.axes_of(rules_class, name)
            n = rules.mesh.extent(axes)
            for size in sizes:
                if size % n:
                    where = "layout" if axes == rules.layout.axes_of(name) else f"storage of {rules_class}"
                    divisors = [k for k in range(1, min(size, 4096) + 1) if size % k == 0]
                    shown = ", ".join(map(str, divisors if len(divisors) <= 12 else divisors[:11] + [size]))
                    faults.append(f"{where}: dimension {name}={size} is split over {'*'.join(axes)}={n} ranks and does not divide. "
                                  f"Sizes of the axis that do: {shown}; or make {name} a multiple of {n}.")
    return faults


def _conflicts(rules, operations) -> list[str]:
    """Return one fault for each pair of dimensions that meet on an axis, shown by the first tensor; inside operations only if no tensor has one."""
    tensors: dict[tuple, list] = {}
    stored, inside = [], []
    for op in operations:
        for t in op.outputs:
            found = rules.conflict(op.rules, t.shape)
            if found:
                tensors.setdefault(found, []).append(t)
            elif isinstance(t, Variable):
                stored += _stored_conflict(rules, t)
        if not tensors and not stored:
            space = op.definition.space(op)
            found = rules.conflict(op.rules, space.dims, space.whole)
            if found:
                inside.append(_two_on_one(f"operation {op!r} of {', '.join(map(repr, op.inputs))} has", found))
    faults = [_two_on_one(f"tensor {first!r} has" if not more else f"tensor {first!r} and {len(more)} more have", found)
              for found, (first, *more) in tensors.items()]
    return faults + stored or inside[:1]


def _stored_conflict(rules, variable: Variable) -> list[str]:
    """Return the fault of a variable whose class of storage puts two of its dimensions on one axis, if it does."""
    found = rules.conflict(variable.storage_class, variable.shape)
    if found is None:
        return []
    a, b, axis = found
    return [f"storage of {variable.storage_class}: variable {variable!r} has two dimensions on axis {axis!r}, {a} and {b}. "
            "Split only one of them there."]


def _two_on_one(what: str, found) -> str:
    a, b, axis = found
    return f"layout: {what} two dimensions on axis {axis!r}, {a} and {b}. Split only one of them there, or rename one (mm.rename) around this operation."

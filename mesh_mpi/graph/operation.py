"""Operations and the registry of their definitions.

Invariant: a definition is one block with shape rule, gradient, index space and lowering side by
side, and is refused if one of them is missing; "no gradient" is written out.
"""

from __future__ import annotations

from typing import Any

from ..dims import Dimension, Shape
from ..errors import DimensionError, RegistryError
from .scope import creation_number, current_rules, scoped
from .tensor import Tensor

NO_GRADIENT = "no gradient"
"""Written as ``vjp = NO_GRADIENT`` by a definition whose output carries no gradient to any input."""


class Space:
    """The index space of one operation: all its dimensions, and those that must be whole on each rank."""

    __slots__ = ("dims", "whole")

    def __init__(self, dims, whole=()):
        self.dims = tuple(dims)
        self.whole = frozenset(whole)


class OperationDef:
    """What an operation is: subclass it, and register one instance with :func:`register`.

    ``infer(inputs, attributes)`` returns ``[(Shape, dtype), ...]`` of the outputs.
    ``vjp(op, gradients)`` returns a gradient (or None) for each input, as ordinary operations, or is ``NO_GRADIENT``.
    ``space(op)`` returns the :class:`Space`.
    ``lower(op, inputs, builder)`` emits instructions on what one rank holds and returns it for each output.
    ``passes_partial(op, i)`` tells whether input ``i`` may be a partial sum, the others being replicated there.
    """

    kind: str = ""
    output_names: tuple[str, ...] = ("out",)
    resizes = False      # the same name may have two sizes among inputs and outputs (slice, pad)
    sums_inputs = False  # an n-ary sum: takes every mixture of partial inputs

    infer: Any = None
    vjp: Any = None
    space: Any = None
    lower: Any = None

    def passes_partial(self, op: Operation, i: int) -> bool:
        """Tell whether input ``i`` may stay a partial sum; most operations resolve it first."""
        return False

    def input_whole(self, op: Operation, i: int) -> frozenset[str]:
        """Return the dimensions that input ``i`` must hold whole; normally those of the index space."""
        return self.space(op).whole


REGISTRY: dict[str, OperationDef] = {}


def register(definition: OperationDef) -> OperationDef:
    """Add a definition to the registry; raise RegistryError if a part of it is missing."""
    kind = definition.kind
    missing = [part for part in ("infer", "vjp", "space", "lower") if getattr(definition, part) is None]
    if not kind or missing:
        raise RegistryError(f"operation {kind or type(definition).__name__!r}: {', '.join(missing) or 'its name'} missing. "
                            "Every definition has infer, vjp (or NO_GRADIENT), space and lower.")
    if kind in REGISTRY:
        raise RegistryError(f"operation {kind!r}: registered twice. Choose another name.")
    REGISTRY[kind] = definition
    return definition


class Operation:
    """One node of the graph."""

    __slots__ = ("definition", "inputs", "attributes", "name", "rules", "number", "outputs", "control", "__weakref__")

    def __init__(self, definition, inputs, attributes, name, rules, number):
        self.definition: OperationDef = definition
        self.inputs: tuple[Tensor, ...] = inputs
        self.attributes: dict[str, Any] = attributes
        self.name, self.rules, self.number = name, rules, number
        self.outputs: tuple[Tensor, ...] = ()
        self.control: tuple[Operation, ...] = ()

    def __repr__(self):
        return f"{self.definition.kind} {self.name}"


def build(kind: str, inputs, name: str | None = None, **attributes) -> tuple[Tensor, ...]:
    """Make an operation of the registry and return its outputs.

    Raises DimensionError if a dimension name has two sizes among its tensors.
    """
    definition = REGISTRY[kind]
    inputs = tuple(inputs)
    shapes = definition.infer(inputs, attributes)
    if not definition.resizes:
        _sizes_agree(kind, [t.shape for t in inputs] + [shape for shape, _ in shapes])
    op = Operation(definition, inputs, attributes, scoped(name or kind), current_rules(), creation_number())
    op.outputs = tuple(Tensor(op, i, shape, dtype) for i, (shape, dtype) in enumerate(shapes))
    return op.outputs


def _sizes_agree(kind: str, shapes: list[Shape]) -> None:
    if len(shapes) == 2 and shapes[0] is shapes[1]:
        return
    sizes: dict[str, Dimension] = {}
    for shape in shapes:
        for dim in shape:
            other = sizes.setdefault(dim.name, dim)
            if other.size != dim.size:
                raise DimensionError(f"{kind}: dimension {dim.name!r} has two sizes, {other.size} and {dim.size}, among "
                                     f"{', '.join(map(repr, shapes))}. Rename one, or slice or pad it.")

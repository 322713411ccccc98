"""From operations to instructions: each input is brought to where its operation wants it.

Invariant: every output ends up placed by the rules on its own dimensions (a relayout's excepted), and a
partial sum is resolved before any operation that does not say that it may pass.
"""

from __future__ import annotations

from ..errors import GraphError, LayoutError
from ..graph.operation import Operation
from ..graph.tensor import Tensor
from ..graph.variable import SOURCES, VARIABLE, Variable
from ..spmd.builder import Builder
from ..spmd.local import LocalTensor
from ..spmd.placement import Placement
from ..spmd.relayout import relayout
from ..spmd.value import ITEMSIZE, Value
from .listing import placed_text
from .rules import PlacementRules


class Lowering:
    """Lowers operations one by one; ``feeds`` and ``variables`` collect the roots that a State binds."""

    def __init__(self, rules: PlacementRules, consumers: dict[int, int], accumulators: dict[str, Placement]):
        self.rules, self.consumers, self.accumulators = rules, consumers, accumulators
        self.builder = Builder(rules.mesh, rules)
        self.locals: dict[int, LocalTensor] = {}
        self._moved: dict[tuple, LocalTensor] = {}
        self.feeds: dict[str, tuple[Tensor, LocalTensor]] = {}
        self.variables: dict[str, tuple[Variable, LocalTensor]] = {}

    def run(self, operations: list[Operation]) -> None:
        """Lower all operations, given in an order in which inputs come first."""
        for op in operations:
            if op.definition in SOURCES:
                self._source(op)
            else:
                self._operation(op)

    def _source(self, op: Operation) -> None:
        tensor = op.outputs[0]
        kind = "variable" if op.definition is VARIABLE else "feed"
        placement = self.stored(tensor) if isinstance(tensor, Variable) else self.rules.placement(op.rules, tensor.shape)
        local = self._root(tensor, placement, kind, op.name)
        self.locals[id(tensor)] = local
        if kind == "variable":
            self.variables[op.name] = (tensor, local)
        else:
            self.feeds[op.name] = (tensor, local)

    def stored(self, variable: Variable) -> Placement:
        """Return the placement in which a variable is kept."""
        if variable.storage_class == "accumulator" and variable.full_name in self.accumulators:
            return self.accumulators[variable.full_name]
        return self.rules.placement(variable.storage_class, variable.shape)

    def _root(self, tensor: Tensor, placement: Placement, kind: str, name: str) -> LocalTensor:
        lengths = [self.builder.length(d, placement) for d in tensor.shape]
        return LocalTensor(Value(lengths, tensor.dtype, kind=kind, name=name), tensor.shape.dims, placement)

    def _operation(self, op: Operation) -> None:
        b = self.builder
        b.origin = op.name
        inputs = [self.fetch(op, i) for i in range(len(op.inputs))]
        for tensor, local in zip(op.outputs, op.definition.lower(op, inputs, b)):
            wanted = getattr(op.definition, "placed", None)
            if wanted is None:
                target = self.rules.placement(op.rules, tensor.shape)
                taken = target.split_axes
                target = target.with_partial(a for a in local.placement.partial if a not in taken)
                local = relayout(b, local, target)
            self.locals[id(tensor)] = local

    def fetch(self, op: Operation, i: int) -> LocalTensor:
        """Return input ``i`` of an operation, placed as the operation wants it."""
        tensor = op.inputs[i]
        local = self.locals[id(tensor)]
        if getattr(op.definition, "takes_any_placement", False):
            return local
        whole = op.definition.input_whole(op, i)
        target = self.rules.placement(op.rules, tensor.shape)
        if any(d in target.splits for d in whole):
            self._gathered(op, tensor, [d for d in whole if d in target.splits])
            target = Placement({d: a for d, a in target.splits.items() if d not in whole})
        keep = ()
        if local.placement.partial:
            keep = tuple(a for a in local.placement.partial if self._passes(op, i, a, local, target))
        return self.moved(tensor, target.with_partial(keep))

    def moved(self, tensor: Tensor, target: Placement) -> LocalTensor:
        """Return ``tensor`` in a placement, moving it once however many ask."""
        local = self.locals[id(tensor)]
        if local.placement.key == target.key:
            return local
        key = (id(tensor), target.key)
        if key not in self._moved:
            moved = relayout(self.builder, local, target)
            self._moved[key] = moved
            if local.placement.partial and not moved.placement.partial:
                self.locals[id(tensor)] = moved  # resolved once; whoever comes later starts from here
        return self._moved[key]

    def _passes(self, op: Operation, i: int, axis: str, local: LocalTensor, target: Placement) -> bool:
        """Decide whether input ``i`` may stay partial on ``axis``: linear here, nobody else wants it whole, and the others replicated there."""
        tensor, definition = op.inputs[i], op.definition
        if self.consumers[id(tensor)] > 1 or axis in target.split_axes or not definition.passes_partial(op, i):
            return False
        space = definition.space(op)
        if not definition.sums_inputs:
            if any(axis in self.rules.axes_of(op.rules, d.name) for d in space.dims if d.name not in space.whole):
                return False
            if any(axis in self.locals[id(t)].placement.partial for j, t in enumerate(op.inputs) if j != i):
                return False
            if any(self._bytes(op, out) > local.value.n_bytes for out in op.outputs):
                return False
        return True

    def _bytes(self, op: Operation, tensor: Tensor) -> int:
        placement = self.rules.placement(op.rules, tensor.shape)
        return tensor.shape.size // self.builder.extent([a for axes in placement.splits.values() for a in axes]) * ITEMSIZE[tensor.dtype]

    def _gathered(self, op: Operation, tensor: Tensor, names) -> None:
        text = f"gathered: {op!r} needs {', '.join(sorted(names))} of {tensor!r} whole, and the layout splits it."
        if self.rules.strict:
            raise LayoutError(f"strict_layout: {text[10:]} Drop that rule, rename the dimension around the operation, or set strict_layout: false.")
        if text not in self.builder.notes:
            self.builder.notes.append(text)

    def store(self, variable: Variable, tensor: Tensor) -> LocalTensor:
        """Return the new value of a variable in the placement in which it is kept."""
        if variable.storage_class == "accumulator" and variable.full_name not in self.accumulators:
            self.accumulators[variable.full_name] = self.locals[id(tensor)].placement
        self.builder.origin = f"{variable.full_name}:="
        wanted, now = self.stored(variable), self.locals[id(tensor)].placement
        if not set(wanted.partial) <= set(now.partial):
            raise GraphError(f"compile: accumulator {variable.full_name!r} holds sums that are partial over {'*'.join(wanted.partial)}, and {tensor!r} is "
                             f"{placed_text(tensor.shape, now)}. Add only gradients of the same kind to it: mm.add_n([accumulator, gradient]).")
        return self.moved(tensor, wanted)

    def target(self, variable: Variable) -> LocalTensor:
        """Return the root of a variable that is written, whether or not it is read."""
        if variable.full_name not in self.variables:
            local = self._root(variable, self.stored(variable), "variable", variable.full_name)
            self.variables[variable.full_name] = (variable, local)
        return self.variables[variable.full_name][1]



"""``compile``: a graph, a mesh and rules become a program.

Invariant: every fault of graph, mesh and rules is found here, before any rank does anything.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Mapping

from ..errors import DimensionError, GraphError
from ..graph.gradients import reachable
from ..graph.tensor import Tensor
from ..graph.variable import Accumulator, Variable
from ..kernels import contract
from ..layout import Rules
from ..mesh import Mesh
from ..spmd.instruction import Instruction
from ..spmd.value import Value
from .groups import GROUP_BYTES, group_reductions
from .lower import Lowering
from .memory import plan_memory
from .passes import early_reductions, early_updates, fuse_pointwise, without_dead
from .program import Program, bound, offset_at
from .rules import PlacementRules, check


def _collector_paused(function):
    """Pause Python's cyclic collector meanwhile: it would go through the growing program again and again (200 layers: 4.6 s instead of 1.9 s)."""
    @functools.wraps(function)
    def paused(*args, **settings):
        was_on = gc.isenabled()
        gc.disable()
        try:
            return function(*args, **settings)
        finally:
            if was_on:
                gc.enable()
    return paused


@_collector_paused
def compile(outputs=None, updates=(), mesh_shape="", layout="", storage=None, name: str = "program", strict_layout: bool = False,
            like: Program | None = None, reuse_memory: bool = True, group_bytes: int = GROUP_BYTES) -> Program:
    """Compile outputs and variable updates into one SPMD program.

    ``outputs`` maps names to tensors; ``updates`` lists (variable, new value): all reads see the old values.
    ``mesh_shape`` is ``"data:2;model:2"``, ``layout`` ``"batch:data;d_ff:model"``, ``storage`` maps a class of variables
    (``parameters``, ``optimizer``) to further rules. ``like`` is an earlier program of the same model, whose accumulators
    and dimension names (for the check of the rules) this one shares.
    ``reuse_memory=False`` gives every value memory of its own (for checking the plan).

    Communication: none; compilation is pure. Raises MeshError, LayoutError, DimensionError or GraphError, with every fault found.
    """
    if outputs is not None and not isinstance(outputs, Mapping):
        raise GraphError(f"compile: outputs is {outputs!r}. Give a mapping of names to tensors, {{\"loss\": loss}}.")
    outputs, updates = dict(outputs or {}), list(updates)
    mesh, layout = Mesh(mesh_shape), Rules(layout)
    rules = PlacementRules(mesh, layout, {c: Rules(r) for c, r in (storage or {}).items()}, strict_layout)
    roots = list(outputs.values()) + [new for _, new in updates]
    _check_arguments(outputs, updates)
    operations = reachable(roots + [v for v, _ in updates])
    _check_names(operations)
    warnings, dim_names = check(rules, operations, like.dim_names if like else ())
    lowering = Lowering(rules, _consumers(operations, roots), dict(like.accumulators) if like else {})
    used = {id(t) for op in operations for t in op.inputs} | {id(t) for t in roots}
    lowering.run([op for op in operations if not isinstance(op.outputs[0], Accumulator) or id(op.outputs[0]) in used])
    out_locals = {key: _output(lowering, t) for key, t in outputs.items()}
    stored = [_stored(lowering, v, t) for v, t in updates]  # first: it decides where accumulators lie
    new_values = [(lowering.target(v).value, new) for (v, _), new in zip(updates, stored)]
    live = [x.value for x in out_locals.values()] + [new for _, new in new_values]
    instructions = without_dead(lowering.builder.instructions, live)
    instructions = fuse_pointwise(instructions, live)
    instructions = group_reductions(early_reductions(instructions), lowering.builder.extent, group_bytes, live)
    instructions = early_updates(instructions, new_values)
    for instruction in instructions:
        _cost(instruction, {axis: size - 1 for axis, size in mesh.axes.items()})
    plan, instructions = plan_memory(
        instructions, [x.value for _, x in lowering.variables.values()], [x.value for _, x in lowering.feeds.values()],
        [x.value for x in out_locals.values()], new_values, reuse_memory)
    text = f"layout \"{layout.text}\"" + "".join(f", storage of {c} \"{r.text}\"" for c, r in rules.storage.items())
    return Program(name, mesh, {n: bound(n, x) for n, (_, x) in lowering.feeds.items()}, {n: bound(n, x) for n, x in out_locals.items()},
                   {n: bound(n, x, v) for n, (v, x) in lowering.variables.items()}, tuple(v.full_name for v, _ in updates),
                   instructions, plan, lowering.accumulators, warnings, lowering.builder.notes, text, dim_names)


def _check_arguments(outputs, updates) -> None:
    for key, t in outputs.items():
        if not isinstance(t, Tensor):
            raise GraphError(f"compile: output {key!r} is {t!r}, not a tensor.")
    seen = set()
    for v, t in updates:
        if not isinstance(v, Variable) or not isinstance(t, Tensor):
            raise GraphError(f"compile: update ({v!r}, {t!r}) is not a pair of a variable and a tensor.")
        if set(v.shape.dims) != set(t.shape.dims) or v.dtype != t.dtype:
            raise DimensionError(f"compile: the new value of {v!r} of {v.dtype} is {t!r} of {t.dtype}. Dimensions and element type must be the same.")
        if v.full_name in seen:
            raise GraphError(f"compile: variable {v.full_name!r} is updated twice. Give it one new value.")
        seen.add(v.full_name)


def _check_names(operations) -> None:
    seen: dict[str, Tensor] = {}
    for op in operations:
        if op.definition.kind in ("variable", "placeholder"):
            other = seen.setdefault(op.name, op.outputs[0])
            if other is not op.outputs[0]:
                raise GraphError(f"compile: two sources are called {op.name!r}, {other!r} and {op.outputs[0]!r}. Use mm.scope, or another name.")


def _consumers(operations, roots) -> dict[int, int]:
    """Count, for each tensor, the operations, outputs and updates that use it (an operation that uses it twice counts twice)."""
    counts: dict[int, int] = {}
    for op in operations:
        for t in op.outputs:
            counts.setdefault(id(t), 0)
        for t in op.inputs:
            counts[id(t)] = counts.get(id(t), 0) + 1
    for t in roots:
        counts[id(t)] = counts.get(id(t), 0) + 1
    return counts


def _output(lowering: Lowering, tensor: Tensor):
    """Return an output placed by the layout, in memory that no update touches."""
    b = lowering.builder
    b.origin = "output"
    local = lowering.moved(tensor, lowering.locals[id(tensor)].placement.resolved())
    local = local.ordered(tensor.shape.names)
    return local if local.value.root.kind == "temporary" else b.copied(local, tensor.shape.names)


def _stored(lowering: Lowering, variable: Variable, tensor: Tensor) -> Value:
    return lowering.store(variable, tensor).ordered(variable.shape.names).value


def _cost(instruction: Instruction, last: dict[str, int]) -> None:
    """Give a kernel its scratch and its cost on the last rank: under a causal mask no other has more to do."""
    if instruction.is_collective:
        return
    kernel = contract.KERNELS[instruction.name]
    outs, ins = [v.shape for v in instruction.outputs], [v.shape for v in instruction.inputs]
    dtype = instruction.outputs[0].dtype
    params = {k: offset_at(v, last) for k, v in instruction.params.items()}
    n = kernel.scratch_bytes(outs, ins, dtype, params)
    if n:
        instruction.scratch = Value([n], "uint8")
    instruction.n_flops = kernel.flops(outs, ins, params)
    instruction.n_bytes = kernel.bytes_moved(outs, ins, 8 if dtype == "float64" else 4, params)

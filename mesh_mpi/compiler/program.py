"""The program: what a State binds and runs.

Invariant: plain data, the same on every rank, identified by a digest over every instruction.
"""

from __future__ import annotations

from typing import NamedTuple

from ..dims import Dimension
from ..graph.variable import Variable
from ..keys import text_digest
from ..mesh import Mesh
from ..spmd.instruction import Instruction
from ..spmd.local import LocalTensor
from ..spmd.placement import Placement
from ..spmd.value import Offset, Value
from .listing import instruction_text, listing, placed_text, summary
from .memory import MemoryPlan


class Bound(NamedTuple):
    """A feed, an output or a variable: the value, its dimensions in the value's order, its placement."""

    name: str
    value: Value
    dims: tuple[Dimension, ...]
    placement: Placement
    variable: Variable | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The global sizes, in the value's order."""
        return tuple(d.size for d in self.dims)

    def slices(self, mesh: Mesh, coordinate: dict[str, int]) -> tuple[slice, ...]:
        """Return the global index ranges that the rank at ``coordinate`` holds."""
        result = []
        for dim, length in zip(self.dims, self.value.shape):
            start, block = 0, dim.size
            for axis in self.placement.axes_of(dim.name):
                block //= mesh.axes[axis]
                start += coordinate[axis] * block
            result.append(slice(start, start + length))
        return tuple(result)

    def is_owner(self, mesh: Mesh, coordinate: dict[str, int]) -> bool:
        """True on the first of the ranks that hold the same slice."""
        return all(coordinate[a] == 0 for a in mesh.names if a not in self.placement.split_axes)


def bound(name: str, local: LocalTensor, variable: Variable | None = None) -> Bound:
    """Make the record of a local tensor."""
    return Bound(name, local.value, local.dims, local.placement, variable)


class CollectiveRecord(NamedTuple):
    """One collective as :meth:`Program.collectives` reports it."""

    name: str
    axes: tuple[str, ...]
    reduce: str
    payload_bytes: int
    wire_bytes: int
    n_members: int
    origin: str


class Program:
    """A compiled SPMD program; made by :func:`mesh_mpi.compile`."""

    def __init__(self, name: str, mesh: Mesh, feeds: dict[str, Bound], outputs: dict[str, Bound], variables: dict[str, Bound],
                 written: tuple[str, ...], instructions: list[Instruction], plan: MemoryPlan, accumulators: dict[str, Placement],
                 warnings: list[str], notes: list[str], rules_text: str, dim_names: tuple[str, ...] = ()):
        self.name, self.mesh = name, mesh
        self.feeds, self.outputs, self.variables, self.written = feeds, outputs, variables, written
        self.instructions, self.plan, self.accumulators = instructions, plan, accumulators
        self.warnings, self.notes, self.rules_text, self.dim_names = warnings, notes, rules_text, dim_names
        self.digest = text_digest(*self._canonical())

    def __repr__(self):
        return f"<Program {self.name} on mesh {self.mesh}: {len(self.instructions)} instructions, digest {self.digest[:12]}>"

    def _canonical(self):
        numbers: dict[int, int] = {}
        yield f"{self.name} {self.mesh} {self.rules_text}"
        for kind, table in (("feed", self.feeds), ("variable", self.variables)):
            for b in table.values():
                yield f"{kind} {b.name} {placed_text(b.dims, b.placement)} {b.value.dtype} {b.variable.init if b.variable is not None else ''}"
                numbers[b.value.root.number] = len(numbers)
        for instruction in self.instructions:
            yield instruction_text(instruction, numbers, True) + repr(self._addresses(instruction))
        for b in self.outputs.values():
            yield f"output {b.name} {numbers.get(b.value.root.number)} {placed_text(b.dims, b.placement)}"

    def _addresses(self, instruction: Instruction):
        return [self.plan.address(v.root) for v in instruction.outputs]

    def collectives(self) -> list[CollectiveRecord]:
        """Return every collective in order, with the bytes that one rank passes and sends."""
        return [CollectiveRecord(i.name, i.axes, i.params.get("reduce", ""), i.payload_bytes, i.wire_bytes, len(i.outputs), i.origin)
                for i in self.instructions if i.is_collective]

    @property
    def arena_bytes(self) -> int:
        """Bytes of the arena on one rank."""
        return self.plan.arena_bytes

    @property
    def live_bytes(self) -> int:
        """The largest sum of bytes alive at one instruction: no plan can need less."""
        return self.plan.live_bytes

    @property
    def variable_bytes(self) -> int:
        """Bytes of the variables on one rank."""
        return sum(b.value.n_bytes for b in self.variables.values())

    @property
    def peak_bytes(self) -> int:
        """Bytes that a rank needs for this program: variables and arena."""
        return self.arena_bytes + self.variable_bytes

    @property
    def n_flops(self) -> int:
        """Arithmetic operations of one rank in one run."""
        return sum(i.n_flops for i in self.instructions)

    @property
    def n_parameters(self) -> int:
        """Elements of all trainable variables, each counted once over the whole mesh."""
        return sum(b.variable.shape.size for b in self.variables.values()
                   if b.variable.trainable and b.variable.storage_class == "parameters")

    def listing(self) -> str:
        """Return the program as text: feeds, variables, instructions with bytes and costs, memory."""
        return listing(self)

    def summary(self) -> str:
        """Return a short account: parameters, collectives by kind and axes, flops, memory."""
        return summary(self)


def offset_at(value, coordinate) -> object:
    """Evaluate a parameter that may hold Offsets at a coordinate."""
    if isinstance(value, Offset):
        return value.at(coordinate)
    if isinstance(value, (tuple, list)):
        return type(value)(offset_at(v, coordinate) for v in value)
    return value

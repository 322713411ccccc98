"""The builder: lowering rules emit kernels and collectives through it.

Invariant: it is the only place where instructions and roots are made; it knows the mesh's sizes
and the rules, never a rank.
"""

from __future__ import annotations

import math

from ..dims import Dimension, Shape
from ..mesh import Mesh
from .instruction import COLLECTIVES, Instruction, wire_bytes
from .local import LocalTensor
from .placement import Placement
from .value import Offset, Value


class Builder:
    """Collects the instructions of one program."""

    def __init__(self, mesh: Mesh, rules):
        self.mesh = mesh
        self.rules = rules
        self.instructions: list[Instruction] = []
        self.origin = ""
        self.notes: list[str] = []

    # -- sizes and places ------------------------------------------------------------------

    def extent(self, axes) -> int:
        """Return how many ranks lie along ``axes``."""
        return math.prod(self.mesh.axes[a] for a in axes)

    def length(self, dim: Dimension, placement: Placement) -> int:
        """Return the local length of ``dim``."""
        return dim.size // self.extent(placement.axes_of(dim.name))

    def start(self, dim: Dimension, axes) -> Offset:
        """Return the global index at which this rank's slice of ``dim`` begins."""
        terms, block = [], dim.size
        for axis in axes:
            block //= self.mesh.axes[axis]
            terms.append((axis, block))
        return Offset(0, tuple(terms))

    def placement(self, op, shape: Shape) -> Placement:
        """Return the placement that the rules of an operation's class give to ``shape``."""
        return self.rules.placement(op.rules, shape)

    # -- values ----------------------------------------------------------------------------

    def new(self, dims, placement: Placement, dtype: str) -> LocalTensor:
        """Make a root that holds this rank's slice, in the order of ``dims``."""
        return LocalTensor(Value([self.length(d, placement) for d in dims], dtype), dims, placement)

    def emit(self, name: str, outputs, inputs, **params) -> Instruction:
        """Append a kernel; ``outputs`` and ``inputs`` are values or local tensors."""
        instruction = Instruction(name, [_value(x) for x in outputs], [_value(x) for x in inputs], params, self.origin)
        self.instructions.append(instruction)
        return instruction

    def collective(self, name: str, output: Value, source: Value, axes, **params) -> Instruction:
        """Append a collective over ``axes`` from one contiguous buffer to another."""
        assert name in COLLECTIVES and source.is_contiguous and output.is_contiguous, (name, source.shape, source.strides)
        axes = tuple(a for a in self.mesh.names if a in axes)
        instruction = Instruction(name, [output], [source], params, self.origin, axes)
        instruction.payload_bytes = max(output.n_bytes, source.n_bytes)
        instruction.wire_bytes = wire_bytes(name, instruction.payload_bytes, self.extent(axes))
        self.instructions.append(instruction)
        return instruction

    # -- frequent kernels --------------------------------------------------------------------

    def elementwise(self, fn: str, operands, dims=None, dtype: str | None = None, placement: Placement | None = None) -> LocalTensor:
        """Emit one pointwise function of local tensors and numbers; the result lies as ``placement`` says (default: the first full operand's)."""
        tensors = [x for x in operands if isinstance(x, LocalTensor)]
        full = max(tensors, key=lambda x: x.value.size)
        if dims is not None and len(full.dims) != len(dims):
            full = max(tensors, key=lambda x: len(x.dims))
        names = full.memory_order()
        out_dims = [full.dims[full.index[n]] for n in names]
        out = self.new(out_dims, placement or full.placement, dtype or full.value.dtype)
        refs, inputs = [], []
        for x in operands:
            if isinstance(x, LocalTensor):
                refs.append(("i", len(inputs)))
                inputs.append(x.broadcast(names, out.value.shape))
            else:
                refs.append(("c", x))
        self.emit("elementwise", [out], inputs, steps=((fn, tuple(refs), ("o", 0)),), temp_dtypes=(),
                  in_dtypes=tuple(v.dtype for v in inputs), out_dtypes=(out.value.dtype,))
        return out

    def copied(self, x: LocalTensor, names, dtype: str | None = None) -> LocalTensor:
        """Copy a slice into a new contiguous root in the order of ``names``."""
        source = x.ordered(names)
        out = LocalTensor(Value(source.value.shape, dtype or x.value.dtype), source.dims, x.placement)
        self.emit("copy", [out], [source])
        return out

    def in_order(self, x: LocalTensor, names) -> LocalTensor:
        """Return the slice contiguous in the order of ``names``, copying only if it lies otherwise."""
        view = x.ordered(names)
        return view if view.value.is_contiguous else self.copied(x, names)

    def allreduce(self, x: LocalTensor, axes, reduce: str = "sum") -> LocalTensor:
        """Reduce over ``axes``, in place of the operand's memory where nobody else needs it."""
        source = x.ordered(x.memory_order())
        if not source.value.is_whole:
            source = self.copied(x, source.names)
        out = Value(source.value.shape, source.value.dtype)
        self.collective("allreduce", out, source.value, axes, reduce=reduce)
        partial = [a for a in x.placement.partial if a not in axes]
        return LocalTensor(out, source.dims, x.placement.with_partial(partial))

    def reduced(self, x: LocalTensor, names, fn: str = "sum") -> LocalTensor:
        """Reduce a slice over ``names``; the result is partial over the axes that split them (for ``max`` too: allreduce it at once)."""
        source = x.ordered(x.memory_order())
        kept = [d for d in source.dims if d.name not in names]
        placement = Placement({d.name: x.placement.axes_of(d.name) for d in kept},
                              (*x.placement.partial, *(a for n in names for a in x.placement.axes_of(n))))
        out = self.new(kept, placement, x.value.dtype)
        self.emit("reduce", [out], [source], fn=fn, axes=tuple(i for i, d in enumerate(source.dims) if d.name in names))
        return out

    def vector(self, x: LocalTensor, names) -> Value:
        """Return the slice as one contiguous vector whose elements go through ``names`` row-major, copying only if it must."""
        value = self.in_order(x, names).value
        return value.reshaped((value.size,))

    def rows(self, x: LocalTensor, last: str, names=None) -> tuple[Value, tuple[str, ...]]:
        """Return the slice as a matrix [rows, ``last``] and the names of its row dimensions, copying only if it must."""
        names = tuple(n for n in (names or x.memory_order()) if n != last)
        view = x.ordered((*names, last)).value
        n_rows = math.prod(view.shape[:-1])
        matrix = view.reshaped((n_rows, view.shape[-1])) if view.strides[-1] == 1 or view.shape[-1] == 1 else None
        if matrix is None:
            matrix = self.copied(x, (*names, last)).value.reshaped((n_rows, view.shape[-1]))
        return matrix, names


def _value(x) -> Value:
    return x.value if isinstance(x, LocalTensor) else x

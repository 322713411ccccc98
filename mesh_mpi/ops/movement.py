"""Renaming, reshaping and moving tensors.

Invariant: these change names and places, never values; what need not move does not move.
"""

from __future__ import annotations

import math

from ..dims import Dimension, Shape, as_shape, require
from ..errors import DimensionError, LayoutError, ShapeError
from ..graph.operation import OperationDef, Space, build, register
from ..graph.tensor import OPERATORS, Tensor
from ..layout import Rules
from ..spmd.local import LocalTensor
from ..spmd.placement import Placement
from ..spmd.relayout import relayout as move
from ..spmd.value import Value


class _Rename(OperationDef):
    """Give dimensions other names, all at once."""

    kind = "rename"

    def infer(self, inputs, attributes):
        """The same dimensions under their new names."""
        names = attributes["names"]
        return [(Shape(Dimension(names.get(d.name, d.name), d.size) for d in inputs[0].shape), inputs[0].dtype)]

    def vjp(self, op, douts):
        """Rename back."""
        return [rename(douts[0], {new: old for old, new in op.attributes["names"].items()})]

    def space(self, op):
        """Old and new names never meet in one index space."""
        return Space(())

    def passes_partial(self, op, i):
        """A partial sum passes."""
        return True

    def lower(self, op, inputs, b):
        """The same memory under other names; the rules on the new names then decide whether it moves."""
        out = op.outputs[0].shape
        return [inputs[0].renamed({old: out.get(new) for old, new in op.attributes["names"].items()})]


register(_Rename())


def rename(x: Tensor, names) -> Tensor:
    """Rename dimensions of ``x``, ``{"length": "query_length"}``; several at once, so that two can change places.

    Shape   x [length, d_model] -> [query_length, d_model].
    Comm    none if the rules place the new names as the old; else the cheapest of slice, swap, all-to-all, allgather.
    Grad    renamed back.
    Raises  DimensionError for a name that ``x`` lacks or a result with a doubled name.
    """
    names = {old: (new.name if isinstance(new, Dimension) else new) for old, new in
             ((k.name if isinstance(k, Dimension) else k, v) for k, v in dict(names).items())}
    for old in names:
        require(x.shape, old, "rename")
    names = {old: new for old, new in names.items() if old != new}
    return build("rename", [x], names=names)[0] if names else x


class _Reshape(OperationDef):
    """Split and merge dimensions, row-major."""

    kind = "reshape"

    def infer(self, inputs, attributes):
        """The asked-for shape, of as many elements."""
        shape = attributes["shape"]
        if shape.size != inputs[0].shape.size:
            raise ShapeError(f"reshape: {inputs[0].shape} has {inputs[0].shape.size} elements and {shape} has {shape.size}. The products of the sizes must agree.")
        return [(shape, inputs[0].dtype)]

    def vjp(self, op, douts):
        """Reshape back."""
        return [reshape(douts[0], op.inputs[0].shape)]

    def space(self, op):
        """Old and new dimensions never meet in one index space."""
        return Space(())

    def passes_partial(self, op, i):
        """A partial sum passes."""
        return True

    def lower(self, op, inputs, b):
        """Bring axes to the outermost dimension of each group, see the memory in another shape, let the rules place the result."""
        x, shape = inputs[0], op.outputs[0].shape
        groups = _groups(op.inputs[0].shape, shape)
        wanted = b.placement(op, shape)
        before, after = {}, {}
        for old, new in groups:
            old, new = _longer(old), _longer(new)
            axes = _carried(b, x.placement, wanted, old, new)
            if old:
                before[old[0].name] = axes
            if new:
                after[new[0].name] = axes
        x = move(b, x, Placement(before, x.placement.partial))
        view = x.ordered(op.inputs[0].shape.names)
        placement = Placement(after, x.placement.partial)
        lengths = [b.length(d, placement) for d in shape]
        value = view.value.reshaped(lengths)
        if value is None:
            value = b.copied(view, view.names).value.reshaped(lengths)
        return [LocalTensor(value, shape.dims, placement)]


register(_Reshape())


def _groups(old: Shape, new: Shape):
    """Pair up the smallest runs of old and new dimensions of equal product."""
    groups, left, right, i, j = [], [], [], 0, 0
    while i < len(old) or j < len(new):
        a, b = math.prod(d.size for d in left), math.prod(d.size for d in right)
        if a == b and left and right:
            groups.append((left, right))
            left, right = [], []
        elif (a <= b or j >= len(new)) and i < len(old) and not (a == b and left):
            left.append(old.dims[i])
            i += 1
        elif j < len(new):
            right.append(new.dims[j])
            j += 1
        else:
            left.append(old.dims[i])
            i += 1
    if left or right:
        if groups and (not left or not right):
            groups[-1] = (groups[-1][0] + left, groups[-1][1] + right)
        else:
            groups.append((left, right))
    return groups


def _longer(dims):
    """Leave out dimensions of size 1: they hide which one is outermost."""
    return [d for d in dims if d.size > 1] or dims


def _carried(b, now: Placement, wanted: Placement, old, new) -> tuple[str, ...]:
    """Return the axes that split the outermost dimensions of a group before and after the change of shape.

    An axis can be carried only if its blocks are whole in both: its extent divides both outermost sizes.
    """
    if not old or not new:
        return ()
    limit = math.gcd(old[0].size, new[0].size)
    carried: list[str] = []
    for axis in now.axes_of(old[0].name):
        if limit % (b.extent(carried) * b.mesh.axes[axis]):
            break
        carried.append(axis)
    inner = [a for d in old[1:] for a in now.axes_of(d.name)]
    goal = wanted.axes_of(new[0].name)
    for axis in goal[len(carried):]:
        if goal[:len(carried)] != tuple(carried) or axis not in inner or limit % (b.extent(carried) * b.mesh.axes[axis]):
            break
        carried.append(axis)
    return tuple(carried)


def reshape(x: Tensor, dims) -> Tensor:
    """Reinterpret ``x`` row-major (in the order of its shape) with other dimensions: split, merge or rename them.

    Shape   x [a=4, b=6] -> [c=24] or [c=8, d=3].
    Comm    none where the rules keep the outermost dimension of each split or merged group on its axes; else the
            cheapest of slice, swap, all-to-all, allgather.
    Grad    reshaped back.
    Raises  ShapeError if the numbers of elements differ.
    """
    shape = as_shape(dims)
    return x if shape == x.shape else build("reshape", [x], shape=shape)[0]


class _Relayout(OperationDef):
    """Place one tensor by rules of its own."""

    kind = "relayout"
    placed = True
    takes_any_placement = True

    def infer(self, inputs, attributes):
        """The same shape."""
        return [(inputs[0].shape, inputs[0].dtype)]

    def vjp(self, op, douts):
        """The gradient stays where the rules put it."""
        return [douts[0]]

    def space(self, op):
        """The layout's rules do not apply to the result."""
        return Space(())

    def lower(self, op, inputs, b):
        """Move directly from where the operand is."""
        rules: Rules = op.attributes["rules"]
        faults = rules.faults(b.mesh, op.inputs[0].shape.names, f"relayout of {op.inputs[0]!r}")
        if not faults:
            axes = [a for _, a in rules.pairs if b.mesh.axes[a] > 1]
            faults = [f"relayout of {op.inputs[0]!r}: rules {rules.text!r} put two dimensions on one axis." for a in axes if axes.count(a) > 1][:1]
            faults += [f"relayout of {op.inputs[0]!r}: {op.inputs[0].shape.get(d)} does not divide over {a}={b.mesh.axes[a]}."
                       for d, a in rules.pairs if op.inputs[0].shape.size_of(d) % b.mesh.axes[a]]
        if faults:
            raise LayoutError("\n".join(faults))
        return [move(b, inputs[0], Placement({d: (a,) for d, a in rules.pairs if b.mesh.axes[a] > 1}))]


register(_Relayout())


def relayout(x: Tensor, rules) -> Tensor:
    """Place ``x`` by ``rules`` alone (``"a:p;b:q"``, ``""`` for whole on every rank); its consumers bring it back to the layout.

    Shape   x [...] -> [...].
    Comm    the cheapest of keep, slice, swap, all-to-all, reduce(-scatter), allgather.
    Grad    the identity.
    Raises  LayoutError when compiled, if the rules do not fit mesh or tensor.
    """
    return build("relayout", [x], rules=Rules(rules))[0]


class _Slice(OperationDef):
    """Take a range of indices along one dimension."""

    kind = "slice"
    resizes = True

    def infer(self, inputs, attributes):
        """The dimension is replaced by the new one."""
        dims = [attributes["new"] if d.name == attributes["dim"] else d for d in inputs[0].shape]
        return [(Shape(dims), inputs[0].dtype)]

    def vjp(self, op, douts):
        """Pad with zeros."""
        return [pad(douts[0], op.attributes["new"], op.attributes["start"], op.inputs[0].shape.get(op.attributes["dim"]))]

    def space(self, op):
        """The sliced dimension is held whole."""
        return Space(op.inputs[0].shape, {op.attributes["dim"]})

    def passes_partial(self, op, i):
        """A partial sum passes."""
        return True

    def lower(self, op, inputs, b):
        """A view."""
        new = op.attributes["new"]
        cut = inputs[0].cut(op.attributes["dim"], op.attributes["start"], new, new.size, inputs[0].placement)
        return [cut]


register(_Slice())


def slice(x: Tensor, dim, start: int, new_dim: Dimension) -> Tensor:
    """Take indices ``start`` to ``start + new_dim.size`` of a dimension; the result has ``new_dim`` in its place.

    Shape   x [max_length, d_model] -> [length, d_model].
    Comm    none where ``dim`` is not split; else it is gathered (``strict_layout`` makes that an error).
    Grad    padded with zeros.
    Raises  DimensionError if ``x`` lacks ``dim`` or the range leaves it.
    """
    old = require(x.shape, dim, "slice")
    if start < 0 or start + new_dim.size > old.size:
        raise DimensionError(f"slice: indices {start} to {start + new_dim.size} leave {old} of {x.shape}. Choose a range within it.")
    return build("slice", [x], dim=old.name, start=int(start), new=new_dim)[0]


class _Pad(OperationDef):
    """Put a tensor into a larger one of zeros."""

    kind = "pad"
    resizes = True

    def infer(self, inputs, attributes):
        """The dimension is replaced by the new one."""
        dims = [attributes["new"] if d.name == attributes["dim"] else d for d in inputs[0].shape]
        return [(Shape(dims), inputs[0].dtype)]

    def vjp(self, op, douts):
        """Slice."""
        return [slice(douts[0], op.attributes["new"], op.attributes["start"], op.inputs[0].shape.get(op.attributes["dim"]))]

    def space(self, op):
        """Both dimensions are held whole."""
        return Space(op.inputs[0].shape, {op.attributes["dim"]})

    def passes_partial(self, op, i):
        """A partial sum passes."""
        return False

    def lower(self, op, inputs, b):
        """Zeros, and one copy into them."""
        x, new, name = inputs[0], op.attributes["new"], op.attributes["dim"]
        x = x.ordered(x.memory_order())
        dims = [new if d.name == name else d for d in x.dims]
        lengths = [new.size if d.name == name else n for d, n in zip(x.dims, x.value.shape)]
        splits = {d: a for d, a in x.placement.splits.items() if d != name}
        zeros, index, out = Value(lengths, x.value.dtype), Value((), "int64"), Value(lengths, x.value.dtype)
        b.emit("fill", [zeros], [], value=0)
        b.emit("fill", [index], [], value=op.attributes["start"])
        b.emit("write_at", [out], [zeros, x.value, index], axis=x.index[name], start=0, extent=new.size)
        return [LocalTensor(out, dims, Placement(splits, x.placement.partial))]


register(_Pad())


def pad(x: Tensor, dim, start: int, new_dim: Dimension) -> Tensor:
    """Put ``x`` at index ``start`` of a longer dimension ``new_dim`` of zeros, in place of ``dim``.

    Shape   x [length, d_model] -> [max_length, d_model].
    Comm    none where ``dim`` is not split; else it is gathered (``strict_layout`` makes that an error).
    Grad    the slice.
    Raises  DimensionError if ``x`` lacks ``dim`` or does not fit.
    """
    old = require(x.shape, dim, "pad")
    if start < 0 or start + old.size > new_dim.size:
        raise DimensionError(f"pad: {old} at {start} leaves {new_dim}. Choose a start of at most {new_dim.size - old.size}.")
    return build("pad", [x], dim=old.name, start=int(start), new=new_dim)[0]


def transpose(x: Tensor, dims) -> Tensor:
    """Give ``x`` the order of dimensions ``dims``; only printing, files and reshapes see the order.

    Shape   x [a, b] -> [b, a].
    Comm    none.
    Grad    transposed back.
    Raises  DimensionError if ``dims`` are not those of ``x``.
    """
    shape = as_shape(dims)
    if set(shape.dims) != set(x.shape.dims):
        raise DimensionError(f"transpose: {shape} and {x.shape} do not hold the same dimensions. Name each once.")
    return x if shape == x.shape else build("reorder", [x], shape=shape)[0]


class _Reorder(OperationDef):
    """Another order of the Shape."""

    kind = "reorder"

    def infer(self, inputs, attributes):
        """The asked-for order."""
        return [(attributes["shape"], inputs[0].dtype)]

    def vjp(self, op, douts):
        """The order back."""
        return [transpose(douts[0], op.inputs[0].shape)]

    def space(self, op):
        """Return the dimensions."""
        return Space(op.inputs[0].shape)

    def passes_partial(self, op, i):
        """A partial sum passes."""
        return True

    def lower(self, op, inputs, b):
        """Nothing moves: the order of memory is the compiler's."""
        return [inputs[0]]


register(_Reorder())
OPERATORS.update(transpose=transpose)

"""Slices at an index that is known only when the program runs: caches of keys and values.

Invariant: an index is a global one; where the dimension is split, each rank writes the part that lies in its slice.
"""

from __future__ import annotations

from ..dims import Dimension, Shape, require
from ..errors import DimensionError, DtypeError
from ..graph.operation import OperationDef, Space, build, register
from ..graph.tensor import Tensor
from ..spmd.local import LocalTensor
from ..spmd.placement import Placement
from .movement import rename
from .reduce import full


class _WriteAt(OperationDef):
    """A tensor with a window of one dimension replaced; inputs x, value, index."""

    kind = "write_at"
    resizes = True

    def infer(self, inputs, attributes):
        """The tensor's shape."""
        return [(inputs[0].shape, inputs[0].dtype)]

    def vjp(self, op, douts):
        """Zeros go into the window; what was there is the gradient of the value."""
        (x, value, index), dim = op.inputs, op.attributes["dim"]
        window = value.shape.get(dim)
        dvalue = build("slice_at", [douts[0], index], dim=dim, new_dim=window)[0]
        return [build(self.kind, [douts[0], full(value.shape, 0.0, x.dtype), index], dim=dim)[0], dvalue, None]

    def space(self, op):
        """Return the tensor's dimensions."""
        return Space(op.inputs[0].shape)

    def input_whole(self, op, i):
        """The value is whole along the window."""
        return frozenset([op.attributes["dim"]] if i == 1 else [])

    def lower(self, op, inputs, b):
        """One kernel, in place where nobody reads the old tensor any more."""
        (x, value, index), dim = inputs, op.attributes["dim"]
        names = x.memory_order()
        source = x.ordered(names)
        out = b.new(source.dims, x.placement, x.value.dtype)
        view = value.ordered([n for n in names if n in value.index]).value
        axis = names.index(dim)
        if dim not in value.index:
            view = view.view((*view.shape[:axis], 1, *view.shape[axis:]), (*view.strides[:axis], 1, *view.strides[axis:]))
        whole = source.dims[axis]
        b.emit(self.kind, [out], [source, view, index], axis=axis, start=b.start(whole, x.placement.axes_of(dim)), extent=source.length(dim))
        return [out]


class _SliceAt(OperationDef):
    """A window of one dimension; inputs x, index; without ``new_dim`` one index, and the dimension is dropped."""

    kind = "slice_at"
    resizes = True

    def infer(self, inputs, attributes):
        """The dimension is replaced, or gone."""
        dim, new_dim = attributes["dim"], attributes["new_dim"]
        dims = [new_dim if d.name == dim else d for d in inputs[0].shape if d.name != dim or new_dim is not None]
        return [(Shape(dims), inputs[0].dtype)]

    def vjp(self, op, douts):
        """Zeros with the gradient in the window."""
        x, index = op.inputs
        dim, new_dim = x.shape.get(op.attributes["dim"]), op.attributes["new_dim"]
        dy = douts[0]
        if new_dim is not None and new_dim.name != dim.name:
            dy = rename(dy, {new_dim.name: dim.name})
        return [build("write_at", [full(x.shape, 0.0, x.dtype), dy, index], dim=dim.name)[0], None]

    def space(self, op):
        """The dimension is whole; it is gathered where a rule splits it."""
        return Space(op.inputs[0].shape, [op.attributes["dim"]])

    def lower(self, op, inputs, b):
        """One kernel; the window of every rank is whole."""
        (x, index), dim = inputs, op.attributes["dim"]
        source = x.ordered(x.memory_order())
        axis = source.index[dim]
        window = op.attributes["new_dim"] or Dimension(dim, 1)
        dims = [window if d.name == dim else d for d in source.dims]
        placement = Placement({n: a for n, a in x.placement.splits.items() if n != dim})
        out = b.new(dims, placement, x.value.dtype)
        b.emit(self.kind, [out], [source, index], axis=axis)
        if op.attributes["new_dim"] is None:
            kept = [i for i in range(len(dims)) if i != axis]
            view = out.value.view([out.value.shape[i] for i in kept], [out.value.strides[i] for i in kept])
            out = LocalTensor(view, [dims[i] for i in kept], placement)
        return [out]


register(_WriteAt())
register(_SliceAt())


def _check_index(operation: str, index: Tensor) -> None:
    if not isinstance(index, Tensor) or len(index.shape) or index.dtype not in ("int32", "int64"):
        raise DtypeError(f"{operation}: the index is {index!r}{' of ' + index.dtype if isinstance(index, Tensor) else ''}. Give an int64 scalar tensor.")


def write(variable: Tensor, index: dict, value: Tensor) -> Tensor:
    """Return ``variable`` with ``value`` in place of the indices from ``index`` on along one dimension: ``write(cache, {length: position}, k)``.

    As the update of a variable that nobody reads afterwards, it is written in place. ``value`` may lack the dimension
    (one index) or have it smaller; it has to fit, which is checked by nobody while the program runs: what lies outside is dropped.

    Shape   variable [..., dim, ...], value [..., dim smaller or absent, ...] -> [..., dim, ...].
    Comm    none: each rank writes the part that lies in its slice; ``value`` is gathered along ``dim`` if it is split there.
    Grad    of the value: the window of the gradient; of the variable: the gradient with zeros there; of the index: none.
    Raises  DimensionError for more than one dimension or a value that does not fit; DtypeError for mixed element types or an index that is no integer scalar.
    """
    if len(index) != 1:
        raise DimensionError(f"write: {len(index)} dimensions are indexed, {', '.join(map(str, index))}. Index exactly one.")
    (dim, at), = index.items()
    dim = require(variable.shape, dim, "write")
    _check_index("write", at)
    window = value.shape.get(dim.name)
    if set(value.shape.without([dim.name])) != set(variable.shape.without([dim.name])) or (window is not None and window.size > dim.size):
        raise DimensionError(f"write: value {value!r} into {variable!r} along {dim}. Their other dimensions are to be equal, and the value's {dim.name} no larger.")
    if value.dtype != variable.dtype:
        raise DtypeError(f"write: value {value!r} is of {value.dtype} and {variable!r} of {variable.dtype}. Cast one of them (mm.cast).")
    return build("write_at", [variable, value, at], dim=dim.name)[0]


def slice_at(x: Tensor, dim, index: Tensor, new_dim: Dimension | None = None) -> Tensor:
    """Return ``x`` at ``new_dim.size`` indices of ``dim`` from ``index`` on; without ``new_dim`` at one index, and without ``dim``.

    Shape   x [..., dim, ...] -> [..., new_dim, ...] or [...].
    Comm    none if ``dim`` is whole; a split one is gathered (``gathered:``).
    Grad    zeros with the gradient in the window; no communication.
    Raises  DimensionError if ``x`` lacks ``dim`` or ``new_dim`` is larger or doubles a name; DtypeError if the index is no integer scalar.
    """
    dim = require(x.shape, dim, "slice_at")
    _check_index("slice_at", index)
    if new_dim is not None and (new_dim.size > dim.size or new_dim.name in x.shape.without([dim.name])):
        raise DimensionError(f"slice_at: {new_dim} out of {dim} of {x!r}. It is to be no larger, with a name that no other dimension has.")
    return build("slice_at", [x, index], dim=dim.name, new_dim=new_dim)[0]

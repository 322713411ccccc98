"""Sums: n-ary sums, reductions over dimensions, broadcasts, constants.

Invariant: a sum over a split dimension is a partial sum, resolved where it is used and only once.
"""

from __future__ import annotations

from ..dims import Dimension, Shape, as_shape, require
from ..errors import DimensionError, DtypeError
from ..graph.operation import NO_GRADIENT, OperationDef, Space, build, register
from ..graph.tensor import OPERATORS, Tensor
from .elementwise import FUNCTIONS, pointwise, where


class _AddN(OperationDef):
    """Sum of any number of tensors of one shape."""

    kind = "add_n"
    sums_inputs = True

    def infer(self, inputs, attributes):
        """All inputs have the same dimensions."""
        for t in inputs:
            if set(t.shape.dims) != set(inputs[0].shape.dims) or t.dtype != inputs[0].dtype:
                raise DimensionError(f"add_n: {t.shape} of {t.dtype} and {inputs[0].shape} of {inputs[0].dtype} differ. Sum tensors of one shape.")
        return [(inputs[0].shape, inputs[0].dtype)]

    def vjp(self, op, douts):
        """Each input takes the output's gradient."""
        return [douts[0]] * len(op.inputs)

    def space(self, op):
        """Return the common dimensions."""
        return Space(op.outputs[0].shape)

    def passes_partial(self, op, i):
        """Partial sums are taken as they come; equal ones are added before they are reduced."""
        return True

    def lower(self, op, inputs, b):
        """Add equal partials, reduce once, add the replicated terms last."""
        groups: dict[tuple, list] = {}
        for x in inputs:
            groups.setdefault(x.placement.partial, []).append(x)
        sums = {partial: _chain(b, members) for partial, members in groups.items()}
        if len(sums) > 1:
            sums = {partial: b.allreduce(x, partial) if partial else x for partial, x in sums.items()}
            whole = sums.pop((), None)
            return [_chain(b, [*sums.values(), *([whole] if whole is not None else [])])]
        return list(sums.values())


def _chain(b, members):
    total = members[0]
    for x in members[1:]:
        total = b.elementwise("add", [total, x])
    return total


register(_AddN())


def add_n(tensors) -> Tensor:
    """Sum tensors of one shape.

    Shape   x [...], y [...], ... -> [...].
    Comm    partial sums over the same axes are added first and reduced once.
    Grad    the output's gradient for each; no communication.
    Raises  DimensionError if shapes or element types differ.
    """
    tensors = list(tensors)
    return tensors[0] if len(tensors) == 1 else build("add_n", tensors)[0]


class _Reduce(OperationDef):
    """Reduce over dimensions with sum or max."""

    def __init__(self, kind: str, fn: str, vjp):
        self.kind, self.fn, self.vjp = kind, fn, vjp

    def infer(self, inputs, attributes):
        """Drop the reduced dimensions."""
        return [(inputs[0].shape.without(d.name for d in attributes["dims"]), inputs[0].dtype)]

    def space(self, op):
        """Return the input's dimensions."""
        return Space(op.inputs[0].shape)

    def passes_partial(self, op, i):
        """A partial sum passes a sum."""
        return self.fn == "sum"

    def lower(self, op, inputs, b):
        """Reduce the slice; the result is partial over the axes that split the reduced dimensions."""
        x, names = inputs[0], {d.name for d in op.attributes["dims"]}
        axes = [a for d in op.attributes["dims"] for a in x.placement.axes_of(d.name)]
        kept = [n for n in x.memory_order() if n not in names]
        source = x.ordered(x.memory_order())
        out = b.new([x.dims[x.index[n]] for n in kept], b.placement(op, op.outputs[0].shape), op.outputs[0].dtype)
        b.emit("reduce", [out], [source], fn=self.fn, axes=tuple(i for i, n in enumerate(source.names) if n in names))
        out.placement = out.placement.with_partial((*x.placement.partial, *axes))
        if self.fn in ("max", "min") and axes:
            return [b.allreduce(out, axes, self.fn)]
        return [out]


def _squares_vjp(op, douts):
    return [op.inputs[0] * broadcast(douts[0] * 2.0, op.inputs[0].shape)]


def _sum_vjp(op, douts):
    return [broadcast(douts[0], op.inputs[0].shape)]


def _max_vjp(op, douts):
    x, y = op.inputs[0], op.outputs[0]
    return [where(pointwise("equal", x, y), broadcast(douts[0], x.shape), 0.0)]


register(_Reduce("reduce_sum", "sum", _sum_vjp))
register(_Reduce("reduce_sum_squares", "sum_squares", _squares_vjp))
register(_Reduce("reduce_max", "max", _max_vjp))
register(_Reduce("reduce_min", "min", _max_vjp))


def _dims(operation: str, x: Tensor, dims) -> tuple[Dimension, ...]:
    if dims is None:
        return x.shape.dims
    dims = (dims,) if isinstance(dims, (Dimension, str)) else tuple(dims)
    return tuple(require(x.shape, d, operation) for d in dims)


def _reduce(kind: str, x: Tensor, dims) -> Tensor:
    dims = _dims(kind, x, dims)
    return build(kind, [x], dims=dims)[0] if dims else x


def reduce_sum(x: Tensor, reduced_dim=None) -> Tensor:
    """Sum ``x`` over a dimension, several, or all, whichever mesh axes hold its slices.

    Shape   x [..., reduced_dim, ...] -> [...]; the other dimensions keep their order.
    Comm    partial(sum) over the axes that split ``reduced_dim``; one reduction of the result where it is used.
    Grad    broadcasts the output's gradient along ``reduced_dim``; no communication.
    Raises  DimensionError if ``x`` has no such dimension.
    """
    return _reduce("reduce_sum", x, reduced_dim)


def reduce_sum_squares(x: Tensor, reduced_dim=None) -> Tensor:
    """Sum the squares of ``x`` over a dimension, several, or all, in one pass that stores no squares.

    Shape   x [..., reduced_dim, ...] -> [...]; the other dimensions keep their order.
    Comm    as :func:`reduce_sum`.
    Grad    2 x times the output's gradient, broadcast.
    Raises  DimensionError if ``x`` has no such dimension; DtypeError if ``x`` is of integers.
    """
    if not x.dtype.startswith("float"):
        raise DtypeError(f"reduce_sum_squares: {x!r} has element type {x.dtype}. Cast it to a floating type first.")
    return _reduce("reduce_sum_squares", x, reduced_dim) if _dims("reduce_sum_squares", x, reduced_dim) else FUNCTIONS["square"](x)


def reduce_max(x: Tensor, reduced_dim=None) -> Tensor:
    """Largest element of ``x`` over a dimension, several, or all.

    Shape   x [..., reduced_dim, ...] -> [...].
    Comm    allreduce(max) of the result over the axes that split ``reduced_dim``.
    Grad    the output's gradient to every element that equals the maximum (ties: each of them).
    Raises  DimensionError if ``x`` has no such dimension.
    """
    return _reduce("reduce_max", x, reduced_dim)


def reduce_min(x: Tensor, reduced_dim=None) -> Tensor:
    """Smallest element of ``x`` over a dimension, several, or all; otherwise as :func:`reduce_max`.

    Shape   x [..., reduced_dim, ...] -> [...].
    Comm    allreduce(min) of the result over the axes that split ``reduced_dim``.
    Grad    the output's gradient to every element that equals the minimum (ties: each of them).
    Raises  DimensionError if ``x`` has no such dimension.
    """
    return _reduce("reduce_min", x, reduced_dim)


def reduce_mean(x: Tensor, reduced_dim=None) -> Tensor:
    """Mean of ``x`` over a dimension, several, or all; the divisor is the product of the *global* sizes.

    Shape   x [..., reduced_dim, ...] -> [...].
    Comm    as :func:`reduce_sum`.
    Grad    the output's gradient divided by the count, broadcast.
    Raises  DimensionError if ``x`` has no such dimension; DtypeError if ``x`` is of integers.
    """
    if not x.dtype.startswith("float"):
        raise DtypeError(f"reduce_mean: {x!r} has element type {x.dtype}. Cast it to a floating type first.")
    dims = _dims("reduce_mean", x, reduced_dim)
    return reduce_sum(x, dims) * (1.0 / Shape(dims).size)


def reduce_logsumexp(x: Tensor, reduced_dim) -> Tensor:
    """Logarithm of the sum of exponentials over one dimension, shifted by its maximum.

    Shape   x [..., reduced_dim, ...] -> [...].
    Comm    allreduce(max), then one reduction of the sum, where ``reduced_dim`` is split.
    Grad    softmax times the output's gradient; the maximum is a constant.
    Raises  DimensionError if ``x`` has no such dimension.
    """
    from .elementwise import stop_gradient
    m = stop_gradient(reduce_max(x, reduced_dim))
    total = reduce_sum(FUNCTIONS["exp"](x - m), reduced_dim)
    return FUNCTIONS["log"](total) + m


class _Broadcast(OperationDef):
    """Repeat along new dimensions."""

    kind = "broadcast"

    def infer(self, inputs, attributes):
        """The result has the asked-for shape."""
        missing = [d for d in inputs[0].shape if d.name not in attributes["shape"]]
        if missing:
            raise DimensionError(f"broadcast: {attributes['shape']} lacks {missing[0]} of {inputs[0].shape}. Name every dimension of the operand.")
        return [(attributes["shape"], inputs[0].dtype)]

    def vjp(self, op, douts):
        """Sum over the new dimensions."""
        new = [d for d in op.outputs[0].shape if d.name not in op.inputs[0].shape]
        return [reduce_sum(douts[0], new) if new else douts[0]]

    def space(self, op):
        """Return the result's dimensions."""
        return Space(op.outputs[0].shape)

    def lower(self, op, inputs, b):
        """A view with strides of 0: nothing is written until somebody needs it."""
        x, shape = inputs[0], op.outputs[0].shape
        placement = b.placement(op, shape)
        names = [*(d.name for d in shape if d.name not in x.index), *x.memory_order()]
        dims = [shape.get(n) for n in names]
        out = b.new(dims, placement, op.outputs[0].dtype)
        b.emit("copy", [out], [x.broadcast(names, out.value.shape)])
        return [out]


register(_Broadcast())


def broadcast(x: Tensor, dims) -> Tensor:
    """Repeat ``x`` along the dimensions of ``dims`` that it lacks.

    Shape   x [...] -> dims, which holds every dimension of x.
    Comm    none.
    Grad    reduce_sum over the new dimensions.
    Raises  DimensionError if ``dims`` lacks a dimension of ``x``.
    """
    shape = as_shape(dims)
    if set(shape.dims) == set(x.shape.dims):
        return x
    if x.operation.definition.kind == "full" and not len(x.shape):
        return full(shape, x.operation.attributes["value"], x.dtype)
    return build("broadcast", [x], shape=shape)[0]


class _Full(OperationDef):
    """One number everywhere."""

    kind = "full"
    vjp = NO_GRADIENT

    def infer(self, inputs, attributes):
        """The asked-for shape and type."""
        return [(attributes["shape"], attributes["dtype"])]

    def space(self, op):
        """Return the result's dimensions."""
        return Space(op.outputs[0].shape)

    def lower(self, op, inputs, b):
        """Fill the slice."""
        out = b.new(op.outputs[0].shape, b.placement(op, op.outputs[0].shape), op.outputs[0].dtype)
        b.emit("fill", [out], [], value=op.attributes["value"])
        return [out]


register(_Full())


def full(dims, value: float, dtype: str = "float32") -> Tensor:
    """Make a tensor that holds one number everywhere.

    Shape   [dims].
    Comm    none.
    Grad    none.
    Raises  DimensionError for a doubled dimension.
    """
    return build("full", [], shape=as_shape(dims), value=value, dtype=dtype)[0]


class _Range(OperationDef):
    """The index along a dimension."""

    kind = "range"
    vjp = NO_GRADIENT

    def infer(self, inputs, attributes):
        """One dimension."""
        return [(Shape([attributes["dim"]]), attributes["dtype"])]

    def space(self, op):
        """Return the one dimension."""
        return Space(op.outputs[0].shape)

    def lower(self, op, inputs, b):
        """Count from the start of the slice."""
        dim = op.attributes["dim"]
        placement = b.placement(op, op.outputs[0].shape)
        out = b.new([dim], placement, op.outputs[0].dtype)
        b.emit("iota", [out], [], axis=0, start=b.start(dim, placement.axes_of(dim.name)))
        return [out]


register(_Range())


def range_of(dim: Dimension, dtype: str = "int32") -> Tensor:
    """Make the tensor [0, 1, ..., size - 1] over ``dim``.

    Shape   [dim].
    Comm    none: each rank counts from the start of its slice.
    Grad    none.
    Raises  nothing.
    """
    return build("range", [], dim=dim, dtype=dtype)[0]


OPERATORS.update(add_n=add_n, reduce_sum=reduce_sum,
                 ones_like=lambda x: full(x.shape, 1.0, x.dtype), zeros_like=lambda x: full(x.shape, 0.0, x.dtype))

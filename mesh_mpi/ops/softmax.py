"""Softmax and its logarithm over one dimension.

Invariant: rows are shifted by their maximum; a split dimension is never gathered, it costs one maximum and one sum a row.
"""

from __future__ import annotations

from ..dims import Dimension, require
from ..errors import DtypeError
from ..graph.operation import NO_GRADIENT, OperationDef, Space, build, register
from ..graph.tensor import Tensor
from .elementwise import FUNCTIONS
from .reduce import reduce_sum


class _Softmax(OperationDef):
    """Exponentials of rows divided by their sums, or the rows less the logarithms of those."""

    def __init__(self, kind: str, vjp):
        self.kind, self.vjp = kind, vjp

    def infer(self, inputs, attributes):
        """The input's shape."""
        return [(inputs[0].shape, inputs[0].dtype)]

    def space(self, op):
        """Return the input's dimensions."""
        return Space(op.inputs[0].shape)

    def lower(self, op, inputs, b):
        """One kernel over whole rows; else maximum and sum are reduced between pointwise kernels."""
        x, dim = inputs[0], op.attributes["dim"]
        if x.placement.axes_of(dim):
            return [self._split(b, x, dim)]
        matrix, names = b.rows(x, dim)
        if self.kind == "softmax":
            out = b.new([x.dims[x.index[n]] for n in (*names, dim)], x.placement, x.value.dtype)
            b.emit("softmax", [out.value.reshaped(matrix.shape)], [matrix])
            return [out]
        lse = b.new([x.dims[x.index[n]] for n in names], x.placement, x.value.dtype)
        b.emit("logsumexp", [b.vector(lse, names)], [matrix])
        return [b.elementwise("sub", [x, lse])]

    def _split(self, b, x, dim: str):
        axes = x.placement.axes_of(dim)
        shifted = b.elementwise("sub", [x, b.allreduce(b.reduced(x, [dim], "max"), axes, "max")])
        exponentials = b.elementwise("exp", [shifted])
        total = b.allreduce(b.reduced(exponentials, [dim]), axes)
        if self.kind == "softmax":
            return b.elementwise("div", [exponentials, total])
        return b.elementwise("sub", [shifted, b.elementwise("log", [total])])


class _SoftmaxGrad(OperationDef):
    """y (dy - sum(y dy)); inputs y, dy."""

    kind = "softmax_grad"
    vjp = NO_GRADIENT  # second derivatives are not taken

    def infer(self, inputs, attributes):
        """The output's shape."""
        return [(inputs[0].shape, inputs[0].dtype)]

    def space(self, op):
        """Return the output's dimensions."""
        return Space(op.inputs[0].shape)

    def lower(self, op, inputs, b):
        """One kernel over whole rows; else one reduction of a number a row."""
        (y, dy), dim = inputs, op.attributes["dim"]
        axes = y.placement.axes_of(dim)
        if axes:
            total = b.allreduce(b.reduced(b.elementwise("mul", [y, dy]), [dim]), axes)
            return [b.elementwise("mul", [b.elementwise("sub", [dy, total]), y])]
        matrix, names = b.rows(y, dim)
        out = b.new([y.dims[y.index[n]] for n in (*names, dim)], y.placement, y.value.dtype)
        b.emit("softmax_grad", [out.value.reshaped(matrix.shape)], [matrix, b.rows(dy, dim, names)[0]])
        return [out]


def _softmax_vjp(op, douts):
    return [build("softmax_grad", [op.outputs[0], douts[0]], dim=op.attributes["dim"])[0]]


def _log_softmax_vjp(op, douts):
    return [douts[0] - FUNCTIONS["exp"](op.outputs[0]) * reduce_sum(douts[0], op.attributes["dim"])]


register(_Softmax("softmax", _softmax_vjp))
register(_Softmax("log_softmax", _log_softmax_vjp))
register(_SoftmaxGrad())


def _build(kind: str, x: Tensor, dim: Dimension | str) -> Tensor:
    dim = require(x.shape, dim, kind)
    if not x.dtype.startswith("float"):
        raise DtypeError(f"{kind}: {x!r} has element type {x.dtype}. Cast it to a floating type first (mm.cast).")
    return build(kind, [x], dim=dim.name)[0]


def softmax(x: Tensor, dim: Dimension | str) -> Tensor:
    """Exponentials of ``x`` divided by their sum over ``dim``.

    Shape   x [..., dim, ...] -> [..., dim, ...].
    Comm    none if ``dim`` is whole; else allreduce(max), then allreduce(sum), of one number a row.
    Grad    y (dy - sum(y dy)): one allreduce(sum) of one number a row if ``dim`` is split.
    Raises  DimensionError if ``x`` lacks ``dim``; DtypeError if ``x`` is not floating.
    """
    return _build("softmax", x, dim)


def log_softmax(x: Tensor, dim: Dimension | str) -> Tensor:
    """Logarithm of the softmax of ``x`` over ``dim``: ``x`` less the logarithm of its sum of exponentials.

    Shape   x [..., dim, ...] -> [..., dim, ...].
    Comm    none if ``dim`` is whole; else allreduce(max), then allreduce(sum), of one number a row.
    Grad    dy - exp(y) sum(dy): one reduction of one number a row if ``dim`` is split.
    Raises  DimensionError if ``x`` lacks ``dim``; DtypeError if ``x`` is not floating.
    """
    return _build("log_softmax", x, dim)

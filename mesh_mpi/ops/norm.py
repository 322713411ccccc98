"""Layer and RMS normalisation.

Invariant: a normalised dimension that is split is never gathered: its row sums are reduced, forward and
backward; the gradients of scale and bias are partial sums over the axes that split the rows.
"""

from __future__ import annotations

from ..dims import Shape, require
from ..errors import DimensionError, DtypeError
from ..graph.operation import NO_GRADIENT, OperationDef, Space, build, register
from ..graph.tensor import Tensor
from .einsum import product


class _Norm(OperationDef):
    """Rows scaled to unit variance (``layer_norm``: centred first) and back by ``scale``; statistics are residual outputs."""

    def __init__(self, kind: str, centred: bool):
        self.kind, self.centred = kind, centred
        self.output_names = ("out", "mean", "rstd") if centred else ("out", "rstd")

    def infer(self, inputs, attributes):
        """The input's shape, and that of the rows for each statistic."""
        x = inputs[0]
        rows = x.shape.without([attributes["dim"]])
        return [(x.shape, x.dtype), *[(rows, x.dtype)] * (len(self.output_names) - 1)]

    def vjp(self, op, douts):
        """One operation gives the gradients of x, scale and bias from the statistics."""
        if douts[0] is None:
            return [None] * len(op.inputs)
        x, scale = op.inputs[:2]
        return list(build(f"{self.kind}_grad", [douts[0], x, *op.outputs[1:], scale], dim=op.attributes["dim"], has_bias=len(op.inputs) == 3))

    def space(self, op):
        """Return the input's dimensions."""
        return Space(op.inputs[0].shape)

    def lower(self, op, inputs, b):
        """One fused kernel if rows are whole; else local sums, reductions and pointwise kernels."""
        x, dim = inputs[0], op.attributes["dim"]
        if x.placement.axes_of(dim):
            return self._lower_split(op, inputs, b)
        matrix, names = b.rows(x, dim)
        y = b.new(_dims(x, (*names, dim)), x.placement, x.value.dtype)
        stats = [b.new(_dims(x, names), x.placement, x.value.dtype) for _ in op.outputs[1:]]
        params = {"eps": op.attributes["eps"], **({"has_bias": len(inputs) == 3} if self.centred else {})}
        b.emit(self.kind, [y.value.reshaped(matrix.shape), *(b.vector(s, names) for s in stats)], [matrix, *inputs[1:]], **params)
        return [y, *stats]

    def _lower_split(self, op, inputs, b):
        (x, *factors), dim = inputs, op.attributes["dim"]
        axes, share = x.placement.axes_of(dim), 1.0 / op.inputs[0].shape.size_of(dim)
        stats, centred = [], x
        if self.centred:
            stats.append(b.elementwise("mul", [b.allreduce(b.reduced(x, [dim]), axes), share]))
            centred = b.elementwise("sub", [x, stats[0]])
        squares = b.allreduce(b.reduced(centred, [dim], "sum_squares"), axes)
        stats.append(b.elementwise("rsqrt", [b.elementwise("add", [b.elementwise("mul", [squares, share]), op.attributes["eps"]])]))
        y = b.elementwise("mul", [b.elementwise("mul", [centred, stats[-1]]), factors[0]])
        return [b.elementwise("add", [y, factors[1]]) if len(factors) == 2 else y, *stats]


class _NormGrad(OperationDef):
    """Gradients of a normalisation: inputs dy, x, [mean], rstd, scale; outputs dx, dscale, [dbias]."""

    vjp = NO_GRADIENT  # second derivatives are not taken
    output_names = ("dx", "dscale", "dbias")

    def __init__(self, kind: str, centred: bool):
        self.kind, self.centred = kind, centred

    def infer(self, inputs, attributes):
        """The shapes of x, scale and bias."""
        x, scale = inputs[1], inputs[-1]
        return [(x.shape, x.dtype), *[(scale.shape, x.dtype)] * (2 if attributes["has_bias"] else 1)]

    def space(self, op):
        """Return the dimensions of x."""
        return Space(op.inputs[1].shape)

    def lower(self, op, inputs, b):
        """One fused kernel if rows are whole; else one reduction of the row sums between pointwise kernels."""
        x, dim = inputs[1], op.attributes["dim"]
        if x.placement.axes_of(dim):
            return self._lower_split(op, inputs, b)
        dy, _, *stats, scale = inputs
        matrix, names = b.rows(x, dim)
        dy_matrix, _ = b.rows(dy, dim, names)
        dx = b.new(_dims(x, (*names, dim)), x.placement, x.value.dtype)
        sums = [b.new(scale.dims, scale.placement.with_partial(a for n in names for a in x.placement.axes_of(n)), x.value.dtype)
                for _ in op.outputs[1:]]
        params = {"has_bias": op.attributes["has_bias"]} if self.centred else {}
        b.emit(self.kind, [dx.value.reshaped(matrix.shape), *sums], [dy_matrix, matrix, *(b.vector(s, names) for s in stats), scale], **params)
        return [dx, *sums]

    def _lower_split(self, op, inputs, b):
        """dx = rstd (g - (sum g + xhat sum g xhat) / D) with g = dy scale; sum g is there only if rows were centred."""
        (dy, x, *stats, scale), dim = inputs, op.attributes["dim"]
        axes, share = x.placement.axes_of(dim), 1.0 / op.inputs[1].shape.size_of(dim)
        names = [n for n in x.names if n != dim]
        rows = Shape(_dims(x, names))

        def normal():
            return b.elementwise("mul", [b.elementwise("sub", [x, stats[0]]) if self.centred else x, stats[-1]])

        def row_sum(value):
            placement = b.placement(op, rows).with_partial(axes)
            return b.allreduce(product(b, value, scale, rows, placement), axes)

        weighted = b.elementwise("mul", [dy, normal()])
        sum_g = row_sum(dy) if self.centred else None
        dx = b.elementwise("mul", [normal(), b.elementwise("mul", [row_sum(weighted), share])])
        if self.centred:
            dx = b.elementwise("add", [dx, b.elementwise("mul", [sum_g, share])])
        dx = b.elementwise("mul", [b.elementwise("sub", [b.elementwise("mul", [dy, scale]), dx]), stats[-1]])
        return [dx, *(b.reduced(value, names) for value in (weighted, dy)[:len(op.outputs) - 1])]


def _dims(x, names):
    return [x.dims[x.index[n]] for n in names]


for _kind, _centred in (("layer_norm", True), ("rms_norm", False)):
    register(_Norm(_kind, _centred))
    register(_NormGrad(f"{_kind}_grad", _centred))


def _norm(kind: str, x: Tensor, dim, factors, eps: float) -> Tensor:
    dim = require(x.shape, dim, kind)
    if not x.dtype.startswith("float"):
        raise DtypeError(f"{kind}: {x!r} has element type {x.dtype}. Cast it to a floating type first (mm.cast).")
    for t in factors:
        if t.shape.dims != (dim,):
            raise DimensionError(f"{kind}: {t!r} is to scale or shift {dim} of {x!r}. Give it that one dimension, [{dim}].")
        if t.dtype != x.dtype:
            raise DtypeError(f"{kind}: {t!r} has element type {t.dtype} and {x!r} has {x.dtype}. Cast one of them (mm.cast).")
    return build(kind, [x, *factors], dim=dim.name, eps=float(eps))[0]


def layer_norm(x: Tensor, dim, scale: Tensor, bias: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """Centre ``x`` over ``dim``, divide by sqrt(variance + eps), multiply by ``scale`` and add ``bias``.

    Shape   x [..., dim, ...], scale [dim], bias [dim] -> [..., dim, ...].
    Comm    none if ``dim`` is whole; else two allreduces(sum) of one number a row.
    Grad    of x: one grouped allreduce(sum) of two numbers a row if ``dim`` is split; of scale and bias: partial(sum) over the axes that split the rows.
    Raises  DimensionError if ``x`` lacks ``dim`` or a factor has other dimensions; DtypeError for mixed element types.
    """
    return _norm("layer_norm", x, dim, [scale] if bias is None else [scale, bias], eps)


def rms_norm(x: Tensor, dim, scale: Tensor, eps: float = 1e-6) -> Tensor:
    """Divide ``x`` by sqrt(mean of its squares over ``dim`` + eps) and multiply by ``scale``.

    Shape   x [..., dim, ...], scale [dim] -> [..., dim, ...].
    Comm    none if ``dim`` is whole; else one allreduce(sum) of one number a row.
    Grad    of x: one allreduce(sum) of one number a row if ``dim`` is split; of scale: partial(sum) over the axes that split the rows.
    Raises  DimensionError if ``x`` lacks ``dim`` or ``scale`` has other dimensions; DtypeError for mixed element types.
    """
    return _norm("rms_norm", x, dim, [scale], eps)

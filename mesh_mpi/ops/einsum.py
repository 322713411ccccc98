"""Contractions by name.

Invariant: a contraction is lowered to one (batched) product whose operands go to BLAS as they
lie in memory; a contracted dimension that is split makes the result a partial sum.
"""

from __future__ import annotations

import math

from ..dims import Shape, as_shape
from ..errors import DimensionError, DtypeError
from ..graph.operation import OperationDef, Space, build, register
from ..graph.tensor import OPERATORS, Tensor
from .reduce import broadcast, reduce_sum


class _Einsum(OperationDef):
    """Product of one or two tensors, summed over the dimensions that the output lacks."""

    kind = "einsum"

    def infer(self, inputs, attributes):
        """The asked-for dimensions, each of which some input has."""
        return [(attributes["shape"], inputs[0].dtype)]

    def vjp(self, op, douts):
        """Contract the output's gradient with the other operand; broadcast what only this operand had."""
        result = []
        for i, x in enumerate(op.inputs):
            others = [douts[0], *(t for j, t in enumerate(op.inputs) if j != i)]
            have = {n for t in others for n in t.shape.names}
            result.append(broadcast(einsum(others, [d for d in x.shape if d.name in have]), x.shape))
        return result

    def space(self, op):
        """Return the union of the inputs' dimensions."""
        dims = {d.name: d for t in op.inputs for d in t.shape}
        return Space(dims.values())

    def passes_partial(self, op, i):
        """A product is linear in each operand."""
        return True

    def lower(self, op, inputs, b):
        """Sum out lone dimensions, then one product."""
        shape = op.outputs[0].shape
        partial = {a for x in inputs for a in x.placement.partial}
        for d in self.space(op).dims:
            if d.name not in shape:
                partial.update(a for x in inputs for a in x.placement.axes_of(d.name))
        placement = b.placement(op, shape).with_partial(partial)
        kept = set(shape.names)
        if len(inputs) == 2:
            kept |= set(inputs[0].names) & set(inputs[1].names)
        inputs = [_sum_out(b, x, kept) for x in inputs]
        if len(inputs) == 1:
            x = inputs[0]
            return [type(x)(x.value, x.dims, placement)]
        return [product(b, inputs[0], inputs[1], shape, placement)]


register(_Einsum())


def _sum_out(b, x, kept):
    """Sum a slice over the dimensions that neither the output nor the other operand has."""
    names = [n for n in x.names if n not in kept]
    if not names:
        return x
    view = x.ordered(x.memory_order())
    left = [d for d in view.dims if d.name in kept]
    out = b.new(left, x.placement, x.value.dtype)
    b.emit("reduce", [out], [view], fn="sum", axes=tuple(i for i, d in enumerate(view.dims) if d.name not in kept))
    return out


def product(b, x, y, shape: Shape, placement):
    """Emit the product of two slices as a matrix product, [batch, m, k] x [batch, k, n], or pointwise if nothing is summed or paired."""
    batch = [n for n in x.memory_order() if n in y.index and n in shape]
    m = [n for n in x.memory_order() if n not in y.index]
    n = [n for n in y.memory_order() if n not in x.index]
    k = [name for name in x.memory_order() if name in y.index and name not in shape]
    if not k and not (m and n):
        return b.elementwise("mul", [x, y], shape, x.value.dtype, placement)
    if _prefers_swap(x, y, batch, m, n, shape):
        x, y, m, n = y, x, n, m
        k = [name for name in x.memory_order() if name in k]
        batch = [name for name in x.memory_order() if name in batch]
    sizes = {**{d.name: d for d in y.dims}, **{d.name: d for d in x.dims}}
    left = _matrices(b, x, batch, m, k)
    right = _matrices(b, y, batch, k, n)
    out = b.new([sizes[name] for name in (*batch, *m, *n)], placement, x.value.dtype)
    matrix = out.value.reshaped((*left.shape[:-1], right.shape[-1]))
    b.emit("matmul", [matrix], [left, right])
    return out


def _prefers_swap(x, y, batch, m, n, shape) -> bool:
    """Choose the operand order whose result lies as the output's Shape does; otherwise keep the larger row count first."""
    straight, swapped = [*batch, *m, *n], [*batch, *n, *m]
    wanted = list(shape.names)
    if straight == wanted or swapped == wanted:
        return swapped == wanted and straight != wanted
    if n and m and set(m[-1:]) == {wanted[-1]}:
        return True
    return False


def _matrices(b, x, batch, rows, columns):
    """Return a slice viewed as [batch, rows, columns] (batch only if there is any), copied if it is not strided so."""
    view = x.ordered((*batch, *rows, *columns)).value
    nb = len(batch)
    sizes = [math.prod(view.shape[:nb]), math.prod(view.shape[nb:nb + len(rows)]), math.prod(view.shape[nb + len(rows):])]
    shape = tuple(sizes if batch else sizes[1:])
    matrix = view.reshaped(shape)
    if matrix is None or 1 not in matrix.strides[-2:]:
        matrix = b.copied(x, (*batch, *rows, *columns)).value.reshaped(shape)
    return matrix


def einsum(tensors, output_dims=None, reduced_dims=None) -> Tensor:
    """Multiply tensors by name and sum over the dimensions that the output lacks.

    Without ``output_dims`` the result keeps every dimension but ``reduced_dims``; without either, it
    sums over the dimensions that two or more inputs share. More than two tensors are multiplied pairwise,
    the pair with the smallest result first.

    Shape   x [batch, d_model], w [d_model, d_ff] -> [batch, d_ff].
    Comm    partial(sum) over the axes that split a summed dimension; one reduction of the result where it is used.
    Grad    products of the output's gradient with the other operands.
    Raises  DimensionError for an output dimension that no input has, DtypeError for mixed element types.
    """
    tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    dims = {d.name: d for t in tensors for d in t.shape}
    shape = _output_shape(tensors, dims, output_dims, reduced_dims)
    for d in shape:
        if d.name not in dims:
            raise DimensionError(f"einsum: output dimension {d} is in none of the operands {', '.join(map(repr, (t.shape for t in tensors)))}. "
                                 "Remove it, or broadcast the result (mm.broadcast).")
        if dims[d.name] != d:
            raise DimensionError(f"einsum: dimension {d.name!r} has two sizes, {dims[d.name].size} in an operand and {d.size} in the output. Make them equal.")
    if len({t.dtype for t in tensors}) > 1:
        raise DtypeError(f"einsum: operands have element types {', '.join(t.dtype for t in tensors)}. Cast them to one (mm.cast).")
    if not tensors[0].dtype.startswith("float"):
        raise DtypeError(f"einsum: operands are of {tensors[0].dtype}. Cast them to a floating type first.")
    while len(tensors) > 2:
        tensors = _contract_pair(tensors, shape)
    if len(tensors) == 1:
        gone = [d for d in tensors[0].shape if d.name not in shape]
        return reduce_sum(tensors[0], gone) if gone else tensors[0]
    return build("einsum", tensors, shape=shape)[0]


def _output_shape(tensors, dims, output_dims, reduced_dims) -> Shape:
    if output_dims is not None:
        return as_shape(output_dims)
    if reduced_dims is not None:
        names = {d.name for d in as_shape(reduced_dims)}
        unknown = sorted(names - set(dims))
        if unknown:
            raise DimensionError(f"einsum: reduced dimension {unknown[0]!r} is in none of the operands {', '.join(map(repr, (t.shape for t in tensors)))}.")
    else:
        names = {n for n in dims if sum(n in t.shape for t in tensors) > 1}
    return Shape(d for n, d in dims.items() if n not in names)


def _contract_pair(tensors, shape: Shape):
    """Multiply the two tensors whose product is smallest, keeping what the output or another operand needs."""
    best = None
    for i in range(len(tensors)):
        for j in range(i + 1, len(tensors)):
            rest = [t for k, t in enumerate(tensors) if k not in (i, j)]
            needed = set(shape.names) | {n for t in rest for n in t.shape.names}
            pair = {d.name: d for t in (tensors[i], tensors[j]) for d in t.shape if d.name in needed}
            size = math.prod(d.size for d in pair.values())
            if best is None or size < best[0]:
                best = (size, i, j, rest, list(pair.values()))
    _, i, j, rest, dims = best
    return [einsum([tensors[i], tensors[j]], dims), *rest]


OPERATORS.update(einsum=einsum)

"""Rows of a table by index, and sums of rows back into a table.

Invariant: there is no one-hot tensor; a split vocabulary makes the looked-up rows a partial sum, and a gradient
of a tied table is scattered into the table's other gradient in place.
"""

from __future__ import annotations

import math

from ..dims import Shape, require
from ..errors import DimensionError, DtypeError
from ..graph.operation import REGISTRY, OperationDef, Space, build, register
from ..graph.tensor import OPERATORS, Tensor
from .reduce import add_n


def _matrix(b, x, rows, columns):
    """Return a slice viewed as [rows, columns], copied only if it is not strided so."""
    names = (*rows, *columns)
    shape = (math.prod(x.length(n) for n in rows), math.prod(x.length(n) for n in columns))
    view = x.ordered(names).value.reshaped(shape)
    return view if view is not None else b.copied(x, names).value.reshaped(shape)


def _union(op) -> Space:
    return Space({d.name: d for t in (*op.inputs, *op.outputs) for d in t.shape}.values())


def _split_axes(x) -> list[str]:
    return [a for n in x.names for a in x.placement.axes_of(n)]


class _Embedding(OperationDef):
    """Rows of a table; zeros for an index outside."""

    kind = "embedding"

    def infer(self, inputs, attributes):
        """The dimensions of the indices, then the table's others."""
        table, ids = inputs
        return [(Shape((*ids.shape, *table.shape.without([attributes["vocab_dim"]]))), table.dtype)]

    def vjp(self, op, douts):
        """Sum the rows of the gradient into a dense table."""
        table, ids = op.inputs
        return [build("embedding_grad", [ids, douts[0]], vocab_dim=op.attributes["vocab_dim"], shape=table.shape)[0], None]

    def space(self, op):
        """Return the dimensions of table and indices."""
        return _union(op)

    def lower(self, op, inputs, b):
        """Look up what lies in this slice; the rest is zeros, so the result is a partial sum over the vocabulary's axes."""
        (table, ids), vocab = inputs, op.attributes["vocab_dim"]
        rest = [n for n in table.memory_order() if n != vocab]
        names = ids.memory_order()
        dims = [*(ids.dims[ids.index[n]] for n in names), *(table.dims[table.index[n]] for n in rest)]
        axes = table.placement.axes_of(vocab)
        out = b.new(dims, b.placement(op, op.outputs[0].shape).with_partial(axes), table.value.dtype)
        matrix = _matrix(b, table, [vocab], rest)
        b.emit(self.kind, [out.value.reshaped((math.prod(ids.value.shape), matrix.shape[1]))], [matrix, b.vector(ids, names)],
               offset=b.start(table.dims[table.index[vocab]], axes))
        return [out]


class _EmbeddingGrad(OperationDef):
    """A table of zeros into which rows are summed by index."""

    kind = "embedding_grad"

    def infer(self, inputs, attributes):
        """The table's shape."""
        return [(attributes["shape"], inputs[1].dtype)]

    def vjp(self, op, douts):
        """Look the rows up again."""
        return [None, build("embedding", [douts[0], op.inputs[0]], vocab_dim=op.attributes["vocab_dim"])[0]]

    def space(self, op):
        """Return the dimensions of table and indices."""
        return _union(op)

    def passes_partial(self, op, i):
        """It is linear in the rows."""
        return i == 1

    def lower(self, op, inputs, b):
        """Sum the rows whose index lies in this slice; the result is partial over the axes that split the indices."""
        return [_scattered(b, op, self.kind, None, *inputs)]


class _ScatterAdd(OperationDef):
    """Rows summed by index into a given table, in place where it is a partial sum over the same axes."""

    kind = "scatter_add"
    sums_inputs = True

    def infer(self, inputs, attributes):
        """The table's shape."""
        return [(inputs[0].shape, inputs[0].dtype)]

    def vjp(self, op, douts):
        """The gradient itself for the table, its rows for the rows."""
        return [douts[0], None, build("embedding", [douts[0], op.inputs[1]], vocab_dim=op.attributes["vocab_dim"])[0]]

    def space(self, op):
        """Return the dimensions of table and indices."""
        return _union(op)

    def passes_partial(self, op, i):
        """The table is taken as it comes."""
        return i == 0

    def lower(self, op, inputs, b):
        """One kernel if table and scatter are partial over the same axes; else a sum of two tables, each reduced over its own."""
        base, ids, dy = inputs
        if base.placement.partial == tuple(sorted(_split_axes(ids))):
            return [_scattered(b, op, self.kind, base, ids, dy)]
        return REGISTRY["add_n"].lower(op, [base, _scattered(b, op, "embedding_grad", None, ids, dy)], b)


def _scattered(b, op, kernel: str, base, ids, dy):
    """Emit the scatter of rows ``dy`` into zeros or a copy of ``base``."""
    shape, vocab = op.outputs[0].shape, op.attributes["vocab_dim"]
    order = base.memory_order() if base is not None else shape.names
    if order[:1] != (vocab,) and order[-1:] != (vocab,):  # in between, there is no view as a matrix
        order = (vocab, *(n for n in order if n != vocab))
    rest = [n for n in order if n != vocab]
    names = [n for n in dy.memory_order() if n in ids.index]
    placement = b.placement(op, shape)
    out = b.new([shape.get(n) for n in order], placement.with_partial((*_split_axes(ids), *dy.placement.partial)), dy.value.dtype)
    sources = [] if base is None else [_matrix(b, base, [vocab], rest)]
    b.emit(kernel, [_matrix(b, out, [vocab], rest)], [*sources, b.vector(ids, names), _matrix(b, dy, names, rest)],
           offset=b.start(shape.get(vocab), placement.axes_of(vocab)))
    return out


register(_Embedding())
_EMBEDDING_GRAD = register(_EmbeddingGrad())
register(_ScatterAdd())


def _sum_of_gradients(tensors) -> Tensor:
    """Add gradients that meet; those of look-ups are scattered into the sum of the others."""
    looked_up = [t for t in tensors if t.operation.definition is _EMBEDDING_GRAD]
    others = [t for t in tensors if t.operation.definition is not _EMBEDDING_GRAD]
    total = add_n(others) if others else looked_up.pop(0)
    for t in looked_up:
        total = build("scatter_add", [total, *t.operation.inputs], vocab_dim=t.operation.attributes["vocab_dim"])[0]
    return total


OPERATORS["add_n"] = _sum_of_gradients


def embedding(table: Tensor, ids: Tensor, vocab_dim) -> Tensor:
    """Look up the rows ``ids`` of ``table`` along ``vocab_dim``; an index outside the table gives zeros.

    Shape   table [vocab, d_model], ids [batch, length] of integers -> [batch, length, d_model].
    Comm    partial(sum) over the axes that split ``vocab_dim``; one reduction of the result where it is used.
    Grad    of the table: dense, partial(sum) over the axes that split ``ids``, scattered into its other gradients where it has any.
    Raises  DimensionError if ``table`` lacks ``vocab_dim`` or shares a dimension with ``ids``; DtypeError if ``ids`` is not of integers.
    """
    vocab = require(table.shape, vocab_dim, "embedding")
    _check("embedding", table, ids)
    return build("embedding", [table, ids], vocab_dim=vocab.name)[0]


def scatter_add(base: Tensor, ids: Tensor, rows: Tensor, vocab_dim) -> Tensor:
    """Return ``base`` with each of ``rows`` added at its index in ``ids``; indices outside are skipped.

    Shape   base [vocab, d_model], ids [batch, length] of integers, rows [batch, length, d_model] -> [vocab, d_model].
    Comm    partial(sum) over the axes that split ``ids`` where ``base`` is partial there too; else reductions of both.
    Grad    the output's gradient for ``base``, its rows ``ids`` for ``rows``; no communication.
    Raises  DimensionError if dimensions do not fit; DtypeError if ``ids`` is not of integers.
    """
    vocab = require(base.shape, vocab_dim, "scatter_add")
    _check("scatter_add", base, ids)
    wanted = {*ids.shape, *base.shape.without([vocab.name])}
    if set(rows.shape) != wanted:
        raise DimensionError(f"scatter_add: rows {rows!r} into {base!r} by {ids!r}. Rows have the dimensions of the indices and of the table less {vocab}.")
    return build("scatter_add", [base, ids, rows], vocab_dim=vocab.name)[0]


def _check(kind: str, table: Tensor, ids: Tensor) -> None:
    if ids.dtype not in ("int32", "int64"):
        raise DtypeError(f"{kind}: indices {ids!r} are of {ids.dtype}. Use int32 or int64.")
    shared = [d for d in ids.shape if d.name in table.shape]
    if shared:
        raise DimensionError(f"{kind}: table {table!r} and indices {ids!r} share {shared[0]}. Rename it in one of them (mm.rename).")

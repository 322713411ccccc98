"""Attention: softmax(q k / sqrt(d_kv)) v, fused, with causal mask, segments and dropout of the weights inside.

Invariant: scores never exist outside a block of the kernel; batch, heads and queries may be split, the memory is
whole; results lie as [batch, length, heads, d_kv], so that the next product is one matrix product.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from ..dims import Dimension, Shape, require
from ..errors import DimensionError, DtypeError
from ..graph.operation import NO_GRADIENT, OperationDef, Space, build, register
from ..graph.scope import scoped
from ..graph.tensor import Tensor
from ..graph.variable import seed_tensor
from ..keys import name_key
from .dropout import check_dropout
from .reduce import broadcast


class DropoutArgs(NamedTuple):
    """Dropout of attention weights: one mask for all queries, from seed, name, step and the global row, head and memory position."""

    rate: float
    name: str
    step: Tensor
    row_offset: Tensor


class _Attention(OperationDef):
    """Inputs q, k, v, [query_segments, memory_segments], [seed, step, row_offset]; the rows' log-sums stay for the gradient."""

    kind = "attention"
    output_names = ("out", "lse")

    def infer(self, inputs, attributes):
        """The queries' shape, and one number for each head of each query."""
        q = inputs[0]
        return [(q.shape, q.dtype), (q.shape.without([attributes["d_kv"]]), q.dtype)]

    def vjp(self, op, douts):
        """The scores are computed again, block by block."""
        if douts[0] is None:
            return [None] * len(op.inputs)
        grads = build("attention_grad", [*op.inputs[:3], *op.outputs, douts[0], *op.inputs[3:]], **op.attributes)
        return [*grads, *[None] * (len(op.inputs) - 3)]

    def space(self, op):
        """Batch, heads, queries, and the memory and the size of a head, which are whole."""
        return _space(op)

    def lower(self, op, inputs, b):
        """One kernel on the slices."""
        q, a = inputs[0], op.attributes
        out = b.new(_dims(q, a, "query"), q.placement, q.value.dtype)
        lse = b.new([d for d in _dims(q, a, "lse")], q.placement, q.value.dtype)
        views = [_view(b, x, a, side) for x, side in zip(inputs, ("query", "memory", "memory"))]
        b.emit(self.kind, [out, lse], [*views, *_extras(b, inputs[3:], a)], **_params(op, inputs, b))
        return [out, lse]


class _AttentionGrad(OperationDef):
    """Inputs q, k, v, out, lse, dout and the rest of attention's; gradients of q, k and v."""

    kind = "attention_grad"
    output_names = ("dq", "dk", "dv")
    vjp = NO_GRADIENT  # second derivatives are not taken

    def infer(self, inputs, attributes):
        """The shapes of q, k and v."""
        return [(t.shape, t.dtype) for t in inputs[:3]]

    def space(self, op):
        """Batch, heads, queries, and the memory and the size of a head, which are whole."""
        return _space(op)

    def lower(self, op, inputs, b):
        """One kernel on the slices; gradients of k and v are partial over the axes that split the queries."""
        (q, k, v, out, lse, dout), a = inputs[:6], op.attributes
        partial = q.placement.axes_of(a["query_length"])
        dq = b.new(_dims(q, a, "query"), q.placement, q.value.dtype)
        dk, dv = (b.new(_dims(x, a, "memory"), x.placement.with_partial(partial), q.value.dtype) for x in (k, v))
        views = [_view(b, x, a, side) for x, side in ((q, "query"), (k, "memory"), (v, "memory"), (out, "query"))]
        lse_view = b.in_order(lse, [d.name for d in _dims(lse, a, "lse")])
        b.emit(self.kind, [dq, dk, dv], [*views, lse_view, _view(b, dout, a, "query"), *_extras(b, inputs[6:], a)], **_params(op, inputs, b))
        return [dq, dk, dv]


def _names(a, side: str) -> tuple[str, ...]:
    if side == "lse":
        return a["batch"], a["heads"], a["query_length"]
    return a["batch"], a["query_length"] if side == "query" else a["memory_length"], a["heads"], a["d_kv"]


def _dims(x, a, side: str) -> list[Dimension]:
    return [x.dims[x.index[n]] for n in _names(a, side)]


def _space(op) -> Space:
    q, k = op.inputs[:2]
    return Space({d.name: d for d in (*q.shape, *k.shape)}.values(), (op.attributes["memory_length"], op.attributes["d_kv"]))


def _view(b, x, a, side: str):
    """Return a slice as [batch, length, heads, d_kv] with a unit last stride, copied only if it lies otherwise."""
    view = x.ordered(_names(a, side))
    return view if view.value.strides[-1] == 1 or view.value.shape[-1] == 1 else b.copied(x, view.names)


def _extras(b, inputs, a):
    """Return the segments contiguous as [batch, length], and the counters of dropout as they are."""
    n = 2 if a["has_segments"] else 0
    sides = ((a["batch"], a["query_length"]), (a["batch"], a["memory_length"]))
    return [*(b.in_order(x, names) for x, names in zip(inputs[:n], sides)), *inputs[n:]]


def _params(op, inputs, b) -> dict:
    q, a = inputs[0], op.attributes
    shape = op.inputs[0].shape

    def start(dim: str):
        return b.start(shape.get(a[dim]), q.placement.axes_of(a[dim]))

    params = {"scale": 1.0 / math.sqrt(shape.size_of(a["d_kv"])), "causal": a["causal"], "query_offset": start("query_length"),
              "has_segments": a["has_segments"], "dropout": a["rate"]}
    if a["rate"]:
        params |= {"name_key": a["key"], "heads_global": shape.size_of(a["heads"]),
                   "memory_global": op.inputs[1].shape.size_of(a["memory_length"]), "head_start": start("heads"), "row_start": start("batch")}
    return params


register(_Attention())
register(_AttentionGrad())


def attention(q: Tensor, k: Tensor, v: Tensor, query_length, memory_length, d_kv, causal: bool = True,
              query_segments: Tensor | None = None, memory_segments: Tensor | None = None, dropout: DropoutArgs | None = None,
              heads: str | Dimension = "heads") -> Tensor:
    """Average the values ``v`` with weights softmax(q k / sqrt(d_kv)).

    ``causal``: query i sees memory j <= i. With segments, a query sees the memory of its own segment only (0, padding,
    is a segment too). ``k`` and ``v`` without ``heads`` serve all heads. Dropout acts on the weights, one mask for all queries.

    Shape   q [batch, heads, query_length, d_kv], k and v [batch, heads, memory_length, d_kv], in any order -> q's.
    Comm    none; the memory is gathered where a rule splits it (``gathered:``), batch, heads and queries may be split.
    Grad    no communication; of k and v: partial(sum) over the axes that split ``query_length``.
    Raises  DimensionError if dimensions do not fit or only one side has segments; DtypeError for mixed element types; ConfigError for a wrong rate.
    """
    a = _attributes(q, k, query_length, memory_length, d_kv, heads)
    memory = Shape([require(q.shape, a["batch"], "attention"), require(q.shape, a["heads"], "attention"),
                    require(k.shape, a["memory_length"], "attention"), require(q.shape, a["d_kv"], "attention")])
    k, v = (broadcast(x, [*x.shape, memory.get(a["heads"])]) if a["heads"] not in x.shape else x for x in (k, v))
    for name, x in (("k", k), ("v", v)):
        if set(x.shape) != set(memory):
            raise DimensionError(f"attention: {name} is {x!r}, and with q {q!r} it has to have the dimensions {memory}. Rename or reshape it.")
        if x.dtype != q.dtype or not x.dtype.startswith("float"):
            raise DtypeError(f"attention: q is of {q.dtype} and {name} of {x.dtype}. Use one floating type for all three.")
    inputs = [q, k, v, *_segments(q, memory, a, query_segments, memory_segments)]
    rate, key = 0.0, 0
    if dropout is not None:
        check_dropout("attention", dropout.rate, dropout.step, dropout.row_offset)
        rate, key = float(dropout.rate), name_key(scoped(dropout.name))
        inputs += [seed_tensor(), dropout.step, dropout.row_offset] if rate else []
    return build("attention", inputs, **a, causal=bool(causal), has_segments=query_segments is not None, rate=rate, key=key)[0]


def _attributes(q: Tensor, k: Tensor, query_length, memory_length, d_kv, heads) -> dict[str, str]:
    """Find the names of the five dimensions; what is left of q's four is the batch."""
    a = {"query_length": require(q.shape, query_length, "attention").name, "memory_length": require(k.shape, memory_length, "attention").name,
         "d_kv": require(q.shape, d_kv, "attention").name, "heads": require(q.shape, heads, "attention").name}
    batch = [n for n in q.shape.names if n not in a.values()]
    if len(batch) != 1 or len(dict.fromkeys(a.values())) != 4:
        raise DimensionError(f"attention: q {q!r} less query_length {a['query_length']!r}, d_kv {a['d_kv']!r} and heads {a['heads']!r} leaves {batch}, with "
                             f"memory_length {a['memory_length']!r}. Exactly one dimension is to be left, the batch; all names differ (mm.reshape, mm.rename).")
    return {"batch": batch[0], **a}


def _segments(q: Tensor, memory: Shape, a, query_segments, memory_segments) -> list[Tensor]:
    if query_segments is None and memory_segments is None:
        return []
    sides = (("query_segments", query_segments, {q.shape.get(a["batch"]), q.shape.get(a["query_length"])}),
             ("memory_segments", memory_segments, {memory.get(a["batch"]), memory.get(a["memory_length"])}))
    for name, t, dims in sides:
        if t is None or set(t.shape) != dims:
            raise DimensionError(f"attention: {name} is {t!r}, and has to have the dimensions {sorted(map(repr, dims))}. Give segments of both sides or of neither.")
        if t.dtype not in ("int32", "int64"):
            raise DtypeError(f"attention: {name} is of {t.dtype}. Use int32 or int64.")
    return [query_segments, memory_segments]

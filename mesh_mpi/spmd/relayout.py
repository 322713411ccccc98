"""Bringing a slice from one placement to another.

Invariant: every move is one of keep, slice, swap, all-to-all, reduce(-scatter), allgather, chosen
in that order of cheapness; nothing is gathered whole only to be sliced again where a direct move exists.

Axes are taken off a dimension from the innermost outwards and put on innermost, which is what
makes blocks contiguous in the global index.
"""

from __future__ import annotations

from ..dims import Dimension
from .builder import Builder
from .local import LocalTensor
from .placement import Placement
from .value import Offset, Value


def relayout(b: Builder, x: LocalTensor, target: Placement) -> LocalTensor:
    """Return ``x`` in the placement ``target``; partial sums that the target does not have are resolved."""
    if x.placement.key == target.key:
        return x
    x = _resolve(b, x, target)
    while True:
        step = _swap(b, x, target) or _all_to_all(b, x, target) or _slice(b, x, target) or _gather(b, x, target)
        if step is None:
            return x
        x = step


def _with(placement: Placement, **splits) -> Placement:
    return Placement({**placement.splits, **splits}, placement.partial)


def _resolve(b: Builder, x: LocalTensor, target: Placement) -> LocalTensor:
    """Reduce partial sums: scattered over a dimension that the target splits there, else to all."""
    for axis in [a for a in b.mesh.names if a in x.placement.partial and a not in target.partial]:
        dim = next((d for d in x.dims if _appends(x.placement, target, d.name, axis)), None)
        if dim is not None and x.length(dim.name) % b.mesh.axes[axis] == 0:
            x = _reduce_scatter(b, x, dim, axis)
    left = [a for a in b.mesh.names if a in x.placement.partial and a not in target.partial]
    return b.allreduce(x, left) if left else x


def _appends(placement: Placement, target: Placement, dim: str, axis: str) -> bool:
    """Tell whether ``axis`` comes next, innermost, on ``dim`` on the way to the target."""
    now, then = placement.axes_of(dim), target.axes_of(dim)
    return then[:len(now)] == now and len(then) > len(now) and then[len(now)] == axis


def _reduce_scatter(b: Builder, x: LocalTensor, dim: Dimension, axis: str) -> LocalTensor:
    names = (dim.name, *(n for n in x.memory_order() if n != dim.name))
    source = b.in_order(x, names)
    n = b.mesh.axes[axis]
    out = Value((source.value.shape[0] // n, *source.value.shape[1:]), source.value.dtype)
    b.collective("reduce_scatter", out, source.value, [axis], reduce="sum")
    placement = _with(x.placement.with_partial(a for a in x.placement.partial if a != axis),
                      **{dim.name: (*x.placement.axes_of(dim.name), axis)})
    return LocalTensor(out, source.dims, placement)


def _excess(x: LocalTensor, target: Placement):
    """Yield (dimension, innermost axis) for each dimension whose axes are no prefix of the target's."""
    for dim in x.dims:
        now, then = x.placement.axes_of(dim.name), target.axes_of(dim.name)
        if now and then[:len(now)] != now:
            yield dim, now[-1]


def _swap(b: Builder, x: LocalTensor, target: Placement) -> LocalTensor | None:
    """Exchange two axes of equal size everywhere in the placement, if that brings the target nearer."""
    for dim, p in _excess(x, target):
        now, then = x.placement.axes_of(dim.name), target.axes_of(dim.name)
        if len(then) < len(now):
            continue
        q = then[len(now) - 1]
        if q == p or b.mesh.axes[p] != b.mesh.axes[q]:
            continue
        exchange = {p: q, q: p}
        moved = Placement({d: tuple(exchange.get(a, a) for a in axes) for d, axes in x.placement.splits.items()},
                          tuple(exchange.get(a, a) for a in x.placement.partial))
        if x.placement.partial != moved.partial or _matched(moved, target) <= _matched(x.placement, target):
            continue
        source = b.in_order(x, x.memory_order())
        out = Value(source.value.shape, source.value.dtype)
        b.collective("swap", out, source.value, [p, q])
        return LocalTensor(out, source.dims, moved)
    return None


def _matched(placement: Placement, target: Placement) -> int:
    return sum(1 for dim, axes in placement.splits.items() for i, a in enumerate(axes)
               if target.axes_of(dim)[:i + 1] == axes[:i + 1])


def _all_to_all(b: Builder, x: LocalTensor, target: Placement) -> LocalTensor | None:
    """Move the innermost axis of one dimension to another that wants it next."""
    for dim, axis in _excess(x, target):
        n = b.mesh.axes[axis]
        for other in x.dims:
            if other.name != dim.name and _appends(x.placement, target, other.name, axis) and x.length(other.name) % n == 0:
                return _exchange(b, x, dim, other, axis)
    return None


def _exchange(b: Builder, x: LocalTensor, gathered: Dimension, split: Dimension, axis: str) -> LocalTensor:
    """All-to-all: ``gathered`` loses ``axis``, ``split`` takes it. One packing copy, none after."""
    n = b.mesh.axes[axis]
    rest = [m for m in x.memory_order() if m not in (gathered.name, split.name)]
    view = x.ordered((split.name, gathered.name, *rest)).value
    piece = view.shape[0] // n
    by_target = view.view((n, piece, *view.shape[1:]), (view.strides[0] * piece, *view.strides))
    by_target = by_target.permuted((0, 2, 1, *range(3, len(by_target.shape))))
    packed = Value(by_target.shape, view.dtype)
    b.emit("copy", [packed], [by_target])
    received = Value(packed.shape, view.dtype)
    b.collective("alltoall", received, packed, [axis])
    shape = (n * packed.shape[1], *packed.shape[2:])
    placement = _with(x.placement, **{gathered.name: x.placement.axes_of(gathered.name)[:-1],
                                      split.name: (*x.placement.axes_of(split.name), axis)})
    dims = [gathered, split, *(x.dims[x.index[m]] for m in rest)]
    return LocalTensor(received.reshaped(shape), dims, placement)


def _slice(b: Builder, x: LocalTensor, target: Placement) -> LocalTensor | None:
    """Cut the next axis of a dimension out of a slice that is replicated along it: no communication."""
    busy = x.placement.split_axes | set(x.placement.partial)
    for dim in x.dims:
        now, then = x.placement.axes_of(dim.name), target.axes_of(dim.name)
        if len(then) > len(now) and then[:len(now)] == now and then[len(now)] not in busy:
            axis = then[len(now)]
            length = x.length(dim.name) // b.mesh.axes[axis]
            return x.cut(dim.name, Offset(0, ((axis, length),)), dim, length, _with(x.placement, **{dim.name: (*now, axis)}))
    return None


def _gather(b: Builder, x: LocalTensor, target: Placement) -> LocalTensor | None:
    """Gather the innermost axis of the first dimension that has one too many."""
    found = next(_excess(x, target), None)
    if found is None:
        return None
    dim, axis = found
    names = (dim.name, *(m for m in x.memory_order() if m != dim.name))
    source = b.in_order(x, names)
    out = Value((source.value.shape[0] * b.mesh.axes[axis], *source.value.shape[1:]), source.value.dtype)
    b.collective("allgather", out, source.value, [axis])
    return LocalTensor(out, source.dims, _with(x.placement, **{dim.name: x.placement.axes_of(dim.name)[:-1]}))

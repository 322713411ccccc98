"""Reverse differentiation on the global graph.

Invariant: gradients are taken before partitioning, so a layout cannot change the mathematics, and
contributions that meet are gathered into one n-ary sum.
"""

from __future__ import annotations

from ..errors import GraphError
from .operation import NO_GRADIENT, Operation
from .tensor import OPERATORS, Tensor


def reachable(tensors) -> list[Operation]:
    """Return the operations that ``tensors`` depend on, in order of creation."""
    seen: dict[int, Operation] = {}
    stack = [t.operation for t in tensors]
    while stack:
        op = stack.pop()
        if op.number not in seen:
            seen[op.number] = op
            stack.extend(t.operation for t in op.inputs)
            stack.extend(op.control)
    return [seen[number] for number in sorted(seen)]


def gradients(ys, xs, grad_ys=None) -> list[Tensor | None]:
    """Return the gradient of the sum of ``ys`` with respect to each of ``xs``, or None where nothing depends on it.

    Shape   each gradient has the shape of its ``x``.
    Comm    none; collectives are chosen when a program is compiled.
    Grad    the gradient operations are ordinary operations.
    Raises  GraphError if a ``y`` is not of floating type.
    """
    ys = [ys] if isinstance(ys, Tensor) else list(ys)
    xs = list(xs)
    for y in ys:
        if not y.dtype.startswith("float"):
            raise GraphError(f"gradients: {y!r} has element type {y.dtype}. Differentiate a floating tensor.")
    order = reachable(ys)
    wanted = _leads_to(order, {id(x) for x in xs})
    terms: dict[int, list[Tensor]] = {}
    for y, dy in zip(ys, grad_ys or [OPERATORS["ones_like"](y) for y in ys]):
        terms.setdefault(id(y), []).append(dy)
    sums: dict[int, Tensor] = {}
    for op in reversed(order):
        douts = [_total(out, terms, sums) for out in op.outputs]
        if op.number not in wanted or all(d is None for d in douts) or not op.inputs or op.definition.vjp is NO_GRADIENT:
            continue
        dins = op.definition.vjp(op, douts)
        if len(dins) != len(op.inputs):
            raise GraphError(f"gradients: {op!r} returned {len(dins)} gradients for {len(op.inputs)} inputs.")
        for x, dx in zip(op.inputs, dins):
            if dx is not None:
                if set(dx.shape.dims) != set(x.shape.dims) or dx.dtype != x.dtype:
                    raise GraphError(f"gradients: {op!r} gave {dx!r} of {dx.dtype} as gradient of {x!r} of {x.dtype}.")
                terms.setdefault(id(x), []).append(dx)
    return [_in_order(x, _total(x, terms, sums)) for x in xs]


def _in_order(x: Tensor, gradient: Tensor | None) -> Tensor | None:
    """Return a gradient with the dimensions in the order of ``x``, which is what comes out of a program."""
    return gradient if gradient is None or gradient.shape == x.shape else OPERATORS["transpose"](gradient, x.shape)


def _total(x: Tensor, terms, sums) -> Tensor | None:
    if id(x) not in sums and id(x) in terms:
        parts = terms[id(x)]
        sums[id(x)] = parts[0] if len(parts) == 1 else OPERATORS["add_n"](parts)
    return sums.get(id(x))


def _leads_to(order, xs: set[int]) -> set[int]:
    """Return the numbers of the operations with an input that is, or depends on, one of ``xs``."""
    tainted, wanted = set(xs), set()
    for op in order:
        if any(id(t) in tainted for t in op.inputs):
            wanted.add(op.number)
            tainted.update(id(out) for out in op.outputs)
    return wanted

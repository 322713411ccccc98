"""Dropout: a mask that is a function of seed, name, step and global position.

Invariant: no mask is stored; the gradient draws the same one again, and no layout, memory order or number of
microbatches changes a bit of it.
"""

from __future__ import annotations

from ..dims import require
from ..errors import ConfigError, DimensionError, DtypeError
from ..graph.operation import OperationDef, Space, build, register
from ..graph.scope import scoped
from ..graph.tensor import Tensor
from ..graph.variable import seed_tensor
from ..keys import name_key


class _Dropout(OperationDef):
    """x * keep / (1 - rate); ``order`` names the dimensions in which elements are counted, rows first."""

    kind = "dropout"

    def infer(self, inputs, attributes):
        """The input's shape."""
        return [(inputs[0].shape, inputs[0].dtype)]

    def vjp(self, op, douts):
        """Drop the same elements of the gradient."""
        return [build(self.kind, [douts[0], *op.inputs[1:]], **op.attributes)[0], None, None, None]

    def space(self, op):
        """Return the input's dimensions."""
        return Space(op.inputs[0].shape)

    def lower(self, op, inputs, b):
        """One kernel that counts from the start of the slice."""
        x, attributes = inputs[0], op.attributes
        view = x.ordered(attributes["order"])
        out = b.new([x.dims[x.index[n]] for n in x.memory_order()], x.placement, x.value.dtype)
        repeated = [d.name in attributes["broadcast"] for d in view.dims]
        b.emit(self.kind, [out.ordered(attributes["order"])], [view, *inputs[1:]], name_key=attributes["key"], rate=attributes["rate"],
               global_shape=tuple(1 if r else d.size for d, r in zip(view.dims, repeated)),
               start=tuple(0 if r else b.start(d, x.placement.axes_of(d.name)) for d, r in zip(view.dims, repeated)),
               row_axis=attributes["row_axis"])
        return [out]


register(_Dropout())


def check_dropout(operation: str, rate: float, step: Tensor, row_offset: Tensor) -> None:
    """Raise if a rate is not in [0, 1) or a counter is no int64 scalar."""
    if not 0.0 <= rate < 1.0:
        raise ConfigError(f"{operation}: dropout rate {rate}. Give a number from 0 up to, but not including, 1.")
    for what, t in (("step", step), ("row_offset", row_offset)):
        if not isinstance(t, Tensor) or t.dtype != "int64" or len(t.shape):
            raise DtypeError(f"{operation}: {what} is {t!r}{' of ' + t.dtype if isinstance(t, Tensor) else ''}. Give an int64 scalar tensor.")


def dropout(x: Tensor, rate: float, name: str, step: Tensor, row_offset: Tensor, row_dim=None, broadcast_dims=()) -> Tensor:
    """Set elements of ``x`` to 0 with probability ``rate`` and divide the others by 1 - rate; ``x`` itself at rate 0.

    The mask depends on the seed, ``name`` within its scope, ``step`` and the element's global index; the index of
    ``row_dim`` is counted from ``row_offset``, the first row of this microbatch. Along ``broadcast_dims`` it repeats.

    Shape   x [...] -> [...].
    Comm    none.
    Grad    the same elements of the output's gradient; no communication.
    Raises  DimensionError for a dimension that ``x`` lacks; ConfigError for a rate outside [0, 1); DtypeError for counters that are not int64 scalars.
    """
    rate = float(rate)
    check_dropout("dropout", rate, step, row_offset)
    broadcast = tuple(require(x.shape, d, "dropout").name for d in broadcast_dims)
    row = None if row_dim is None else require(x.shape, row_dim, "dropout").name
    if row in broadcast:
        raise DimensionError(f"dropout: {row} of {x!r} is the dimension of rows and is broadcast as well. Drop it from one of the two.")
    if rate == 0.0:
        return x
    order = (*(() if row is None else (row,)), *(n for n in x.shape.names if n != row))
    return build("dropout", [x, seed_tensor(), step, row_offset], order=order, broadcast=broadcast, rate=rate, key=name_key(scoped(name)),
                 row_axis=None if row is None else 0)[0]

"""What all layers share: the path under which their variables and masks are named.

Invariant: a layer's names are fixed where it is made; where it is called changes nothing.
"""

from __future__ import annotations

from ..dims import Dimension, Shape
from ..errors import DimensionError, DtypeError
from ..graph.scope import inside, scoped
from ..graph.tensor import Tensor

FLOAT_TYPES = ("float32", "float64")


class Layer:
    """Base of every layer: ``path`` is the scope at its making and its own name."""

    def __init__(self, name: str, dtype: str):
        if dtype not in FLOAT_TYPES:
            raise DtypeError(f"{type(self).__name__} {scoped(name)}: element type {dtype!r} is not one of {', '.join(FLOAT_TYPES)}. Choose one of these.")
        self.path, self.dtype = scoped(name), dtype

    def __repr__(self):
        return f"{type(self).__name__} {self.path}"

    def inside(self):
        """Return the context in which this layer's variables, masks and operations are made."""
        return inside(self.path)

    def require(self, x: Tensor, dims) -> None:
        """Raise DimensionError unless ``x`` has every one of ``dims``, with its size, and DtypeError unless its element type is the layer's."""
        for dim in dims:
            if dim not in x.shape:
                found = x.shape.get(dim.name)
                what = f"has {found}" if found is not None else f"has no dimension {dim.name!r}"
                raise DimensionError(f"{self!r}: the operand {x.shape} {what}, and {dim} is asked for. Rename (mm.rename) or resize it.")
        if x.dtype != self.dtype:
            raise DtypeError(f"{self!r}: the operand has element type {x.dtype} and the layer {self.dtype}. Cast it (mm.cast), or make the layer of its type.")


def renamed(x: Tensor, old: str, new: str) -> Tensor:
    """Return ``x`` with dimension ``old`` called ``new``; nothing moves unless the layout treats the two names differently."""
    from ..ops import rename
    return rename(x, {old: new}) if old in x.shape else x


def rest(shape: Shape, dims) -> list[Dimension]:
    """Return the dimensions of ``shape`` other than ``dims``, in order."""
    names = {d.name for d in dims}
    return [d for d in shape if d.name not in names]

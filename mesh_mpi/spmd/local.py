"""What one rank holds of a tensor: a value, the names of its indices, a placement.

Invariant: index ``i`` of the value is the slice of dimension ``dims[i]``; its length is the
dimension's size divided by the extent of the axes that split it.
"""

from __future__ import annotations

from ..dims import Dimension
from .placement import Placement
from .value import Offset, Value


class LocalTensor:
    """A rank's slice of a tensor. The order of ``dims`` is that of memory, whatever the Shape says."""

    __slots__ = ("value", "dims", "placement", "index")

    def __init__(self, value: Value, dims, placement: Placement):
        self.value, self.dims, self.placement = value, tuple(dims), placement
        self.index = {d.name: i for i, d in enumerate(self.dims)}

    def __repr__(self):
        return f"{list(self.dims)}{self.placement}"

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the dimensions in the value's order."""
        return tuple(d.name for d in self.dims)

    def length(self, name: str) -> int:
        """Return the local length of a dimension."""
        return self.value.shape[self.index[name]]

    def memory_order(self) -> tuple[str, ...]:
        """Return the names from the largest stride to the smallest."""
        order = sorted(range(len(self.dims)), key=lambda i: (-self.value.strides[i], i))
        return tuple(self.dims[i].name for i in order)

    def ordered(self, names) -> LocalTensor:
        """Return the view with its indices in the order of ``names``."""
        if tuple(names) == self.names:
            return self
        order = [self.index[n] for n in names]
        return LocalTensor(self.value.permuted(order), [self.dims[i] for i in order], self.placement)

    def broadcast(self, names, lengths) -> Value:
        """Return the value viewed with indices ``names``; dimensions it lacks have stride 0."""
        strides = [self.value.strides[self.index[n]] if n in self.index else 0 for n in names]
        return self.value.view(lengths, strides)

    def cut(self, name: str, start: Offset | int, dim: Dimension, length: int, placement: Placement) -> LocalTensor:
        """Return the view of ``length`` indices of a dimension from ``start`` on."""
        i = self.index[name]
        shape = list(self.value.shape)
        shape[i] = length
        start = start if isinstance(start, Offset) else Offset(start)
        offset = self.value.offset + start * self.value.strides[i]
        dims = [dim if d.name == name else d for d in self.dims]
        return LocalTensor(self.value.view(shape, self.value.strides, offset), dims, placement)

    def renamed(self, dims: dict[str, Dimension]) -> LocalTensor:
        """Return the same slice under other dimensions, given by old name."""
        names = {old: new.name for old, new in dims.items()}
        return LocalTensor(self.value, [dims.get(d.name, d) for d in self.dims], self.placement.renamed(names))

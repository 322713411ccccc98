"""Tensors: named, global, symbolic values.

Invariant: a tensor is made once by its operation and never changes; Python operators are found in
a table that ``ops/`` fills, so that this module knows no operation.
"""

from __future__ import annotations

from collections.abc import Callable

from ..dims import Shape

OPERATORS: dict[str, Callable] = {}
"""Filled by ``ops/``: the functions behind the Python operators and those that ``gradients`` needs."""


class Tensor:
    """A value of the graph: shape with named dimensions, element type, the operation that makes it."""

    __slots__ = ("operation", "output", "shape", "dtype", "__weakref__")

    def __init__(self, operation, output: int, shape: Shape, dtype: str):
        self.operation, self.output, self.shape, self.dtype = operation, output, shape, dtype

    @property
    def name(self) -> str:
        """The name of the operation, with the output's name where there are several."""
        names = self.operation.definition.output_names
        return self.operation.name + (f".{names[self.output]}" if len(self.operation.outputs) > 1 else "")

    def __repr__(self):
        return f"{self.name}{self.shape}"

    def __add__(self, other):
        return OPERATORS["add"](self, other)

    def __radd__(self, other):
        return OPERATORS["add"](other, self)

    def __sub__(self, other):
        return OPERATORS["sub"](self, other)

    def __rsub__(self, other):
        return OPERATORS["sub"](other, self)

    def __mul__(self, other):
        return OPERATORS["mul"](self, other)

    def __rmul__(self, other):
        return OPERATORS["mul"](other, self)

    def __truediv__(self, other):
        return OPERATORS["div"](self, other)

    def __rtruediv__(self, other):
        return OPERATORS["div"](other, self)

    def __floordiv__(self, other):
        return OPERATORS["floordiv"](self, other)

    def __mod__(self, other):
        return OPERATORS["mod"](self, other)

    def __pow__(self, other):
        return OPERATORS["pow"](self, other)

    def __neg__(self):
        return OPERATORS["neg"](self)

    def __lt__(self, other):
        return OPERATORS["less"](self, other)

    def __le__(self, other):
        return OPERATORS["less_equal"](self, other)

    def __gt__(self, other):
        return OPERATORS["greater"](self, other)

    def __ge__(self, other):
        return OPERATORS["greater_equal"](self, other)

    def __bool__(self):
        raise TypeError(f"{self!r} is symbolic: it has no value while the graph is built. Use mm.where, or run a program.")

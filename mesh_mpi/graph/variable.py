"""Where values enter the graph: placeholders, variables, accumulators, the seed.

Invariant: a source has no inputs and computes nothing; the compiler gives it a place, the state a value.
"""

from __future__ import annotations

from ..dims import Shape, as_shape
from ..errors import DtypeError
from .initializers import Initializer, zeros
from .operation import NO_GRADIENT, Operation, OperationDef, Space, register
from .scope import creation_number, current_rules, scoped
from .tensor import Tensor

DTYPES = ("float32", "float64", "int32", "int64", "bool", "uint64")


class _Source(OperationDef):
    """A source: placed by the compiler itself, so it is never lowered."""

    vjp = NO_GRADIENT

    def __init__(self, kind: str):
        self.kind = kind

    def infer(self, inputs, attributes):
        """Return the declared shape and element type."""
        return [(attributes["shape"], attributes["dtype"])]

    def space(self, op):
        """Return the dimensions of the one output."""
        return Space(op.outputs[0].shape)

    def lower(self, op, inputs, builder):
        """Refuse: sources are bound by the compiler."""
        raise AssertionError(f"source {op.name} reached lowering")


PLACEHOLDER = register(_Source("placeholder"))
VARIABLE = register(_Source("variable"))
SEED = register(_Source("seed"))
SOURCES = (PLACEHOLDER, VARIABLE, SEED)


def _source(definition, name, shape, dtype, **attributes) -> Operation:
    if dtype not in DTYPES:
        raise DtypeError(f"{definition.kind} {name}: element type {dtype!r} is not one of {', '.join(DTYPES)}.")
    return Operation(definition, (), {"shape": shape, "dtype": dtype, **attributes}, name, current_rules(), creation_number())


def placeholder(name: str, dims=(), dtype: str = "float32") -> Tensor:
    """Declare a value that every run of a program is given, under ``name``.

    Shape   [dims]; the feed is the global array, or a callable that is asked for this rank's slices.
    Comm    none.
    Grad    none.
    Raises  DtypeError for an unknown element type.
    """
    op = _source(PLACEHOLDER, name, as_shape(dims), dtype)
    op.outputs = (Tensor(op, 0, op.attributes["shape"], dtype),)
    return op.outputs[0]


class Variable(Tensor):
    """A value that a State keeps between runs; its full name is the scope path and ``name``.

    ``storage_class`` is the class of ``storage`` rules that places it: ``parameters`` or ``optimizer``; ``cache`` (of keys and values) lies as
    the layout says.
    """

    __slots__ = ("init", "storage_class", "trainable", "full_name")

    def __init__(self, name: str, dims=(), init: Initializer | None = None, dtype: str = "float32",
                 storage_class: str = "parameters", trainable: bool = True):
        shape: Shape = as_shape(dims)
        self.full_name = scoped(name)
        op = _source(VARIABLE, self.full_name, shape, dtype, variable=self)
        op.outputs = (self,)
        super().__init__(op, 0, shape, dtype)
        self.init = init or zeros()
        self.storage_class, self.trainable = storage_class, trainable


class Accumulator(Variable):
    """An unreduced sum of gradients: written by the first microbatch, added to by the others, never saved.

    It takes the placement, partial sums included, of the gradient that the first program writes into it.
    """

    __slots__ = ()

    def __init__(self, name: str, dims=(), dtype: str = "float32"):
        super().__init__(name, dims, None, dtype, storage_class="accumulator", trainable=False)


_seed_tensor: list[Tensor] = []


def seed_tensor() -> Tensor:
    """Return the scalar that holds the state's seed; the state feeds it itself."""
    if not _seed_tensor:
        op = Operation(SEED, (), {"shape": Shape(), "dtype": "uint64"}, "seed", "compute", creation_number())
        op.outputs = (Tensor(op, 0, Shape(), "uint64"),)
        _seed_tensor.append(op.outputs[0])
    return _seed_tensor[0]

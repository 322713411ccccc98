"""Tables: of symbols, with the product that makes logits of them, and of positions.

Invariant: the vocabulary is padded to a multiple that does not depend on the mesh, and padding counts nowhere
(its rows get no gradient and its logits no probability).
"""

from __future__ import annotations

from ..dims import Dimension
from ..errors import DimensionError
from ..graph.initializers import normal
from ..graph.tensor import Tensor
from ..graph.variable import Variable
from ..ops import einsum, embedding, rename, slice_at
from ..ops import slice as slice_of
from .layer import Layer, rest


class Embedding(Layer):
    """A table of one row a symbol: variable ``<name>/table`` [vocab, dim], normal with ``stddev`` (default 1/sqrt(size of ``dim``)).

    ``vocab`` is the padded dimension: ``vocab_size`` rounded up to a multiple of ``multiple``. The same object
    may serve as the input's table and as the softmax's (:meth:`logits`).

    Shape   ids [...] of integers -> [..., dim].
    Comm    where ``vocab`` is split: one reduction of the result where it is used.
    Raises  DimensionError if ``ids`` has ``dim`` or ``vocab`` already.
    """

    def __init__(self, vocab_size: int, dim: Dimension, name: str = "embedding", multiple: int = 128, stddev: float | None = None,
                 vocab: str = "vocab", dtype: str = "float32"):
        super().__init__(name, dtype)
        self.vocab_size, self.dim = vocab_size, dim
        self.vocab = Dimension(vocab, -(-vocab_size // multiple) * multiple)
        with self.inside():
            self.table = Variable("table", [self.vocab, dim], normal(dim.size**-0.5 if stddev is None else stddev), dtype)

    def __call__(self, ids: Tensor) -> Tensor:
        """Look ``ids`` up; shapes and communication as the class says."""
        with self.inside():
            return embedding(self.table, ids, self.vocab)

    def logits(self, x: Tensor) -> Tensor:
        """Return the scores of all symbols, padding included: x times the table, without scaling.

        Shape   x [..., dim] -> [..., vocab].
        Comm    none, unless ``dim`` is split.
        Raises  DimensionError if ``x`` lacks ``dim``; DtypeError if its element type is another.
        """
        self.require(x, [self.dim])
        with self.inside():
            return einsum([x, self.table], [*rest(x.shape, [self.dim]), self.vocab])


class LearnedPositions(Layer):
    """A table of one row a position: variable ``<name>/table`` [max_length, dim], normal with ``stddev``.

    Shape   a dimension ``length`` of at most ``max_length`` -> [length, dim]: the first rows.
    Comm    none.
    Raises  DimensionError if ``length`` is longer than the table.
    """

    def __init__(self, max_length: int, dim: Dimension, name: str = "positions", stddev: float = 1.0, dtype: str = "float32"):
        super().__init__(name, dtype)
        self.max_length = Dimension("max_length", max_length)
        with self.inside():
            self.table = Variable("table", [self.max_length, dim], normal(stddev), dtype)

    def at(self, positions: Tensor) -> Tensor:
        """Return the rows of given positions, for packed sequences, whose positions begin anew.

        Shape   positions [...] of integers -> [..., dim].
        Comm    none, unless ``max_length`` is split.
        Raises  DimensionError if ``positions`` has ``dim`` already.
        """
        with self.inside():
            return embedding(self.table, positions, self.max_length)

    def one(self, at: Tensor) -> Tensor:
        """Return the row of one position, whose number a program is fed.

        Shape   at: an integer scalar -> [dim].
        Comm    none; the table is gathered where ``max_length`` is split.
        Raises  DtypeError if ``at`` is no integer scalar.
        """
        with self.inside():
            return slice_at(self.table, self.max_length, at)

    def __call__(self, length: Dimension) -> Tensor:
        """Return the rows of the positions of ``length``; shapes and communication as the class says."""
        if length.size > self.max_length.size:
            raise DimensionError(f"{self!r}: {length} positions are asked for and the table has {self.max_length}. "
                                 "Make the table longer, or the sequences shorter.")
        with self.inside():
            if length.size == self.max_length.size:
                return rename(self.table, {self.max_length.name: length.name})
            return slice_of(self.table, self.max_length, 0, length)

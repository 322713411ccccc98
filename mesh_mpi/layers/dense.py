"""The fully connected layer.

Invariant: the initial scale comes from global sizes, and a bias is added to the whole sum, once.
"""

from __future__ import annotations

from ..dims import as_shape
from ..graph.initializers import Initializer, fan_in_normal, zeros
from ..graph.tensor import Tensor
from ..graph.variable import Variable
from ..ops import einsum
from .layer import Layer, rest


class Dense(Layer):
    """A linear map from ``reduced_dims`` to ``new_dims`` (each one Dimension or several).

    Variables ``<name>/weight`` [reduced_dims..., new_dims...], normal with standard deviation 1/sqrt(product of the global sizes of
    ``reduced_dims``) unless ``init`` says otherwise, and with ``bias`` also ``<name>/bias`` [new_dims...], zeros.

    Shape   x [..., reduced_dims...] -> [..., new_dims...]; the other dimensions keep their order.
    Comm    where ``reduced_dims`` are split: one reduction of the result where it is used.
    Raises  DimensionError if ``x`` lacks one of ``reduced_dims``; DtypeError if its element type is another.
    """

    def __init__(self, reduced_dims, new_dims, name: str = "dense", bias: bool = False, init: Initializer | None = None, dtype: str = "float32"):
        super().__init__(name, dtype)
        self.reduced_dims, self.new_dims = as_shape(reduced_dims), as_shape(new_dims)
        with self.inside():
            self.weight = Variable("weight", [*self.reduced_dims, *self.new_dims], init or fan_in_normal(self.reduced_dims), dtype)
            self.bias = Variable("bias", self.new_dims, zeros(), dtype) if bias else None

    def __call__(self, x: Tensor) -> Tensor:
        """Apply the layer; shapes and communication as the class says."""
        self.require(x, self.reduced_dims)
        with self.inside():
            y = einsum([x, self.weight], [*rest(x.shape, self.reduced_dims), *self.new_dims])
            return y if self.bias is None else y + self.bias

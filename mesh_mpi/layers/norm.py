"""Normalisation over one dimension, with learned scale.

Invariant: moments are over the global dimension; a split one costs a reduction and changes no result.
"""

from __future__ import annotations

from ..dims import Dimension
from ..graph.initializers import ones, zeros
from ..graph.tensor import Tensor
from ..graph.variable import Variable
from ..ops import layer_norm, rms_norm
from .layer import Layer


class LayerNorm(Layer):
    """(x - mean) / sqrt(variance + eps) * scale + bias over ``dim``; variables ``<name>/scale`` (ones) and ``<name>/bias`` (zeros) [dim].

    Shape   x [..., dim, ...] -> [like x].
    Comm    none, unless ``dim`` is split.
    Raises  DimensionError if ``x`` lacks ``dim``; DtypeError if its element type is another.
    """

    def __init__(self, dim: Dimension, name: str = "norm", eps: float = 1e-6, bias: bool = True, dtype: str = "float32"):
        super().__init__(name, dtype)
        self.dim, self.eps = dim, eps
        with self.inside():
            self.scale = Variable("scale", [dim], ones(), dtype)
            self.bias = Variable("bias", [dim], zeros(), dtype) if bias else None

    def __call__(self, x: Tensor) -> Tensor:
        """Normalise ``x``; shapes and communication as the class says."""
        self.require(x, [self.dim])
        with self.inside():
            return layer_norm(x, self.dim, self.scale, self.bias, eps=self.eps)


class RMSNorm(Layer):
    """x / sqrt(mean of squares + eps) * scale over ``dim``; variable ``<name>/scale`` (ones) [dim].

    Shape   x [..., dim, ...] -> [like x].
    Comm    none, unless ``dim`` is split.
    Raises  DimensionError if ``x`` lacks ``dim``; DtypeError if its element type is another.
    """

    def __init__(self, dim: Dimension, name: str = "norm", eps: float = 1e-6, dtype: str = "float32"):
        super().__init__(name, dtype)
        self.dim, self.eps = dim, eps
        with self.inside():
            self.scale = Variable("scale", [dim], ones(), dtype)

    def __call__(self, x: Tensor) -> Tensor:
        """Normalise ``x``; shapes and communication as the class says."""
        self.require(x, [self.dim])
        with self.inside():
            return rms_norm(x, self.dim, self.scale, eps=self.eps)

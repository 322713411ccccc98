"""Dropout, whose masks are a function of position.

Invariant: a mask depends on the seed, the layer's path, the element's index in the step's whole batch and the step:
on no mesh, no layout and no number of microbatches.
"""

from __future__ import annotations

from typing import NamedTuple

from ..errors import DimensionError
from ..graph.tensor import Tensor
from ..ops import dropout
from ..ops.attention import DropoutArgs
from .layer import Layer


class Masks(NamedTuple):
    """What masks depend on besides seed and name: ``step`` and ``row_offset``, int64 scalars.

    ``row_offset`` is the number of rows of the step's batch before the first row of this microbatch. Where a layer is called without
    Masks (evaluation, decoding), nothing is dropped.
    """

    step: Tensor
    row_offset: Tensor


class Dropout(Layer):
    """Sets elements to 0 with probability ``rate`` and divides the others by 1 - rate.

    One mask serves all indices of the ``broadcast`` dimensions; ``row`` is the dimension that microbatches cut.

    Shape   x [..., row, ...] -> [like x].
    Comm    none: each rank draws the mask of its slice.
    Raises  DimensionError for a rate outside [0, 1).
    """

    def __init__(self, rate: float, name: str = "dropout", broadcast=("length",), row: str = "batch", dtype: str = "float32"):
        super().__init__(name, dtype)
        if not 0 <= rate < 1:
            raise DimensionError(f"{self!r}: the rate is {rate}. Give a number of at least 0 and below 1.")
        self.name, self.rate, self.broadcast, self.row = name, rate, tuple(broadcast), row

    def __call__(self, x: Tensor, masks: Masks | None) -> Tensor:
        """Drop elements of ``x``; without ``masks`` or at rate 0, return ``x`` itself."""
        if masks is None or not self.rate:
            return x
        with self.inside():
            return dropout(x, self.rate, "mask", masks.step, masks.row_offset, self.row, tuple(n for n in self.broadcast if n in x.shape))

    def of_weights(self, masks: Masks | None) -> DropoutArgs | None:
        """Return what an attention needs to drop its weights, or None; to be called inside the layer that made this one."""
        if masks is None or not self.rate:
            return None
        return DropoutArgs(self.rate, f"{self.name}/mask", masks.step, masks.row_offset)

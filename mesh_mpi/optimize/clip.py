"""The global norm of the gradients, the clipping by it, and the verdict whether a step is applied.

Invariant: the norm is of the mean gradient over the whole mesh, every logical element once; it is taken in the placement in which the
update takes the gradients, so that no gradient moves for its sake and only scalars are reduced.
"""

from __future__ import annotations

from typing import NamedTuple

from ..dims import Shape
from ..graph.scope import rules_of, scope
from ..graph.tensor import Tensor
from ..ops import add_n, cast, div, full, isfinite, maximum, minimum, reduce_sum_squares, sqrt


class Clipped(NamedTuple):
    """``norm``: global norm of the mean gradient, before clipping; ``scale``: what the gradient sums are multiplied by;
    ``apply``: int32, 1 if the norm is finite. All scalars."""

    norm: Tensor
    scale: Tensor
    apply: Tensor


def clip(gradients, count: Tensor, clip_norm: float | None = None) -> Clipped:
    """Return norm, scale and verdict for gradients of a loss *sum* over ``count`` terms: scale = min(1, clip_norm / norm) / count.

    A count of 0 counts as 1. Without ``clip_norm`` nothing is clipped and scale = 1 / count.

    Shape   gradients [any] each, count scalar -> three scalars.
    Comm    one reduction of scalars; each gradient is brought to its optimizer's placement, where the update finds it.
    Grad    not meant to be differentiated.
    Raises  DtypeError for gradients of several element types.
    """
    with rules_of("optimizer"), scope("clip"):
        count = maximum(count, 1.0)
        norm = sqrt(add_n([reduce_sum_squares(g) for g in gradients])) / count
        scale = div(1.0, count)
        if clip_norm is not None:
            tiny = full(Shape(), 1e-30, norm.dtype)
            scale = minimum(1.0, div(clip_norm, maximum(norm, tiny))) * scale
        return Clipped(norm, scale, cast(isfinite(norm), "int32"))

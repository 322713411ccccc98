"""The residual branch: normalise, transform, drop out, add."""

from __future__ import annotations

from collections.abc import Callable

from ..graph.tensor import Tensor
from .dropout import Dropout, Masks


def residual(x: Tensor, norm: Callable[[Tensor], Tensor], branch: Callable[[Tensor], Tensor], dropout: Dropout, masks: Masks | None = None) -> Tensor:
    """Return x + dropout(branch(norm(x))): a pre-norm residual branch.

    Shape   x [...] -> [like x].
    Comm    that of ``norm`` and ``branch``; a partial sum of the branch is reduced before it is dropped out and added, once.
    Grad    the output's gradient to ``x`` and, through the branch, to ``x`` again.
    Raises  DimensionError if the branch changes the dimensions.
    """
    return x + dropout(branch(norm(x)), masks)

"""Stochastic gradient descent, with momentum.

Invariant: textbook momentum: the step just taken is the velocity just computed.
"""

from __future__ import annotations

from ..graph.tensor import Tensor
from ..graph.variable import Variable
from ..ops import sgd_update
from .update import UpdateInputs, decays, of_optimizer, slot


class Sgd:
    """v = momentum v + g + weight_decay w; w -= rate v (``nesterov``: w -= rate (g + momentum v)).

    Slot ``<variable>/sgd_v``, only with momentum. Weight decay spares biases and variables of one dimension.
    """

    def __init__(self, momentum: float = 0.0, nesterov: bool = False, weight_decay: float = 0.0):
        self.momentum, self.nesterov, self.weight_decay = momentum, nesterov, weight_decay

    def update(self, variable: Variable, gradient: Tensor, inputs: UpdateInputs) -> list[tuple[Variable, Tensor]]:
        """Return the new values of the variable and its slot; ``gradient`` is multiplied by ``inputs.scale``.

        Shape   gradient [like variable].
        Comm    the gradient goes to where the slot lies (its sum is reduced on the way), the new value to where the variable lies.
        Raises  DimensionError or DtypeError if gradient and variable differ.
        """
        with of_optimizer(variable):
            v = slot(variable, "sgd_v") if self.momentum else None
            new = sgd_update(variable, gradient, v, inputs.learning_rate, inputs.scale, inputs.apply, momentum=self.momentum,
                             nesterov=self.nesterov, weight_decay=self.weight_decay if decays(variable) else 0.0)
            return [(old, value) for old, value in zip((variable, v), new) if old is not None]

"""Adam, with decoupled weight decay (AdamW).

Invariant: textbook bias correction by the global step; one fused operation a variable.
"""

from __future__ import annotations

from ..graph.tensor import Tensor
from ..graph.variable import Variable
from ..ops import adam_update
from .update import UpdateInputs, decays, of_optimizer, slot


class Adam:
    """m = beta1 m + (1 - beta1) g; v = beta2 v + (1 - beta2) g^2; w -= rate (mhat / (sqrt(vhat) + eps) + weight_decay w).

    Slots ``<variable>/adam_m`` and ``<variable>/adam_v``. Weight decay spares biases and variables of one dimension. Without
    ``bias_correction``, mhat = m and vhat = v.
    """

    def __init__(self, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8, weight_decay: float = 0.0, bias_correction: bool = True):
        self.beta1, self.beta2, self.eps = beta1, beta2, eps
        self.weight_decay, self.bias_correction = weight_decay, bias_correction

    def update(self, variable: Variable, gradient: Tensor, inputs: UpdateInputs) -> list[tuple[Variable, Tensor]]:
        """Return the new values of the variable and its slots; ``gradient`` is multiplied by ``inputs.scale``.

        Shape   gradient [like variable].
        Comm    the gradient goes to where the slots lie (its sum is reduced on the way), the new value to where the variable lies.
        Raises  DimensionError or DtypeError if gradient and variable differ.
        """
        with of_optimizer(variable):
            m, v = slot(variable, "adam_m"), slot(variable, "adam_v")
            new = adam_update(variable, gradient, m, v, inputs.learning_rate, inputs.step, inputs.scale, inputs.apply, beta1=self.beta1,
                              beta2=self.beta2, eps=self.eps, weight_decay=self.weight_decay if decays(variable) else 0.0,
                              bias_correction=self.bias_correction)
            return list(zip((variable, m, v), new))

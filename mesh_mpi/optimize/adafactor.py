"""Adafactor: second moments factored over the two largest dimensions.

Invariant: which dimensions are factored, every mean and every root mean square are of global sizes, so no layout changes a step.
"""

from __future__ import annotations

from ..graph.tensor import Tensor
from ..graph.variable import Variable
from ..ops import adafactor_update, cast, factored_dims, full
from ..ops import pow as power
from .update import UpdateInputs, decays, of_optimizer, slot


class Adafactor:
    """The rule of the Adafactor paper, as written at ``mm.adafactor_update``.

    Slots ``<variable>/adafactor_vr`` [less the largest dimension] and ``_vc`` [less the second largest] where both have at least
    ``min_dim_size_to_factor`` elements, else ``_v`` [like the variable]; with ``beta1`` also ``_m``. The decay of the second moments is
    1 - step**-decay_exponent, with steps from 1, or the constant ``decay`` if given. Weight decay spares biases and variables of one dimension.
    """

    def __init__(self, beta1: float = 0.0, decay_exponent: float = 0.8, clipping_threshold: float | None = 1.0, factored: bool = True,
                 min_dim_size_to_factor: int = 128, multiply_by_parameter_scale: bool = True, epsilon1: float = 1e-30,
                 epsilon2: float = 1e-3, weight_decay: float = 0.0, decay: float | None = None):
        self.beta1, self.decay_exponent, self.decay, self.weight_decay = beta1, decay_exponent, decay, weight_decay
        self.factored, self.min_dim_size_to_factor = factored, min_dim_size_to_factor
        self.rule = {"clipping_threshold": clipping_threshold, "parameter_scale": multiply_by_parameter_scale, "beta1": beta1,
                     "eps1": epsilon1, "eps2": epsilon2}

    def update(self, variable: Variable, gradient: Tensor, inputs: UpdateInputs) -> list[tuple[Variable, Tensor]]:
        """Return the new values of the variable and its slots; ``gradient`` is multiplied by ``inputs.scale``.

        Shape   gradient [like variable].
        Comm    the gradient goes to where the slots lie; means over a split dimension reduce a vector, each root mean square a scalar.
        Raises  DimensionError or DtypeError if gradient and variable differ.
        """
        dims = factored_dims(variable.shape, self.min_dim_size_to_factor) if self.factored else None
        with of_optimizer(variable):
            slots = {"v": slot(variable, "adafactor_v")} if dims is None else {
                name: slot(variable, f"adafactor_{name}", variable.shape.without([d.name])) for name, d in zip(("vr", "vc"), dims)}
            if self.beta1:
                slots["m"] = slot(variable, "adafactor_m")
            weight_decay = self.weight_decay if decays(variable) else 0.0
            new, moments = adafactor_update(variable, gradient, slots, inputs.learning_rate, self._decay(inputs.step, variable.dtype), inputs.scale,
                                            inputs.apply, dims, weight_decay=weight_decay, **self.rule)
            return [(variable, new), *((slots[name], moments[name]) for name in slots)]

    def _decay(self, step: Tensor, dtype: str) -> Tensor:
        if self.decay is not None:
            return full((), self.decay, dtype)
        return 1.0 - power(cast(step, dtype), -self.decay_exponent)

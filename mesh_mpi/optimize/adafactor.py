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
    """The rule of the Adafactor paper; slots ``<variable>/adafactor_vr`` and ``_vc`` (factored) or ``_v``, and ``_m`` with ``beta1``.

    With U = g^2 + epsilon1 and decay b: factored over (d0, d1), vr = b vr + (1 - b) mean_d0 U, vc = b vc + (1 - b) mean_d1 U,
    x = g / sqrt(vr / mean_d1 vr) / sqrt(vc); otherwise v = b v + (1 - b) U, x = g / sqrt(v). Then x /= max(1, rms(x) / clipping_threshold);
    update = rate max(rms(w), epsilon2) x (the middle factor with ``multiply_by_parameter_scale``); with ``beta1`` the update is
    smoothed; w -= update + rate weight_decay w.
    The decay b is 1 - step**-decay_exponent, with steps from 1, or the constant ``decay`` if given.
    """

    def __init__(self, beta1: float = 0.0, decay_exponent: float = 0.8, clipping_threshold: float | None = 1.0, factored: bool = True,
                 min_dim_size_to_factor: int = 128, multiply_by_parameter_scale: bool = True, epsilon1: float = 1e-30,
                 epsilon2: float = 1e-3, weight_decay: float = 0.0, decay: float | None = None):
        self.beta1, self.decay_exponent, self.clipping_threshold = beta1, decay_exponent, clipping_threshold
        self.factored, self.min_dim_size_to_factor = factored, min_dim_size_to_factor
        self.multiply_by_parameter_scale, self.epsilon1, self.epsilon2 = multiply_by_parameter_scale, epsilon1, epsilon2
        self.weight_decay, self.decay = weight_decay, decay

    def update(self, variable: Variable, gradient: Tensor, inputs: UpdateInputs) -> list[tuple[Variable, Tensor]]:
        """Return the new values of the variable and its slots; ``gradient`` is multiplied by ``inputs.scale``.

        Shape   gradient [like variable].
        Comm    the gradient goes to where the slots lie; means over a split dimension reduce a vector, each root mean square a scalar.
        Raises  DtypeError if gradient and variable differ in element type.
        """
        with of_optimizer(variable):
            dims = factored_dims(variable.shape, self.min_dim_size_to_factor) if self.factored else None
            lacks = {"v": ()} if dims is None else {"vr": (dims[0].name,), "vc": (dims[1].name,)}
            if self.beta1:
                lacks["m"] = ()
            slots = {name: slot(variable, f"adafactor_{name}", variable.shape.without(gone)) for name, gone in lacks.items()}
            w, new = adafactor_update(
                variable, gradient, slots, inputs.learning_rate, self._decay(inputs.step, variable.dtype), inputs.scale, inputs.apply, dims,
                self.clipping_threshold, self.multiply_by_parameter_scale, self.beta1, self.weight_decay if decays(variable) else 0.0,
                self.epsilon1, self.epsilon2)
            return [(variable, w), *((slots[name], new[name]) for name in slots)]

    def _decay(self, step: Tensor, dtype: str) -> Tensor:
        if self.decay is not None:
            return full((), self.decay, dtype)
        return 1.0 - power(cast(step, dtype), -self.decay_exponent)

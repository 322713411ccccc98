"""Adafactor: second moments factored over the two largest dimensions.

Invariant: which dimensions are factored, every mean and every root mean square are of global sizes, so no layout changes a step.
"""

from __future__ import annotations

from ..dims import Dimension, Shape
from ..graph.tensor import Tensor
from ..graph.variable import Variable
from ..ops import cast, full, maximum, reduce_mean, reduce_sum_squares, rsqrt, sqrt, square, where
from ..ops import pow as power
from .update import UpdateInputs, decays, of_optimizer, slot


def factored_dims(shape: Shape, min_size: int = 128) -> tuple[Dimension, Dimension] | None:
    """Return the two largest dimensions (d0, d1), d0 first, if both have at least ``min_size``; the earlier goes first among equals."""
    largest = sorted(shape, key=lambda d: -d.size)[:2]
    return (largest[0], largest[1]) if len(largest) == 2 and largest[1].size >= min_size else None


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
            g = gradient * inputs.scale
            x, pairs = self._direction(variable, g, self._decay(inputs.step, variable.dtype))
            if self.clipping_threshold is not None:
                x = x / maximum(_rms(x) * (1.0 / self.clipping_threshold), 1.0)
            rate = inputs.learning_rate
            change = x * (rate * maximum(_rms(variable), self.epsilon2) if self.multiply_by_parameter_scale else rate)
            if self.beta1:
                m = slot(variable, "adafactor_m")
                change = m * self.beta1 + change * (1.0 - self.beta1)
                pairs.append((m, change))
            if self.weight_decay and decays(variable):
                change = change + variable * (rate * self.weight_decay)
            go = inputs.apply > 0
            return [(old, where(go, new, old)) for old, new in [(variable, variable - change), *pairs]]

    def _decay(self, step: Tensor, dtype: str) -> Tensor:
        if self.decay is not None:
            return full((), self.decay, dtype)
        return 1.0 - power(cast(step, dtype), -self.decay_exponent)

    def _direction(self, variable: Variable, g: Tensor, b: Tensor) -> tuple[Tensor, list]:
        """Return the gradient divided by the root of its second moment, and (slot, new value) pairs."""
        u, dims = square(g) + self.epsilon1, factored_dims(variable.shape, self.min_dim_size_to_factor) if self.factored else None
        if dims is None:
            old = slot(variable, "adafactor_v")
            v = old * b + u * (1.0 - b)
            return g * rsqrt(v), [(old, v)]
        d0, d1 = dims
        old_r = slot(variable, "adafactor_vr", variable.shape.without([d0.name]))
        old_c = slot(variable, "adafactor_vc", variable.shape.without([d1.name]))
        r = old_r * b + reduce_mean(u, d0) * (1.0 - b)
        c = old_c * b + reduce_mean(u, d1) * (1.0 - b)
        mean_r = reduce_mean(r, d1)
        return g * rsqrt(r / mean_r) * rsqrt(c), [(old_r, r), (old_c, c)]


def _rms(x: Tensor) -> Tensor:
    return sqrt(reduce_sum_squares(x) * (1.0 / x.shape.size))

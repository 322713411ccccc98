"""From the ``optimizer`` section of a configuration to the optimizer it means."""

from __future__ import annotations

from .. import config_schema as schema
from .adafactor import Adafactor
from .adam import Adam
from .sgd import Sgd


def make_optimizer(section: schema.Optimizer) -> Sgd | Adam | Adafactor:
    """Return the optimizer of an ``optimizer`` section; ``clip_norm`` is no part of it (see ``clip``)."""
    s = section
    if s.name == "sgd":
        return Sgd(momentum=s.momentum, weight_decay=s.weight_decay)
    if s.name == "adam":
        return Adam(s.beta1, s.beta2, s.eps, s.weight_decay)
    return Adafactor(s.beta1, s.decay_exponent, s.clipping_threshold, s.factored, s.min_dim_size_to_factor,
                     s.multiply_by_parameter_scale, s.epsilon1, s.epsilon2, s.weight_decay)

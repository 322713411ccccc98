"""Learning rates as functions of the step, which is counted from 1.

Invariant: each is a pure function of numbers, evaluated on the host in float64; a program is fed the one number it needs, so that a
schedule changes no program. T is the number of steps of the whole run.
"""

from __future__ import annotations

from collections.abc import Callable

from .. import config_schema as schema

Schedule = Callable[[float], float]


def constant(step: float, rate: float) -> float:
    """Return ``rate``, whatever the step."""
    return rate


def linear_warmup(step: float, rate: float = 1.0, warmup_steps: float = 10_000) -> float:
    """Return rate * min(1, step / warmup_steps)."""
    return rate * min(1.0, step / warmup_steps)


def truncated_rsqrt(step: float, rate: float = 1.0, warmup_steps: float = 10_000) -> float:
    """Return rate / sqrt(max(step, warmup_steps))."""
    return rate * max(step, warmup_steps) ** -0.5


def linear_decay(step: float, rate: float, total_steps: float, decay_steps: float | None = None) -> float:
    """Return rate * clip((T - step) / decay_steps, 0, 1); without ``decay_steps`` the decay takes all of the run."""
    return rate * min(1.0, max(0.0, (total_steps - step) / (decay_steps or total_steps)))


def noam(step: float, rate: float, total_steps: float, warmup_steps: float = 10_000, decay_fraction: float = 0.1) -> float:
    """Return rate / sqrt(max(step, warmup_steps)) * min(1, (T - step) / (decay_fraction * T)), at least 0."""
    return truncated_rsqrt(step, rate, warmup_steps) * linear_decay(step, 1.0, total_steps, decay_fraction * total_steps)


def slanted_triangular(step: float, rate: float, total_steps: float, cut_fraction: float = 0.1, ratio: float = 32.0) -> float:
    """Return the rate that rises linearly from rate / ratio to ``rate`` at step cut_fraction * T and falls back by T."""
    cut = cut_fraction * total_steps
    part = step / cut if step < cut else 1.0 - (step - cut) / (total_steps - cut)
    return rate * (1.0 + max(0.0, part) * (ratio - 1.0)) / ratio


def warmup_rsqrt_decay(step: float, rate: float, total_steps: float, warmup_steps: float = 10_000, decay_steps: float | None = None) -> float:
    """Return rate * min(1, step / warmup_steps) / sqrt(max(step, warmup_steps)) * clip((T - step) / decay_steps, 0, 1).

    This is the schedule of the Mesh-TensorFlow paper; without ``decay_steps`` the last factor is 1.
    """
    tail = 1.0 if decay_steps is None else linear_decay(step, 1.0, total_steps, decay_steps)
    return linear_warmup(step, 1.0, warmup_steps) * truncated_rsqrt(step, rate, warmup_steps) * tail


def make_schedule(section: schema.Schedule, total_steps: int) -> Schedule:
    """Return the function of the step (from 1) that the ``schedule`` section of a configuration means, for a run of ``total_steps``."""
    s, rate = section, section.learning_rate
    makers: dict[str, Callable[[], Schedule]] = {
        "constant": lambda: lambda step: constant(step, rate),
        "linear_warmup": lambda: lambda step: linear_warmup(step, rate, s.warmup_steps),
        "truncated_rsqrt": lambda: lambda step: truncated_rsqrt(step, rate, s.warmup_steps),
        "noam": lambda: lambda step: noam(step, rate, total_steps, s.warmup_steps, s.decay_fraction),
        "linear_decay": lambda: lambda step: linear_decay(step, rate, total_steps, s.decay_steps),
        "slanted_triangular": lambda: lambda step: slanted_triangular(step, rate, total_steps, s.cut_fraction, s.ratio),
        "warmup_rsqrt_decay": lambda: lambda step: warmup_rsqrt_decay(step, rate, total_steps, s.warmup_steps, s.decay_steps),
    }
    return makers[section.name]()

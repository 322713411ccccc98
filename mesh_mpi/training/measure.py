"""A training step bound to this process's machine, for measurements.

Invariant: what is measured is the step as training takes it, feeds included.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..runtime.state import State
from .batches import open_batches
from .step import StepMetrics, Training


class MeasuredStep:
    """``run`` takes the next step; ``peak_bytes`` is the planned memory of a rank, ``comm_bytes`` the payload a rank passes to collectives in a step."""

    def __init__(self, training: Training):
        c = training.config
        self.training, self.state, self.step = training, State(training.programs, seed=c.seed), 0
        self.batches = open_batches(c)
        self.n_ranks = self.state.machine.n_ranks
        self.peak_bytes = max(p.peak_bytes for p in training.programs)
        times = [1, c.n_microbatches - 1, 1] if c.n_microbatches > 1 else [1]
        self.comm_bytes = sum(n * r.payload_bytes for n, p in zip(times, training.step_programs) for r in p.collectives())

    def run(self) -> StepMetrics:
        """Take one step, to its end."""
        self.step += 1
        return self.training.run_step(self.state, self.step, self.batches.feeds(self.step))

    def comm_s(self) -> float:
        """Return the seconds spent in collectives since the start."""
        return self.state.machine.comm_s

    def maxima(self, values: Sequence[float]) -> list[float]:
        """Return the largest of each value over all ranks."""
        return self.state.machine.maxima(values)

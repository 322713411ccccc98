"""An independent account of communication: what was really handed over, call by call.

Invariant: sizes come from the buffers that a communicator passed on, never from a program.
"""

from __future__ import annotations


class Recorder:
    """Set ``machine.recorder = Recorder()``; afterwards ``calls`` lists (kind, axes, bytes of the larger buffer), one a collective.

    ``gather`` stands for arrays brought together for the host (outputs asked for whole, variables read).
    """

    def __init__(self):
        self.calls: list[tuple[str, tuple[str, ...], int]] = []

    def record(self, kind: str, axes: tuple[str, ...], n_bytes: int) -> None:
        """Note one collective over ``axes``; ``n_bytes`` is the size of the larger of its two buffers on one rank."""
        self.calls.append((kind, axes, n_bytes))

    def total_bytes(self) -> int:
        """Return the sum over all calls."""
        return sum(n for _, _, n in self.calls)

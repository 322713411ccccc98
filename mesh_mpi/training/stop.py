"""Being asked to stop: a signal sets a flag, and the ranks agree at the end of a step.

Invariant: a handler does nothing but set the flag; whether a run stops is decided by all ranks at the same step.
"""

from __future__ import annotations

import signal

from ..log import launcher_rank

CHECKPOINTED = 85
"""The exit code of a run that saved itself because it was asked to: batch scripts requeue on it."""


class StopRequest:
    """Watches SIGUSR1 (and SIGTERM, which some launchers follow with SIGKILL within a second) while it is open.

    Without a launcher SIGINT too: Ctrl-C saves, a second one ends at once. A launcher passes it on as SIGUSR1 itself.
    """

    def __init__(self):
        self.requested = False
        self._before: dict[int, object] = {}

    def __enter__(self) -> StopRequest:
        alone = (signal.SIGINT,) if launcher_rank() is None else ()
        for number in (signal.SIGUSR1, signal.SIGTERM, *alone):
            self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *exception) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number, frame) -> None:
        if number == signal.SIGINT and self.requested:
            raise KeyboardInterrupt
        self.requested = True

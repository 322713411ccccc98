"""Reading ahead on a thread.

Invariant: what :meth:`Prefetch.get` returns or raises is what ``read`` would have returned or raised in the caller; the thread only changes when.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any


class Prefetch:
    """Calls ``read(step, key)`` ahead of time, for each key of steps ``step``, step + 1, ..., at most ``n_steps`` steps ahead of the one last asked for.

    An exception of the thread is raised by ``get`` where its result is asked for, and ends the thread; asked again, ``get`` reads itself.
    """

    def __init__(self, read: Callable[[int, Hashable], Any], n_steps: int, step: int, keys: Sequence[Hashable]):
        self._read, self._n_steps, self.keys = read, n_steps, tuple(keys)
        self._first, self._next, self._stopped = step, step, False  # steps that may still be asked for, and the one to read next
        self._ready: dict[tuple[int, Hashable], Any] = {}
        self._failed: BaseException | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="mesh_mpi prefetch", daemon=True)
        self._thread.start()

    def covers(self, step: int, key: Hashable) -> bool:
        """Return whether the thread has read, will read, or has failed to read this."""
        with self._changed:
            coming = not self._stopped and key in self.keys and self._first <= step <= self._first + self._n_steps
            return coming or (step, key) in self._ready or self._failed is not None

    def get(self, step: int, key: Hashable) -> Any:
        """Return the result for a step and key, waiting for it if need be; earlier steps are dropped."""
        with self._changed:
            if step > self._first:
                self._first = step
                for old in [pair for pair in self._ready if pair[0] < step]:
                    del self._ready[old]
                self._changed.notify_all()
            while (step, key) not in self._ready and not self._stopped:
                self._changed.wait()
            if (step, key) in self._ready:
                return self._ready[step, key]
            failed, self._failed = self._failed, None
        if failed is not None:
            raise failed
        return self._read(step, key)

    def close(self) -> None:
        """Stop the thread and wait for its end."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        try:
            while self._wait():
                step = self._next
                for key in self.keys:
                    result = self._read(step, key)
                    with self._changed:
                        self._ready[step, key] = result
                        self._changed.notify_all()
                self._next = step + 1
        except BaseException as error:  # raised by get, in the thread that asks
            self._failed = error
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _wait(self) -> bool:
        """Wait until there is a step to read; return False when the thread is to end."""
        with self._changed:
            while not self._stopped and self._next > self._first + self._n_steps:
                self._changed.wait()
            self._next = max(self._next, self._first)
            return not self._stopped

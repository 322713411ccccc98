"""What a person sees of a run: a bar in a terminal, plain lines in a log; on one rank.

Invariant: nothing here is needed by a run; figures come from the loop.
"""

from __future__ import annotations

import sys

from ..log import is_speaker, say


class Progress:
    """Shows steps ``first`` + 1 to ``last``; a line every ``log_every`` steps (0: none), and a bar if stderr is a terminal."""

    def __init__(self, first: int, last: int, log_every: int):
        self.last, self.log_every, self._bar = last, log_every, None
        if is_speaker() and sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=last, initial=first, unit="step", dynamic_ncols=True, smoothing=0.1)

    def step(self, step: int, text: str, left_s: float) -> None:
        """Show one step's figures."""
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update(step - self._bar.n)
        elif self.log_every and (step % self.log_every == 0 or step in (1, self.last)):
            say(f"step {step}/{self.last}  {text}  left {_clock(left_s)}")

    def line(self, text: str) -> None:
        """Show a line that stays."""
        if self._bar is not None:
            self._bar.write(text, file=sys.stderr)
        else:
            say(text)

    def close(self) -> None:
        """End the bar."""
        if self._bar is not None:
            self._bar.close()


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"

"""Random words as a function of position: Philox4x64-10, bit for bit NumPy's.

key = (seed, name_key) and counter = (block, step, 0, 0) give a block of four 64-bit words. A 64-bit draw for element e
is word e % 4 of block e // 4; a 16-bit draw is lane e % 4 (low bits first) of word (e % 16) // 4 of block e // 16.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

_WORDS = 4
_MASK64 = (1 << 64) - 1


class Stream:
    """A generator that is placed at a block of the counter, as often as asked."""

    def __init__(self, name_key: int) -> None:
        self._name_key = name_key & _MASK64
        self._philox = np.random.Philox(key=0)
        self._generator = np.random.Generator(self._philox)
        self._next = 0

    def start(self, seed: int, step: int) -> None:
        """Place the stream at block 0 of this seed and step."""
        # NumPy counts up before it generates, so block 0 is reached from the counter one below.
        before = (((step & _MASK64) << 64) - 1) % (1 << 256)
        counter = np.array([(before >> (64 * i)) & _MASK64 for i in range(4)], np.uint64)
        self._philox.state = {
            "bit_generator": "Philox",
            "state": {"counter": counter, "key": np.array([seed & _MASK64, self._name_key], np.uint64)},
            "buffer": np.zeros(4, np.uint64),
            "buffer_pos": _WORDS,
            "has_uint32": 0,
            "uinteger": 0,
        }
        self._next = 0

    def _seek(self, block: int) -> None:
        if block != self._next:
            self._philox.advance((block - self._next) % (1 << 256))

    def words(self, block: int, n_blocks: int) -> np.ndarray:
        """The 4 * n_blocks words from ``block`` on."""
        self._seek(block)
        self._next = block + n_blocks
        return self._philox.random_raw(n_blocks * _WORDS)

    def draws16(self, element: int, n: int) -> np.ndarray:
        """16-bit draws for elements [element, element + n)."""
        first, last = element // 16, (element + n + 15) // 16
        lanes = self.words(first, last - first).view("<u2")
        return lanes[element - 16 * first :][:n]

    def doubles(self, element: int, out: np.ndarray) -> None:
        """(word >> 11) 2^-53 for the elements from ``element`` on, into contiguous float64 ``out``."""
        first, skip = divmod(element, _WORDS)
        self._seek(first)
        if skip:
            self._philox.random_raw(skip)
        self._generator.random(out=out)
        self._next, used = divmod(element + out.size, _WORDS)
        if used:
            # Words are left of a block that is counted already: forget them.
            self._next += 1
            self._philox.advance(0)


def open_interval(u: np.ndarray) -> None:
    """(word >> 11) 2^-53 to ((word >> 11) + 0.5) 2^-53, in place."""
    np.add(u, 2.0**-54, u)
    # (2^53 - 1 + 0.5) 2^-53 rounds to 1, of which there is no normal quantile.
    np.minimum(u, 1 - 2.0**-53, out=u)


class Draw(NamedTuple):
    """``rows`` runs of ``length`` elements, ``pitch`` apart, from global element ``element`` on."""

    at: int
    element: int
    rows: int
    pitch: int
    length: int


def element_strides(global_shape: Sequence[int]) -> list[int]:
    """C-order element strides of a whole array."""
    strides, stride = [], 1
    for size in reversed(global_shape):
        strides.append(stride)
        stride *= size
    return strides[::-1]


def plan_draws(
    shape: Sequence[int], strides: Sequence[int], element: int, max_elements: int, max_gap: int
) -> list[Draw]:
    """The draws that fill an array of ``shape`` in C order, element (i, j, ..) being ``element + i si + j sj ..``.

    Runs that lie close together are drawn with what lies between them, which is cheaper than moving the stream.
    """
    axes: list[list[int]] = []
    for size, stride in zip(shape, strides, strict=True):
        if size == 1:
            continue
        if axes and axes[-1][1] == size * stride:
            axes[-1] = [axes[-1][0] * size, stride]
        else:
            axes.append([size, stride])
    if not axes or axes[-1][1] != 1:
        axes.append([1, 1])
    length = axes[-1][0]
    count, pitch = axes[-2] if len(axes) > 1 else (1, length)
    group = 1
    if pitch - length <= max_gap:
        group = max(1, min(count, max_elements // pitch))
    draws: list[Draw] = []
    at = 0
    for lead in np.ndindex(*[size for size, _ in axes[:-2]]):
        base = element + sum(i * stride for i, (_, stride) in zip(lead, axes[:-2], strict=True))
        for row in range(0, count, group):
            rows = min(group, count - row)
            for start in range(0, length, max_elements):
                part = min(max_elements, length - start)
                draws.append(Draw(at, base + row * pitch + start, rows, pitch if rows > 1 else part, part))
                at += rows * part
    return draws


def keep_mask(stream: Stream, element: int, n: int, threshold: np.ndarray, out: np.ndarray, max_draws: int) -> None:
    """out = draw >= threshold for the n elements from ``element`` on."""
    for start in range(0, n, max_draws):
        stop = min(n, start + max_draws)
        np.greater_equal(stream.draws16(element + start, stop - start), threshold, out[start:stop])


def keep_threshold(rate: float) -> np.ndarray:
    """16-bit draws below it are dropped."""
    if not 0.0 <= rate < 1.0:
        raise ValueError(f"dropout: rate {rate} is outside [0, 1).")
    return np.array(min(65535, round(rate * 65536)), np.uint16)

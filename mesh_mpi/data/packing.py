"""Documents to rows.

Invariant: the tokens of all documents, in order of arrival, fill row after row; only the last row has padding. A document's part in a row is one segment.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from .vocabulary import EOS, PAD, ByteVocabulary

MAX_LENGTH = 65_535  # segments of a row are counted in 16 bits
_IS_TEXT = np.ones(256, bool)
_IS_TEXT[list(b" \t\n\r\f\v")] = False  # what separates words


class Statistics(NamedTuple):
    """What was packed. ``n_lines`` that are not blank, ``n_words`` between white space, ``n_bytes`` of the documents, ``n_tokens`` with the
    ends of documents and without padding."""

    n_documents: int
    n_lines: int
    n_words: int
    n_bytes: int
    n_tokens: int
    n_rows: int
    n_padding: int

    @property
    def padding(self) -> float:
        """The share of padding in the rows' positions."""
        return self.n_padding / max(1, self.n_padding + self.n_tokens)


class Packer:
    """Packs documents into rows of ``length`` and hands them to ``write(targets, segments)``: uint16 [row, position] and the same of
    :func:`segment_dtype`."""

    def __init__(self, length: int, vocabulary: ByteVocabulary, write: Callable[[np.ndarray, np.ndarray], None]):
        self.length, self.vocabulary, self._write = length, vocabulary, write
        self._rest = np.empty(0, np.uint16)
        self._in_word = self._is_open = False
        self.n_documents = self.n_newlines = self.n_words = self.n_bytes = self.n_tokens = self.n_rows = 0

    def add(self, parts: list[bytes], goes_on: bool) -> None:
        """Take consecutive parts of documents; each ends its document, but for the last one if that ``goes_on``."""
        lengths = np.array([len(part) for part in parts])
        text = np.frombuffer(b"\0".join(parts) + (b"" if goes_on else b"\0"), np.uint8)
        ends = (np.cumsum(lengths + 1) - 1)[:len(parts) - goes_on]
        self.n_documents += len(ends)
        self.n_bytes += int(lengths.sum())
        self.n_newlines += int(np.count_nonzero(text == ord("\n")))
        self._count_words(text, ends)
        tokens = self.vocabulary.encode(text)
        tokens[ends] = EOS
        self._is_open = goes_on
        self._pack(tokens)

    def finish(self) -> Statistics:
        """Write the last row and return the statistics. Every document must have ended."""
        assert not self._is_open, "a document has not ended"
        self.n_tokens = self.n_tokens + len(self._rest)
        n_padding = -len(self._rest) % self.length
        if n_padding:
            self._rows(np.concatenate([self._rest, np.full(n_padding, PAD, np.uint16)])[None])
        return Statistics(self.n_documents, self.n_newlines + self.n_documents, self.n_words, self.n_bytes, self.n_tokens, self.n_rows, n_padding)

    def _count_words(self, text: np.ndarray, ends: np.ndarray) -> None:
        if not len(text):
            return
        inside = _IS_TEXT[text]
        inside[ends] = False
        self.n_words += int(np.count_nonzero(inside[1:] & ~inside[:-1])) + int(inside[0] and not self._in_word)
        self._in_word = bool(inside[-1])

    def _pack(self, tokens: np.ndarray) -> None:
        tokens = np.concatenate([self._rest, tokens])
        whole = len(tokens) // self.length * self.length
        if whole:
            self.n_tokens += whole
            self._rows(tokens[:whole].reshape(-1, self.length))
        self._rest = tokens[whole:].copy()

    def _rows(self, targets: np.ndarray) -> None:
        """Write rows: a segment starts with a row and after each end of a document."""
        segments = np.ones(targets.shape, segment_dtype(self.length))
        np.cumsum(targets[:, :-1] == EOS, axis=1, out=segments[:, 1:], dtype=segments.dtype)
        segments[:, 1:] += 1
        segments[targets == PAD] = 0
        self.n_rows += len(targets)
        self._write(targets, segments)


def segment_dtype(length: int) -> np.dtype:
    """Return the type that holds the number of segments a row of ``length`` can have: a document of one byte takes two positions."""
    return np.dtype(np.uint8 if length // 2 + 1 <= 255 else np.uint16)

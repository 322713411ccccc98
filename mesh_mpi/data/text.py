"""Texts: read in blocks, checked, and cut into documents.

Invariant: memory does not depend on the size of a text, of a line or of a document; only "\\n" ends a line, and only a blank line (white space of
ASCII alone) or the end of a file ends a document.
"""

from __future__ import annotations

import codecs
import gzip
import hashlib
import os
import re
import stat
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from ..errors import DataError, nearest

BLOCK_BYTES = 2**18
BUNDLED = {"bundled:sotu": Path(__file__).parent / "sotu.txt.gz"}
_BORDER = re.compile(rb"\r?\n(?:[ \t\r\f\v]*\n)+")  # between two documents: the end of a line, and blank lines
_GZIP = b"\x1f\x8b"


class Piece(NamedTuple):
    """Consecutive text: each of ``parts`` but the last is the rest of a document; the last one's goes on."""

    parts: list[bytes]


class Text:
    """One text, plain or gzip, to be read once; ``name`` as it was given, or one of ``BUNDLED``.

    ``n_bytes`` and ``digest`` (blake2b-128 of the uncompressed text) count what was read; ``place_bytes`` of ``size_bytes`` (None where the
    system does not say) of the file are behind. With ``any_bytes`` the text need be no text.
    Raises DataError if there is no such file or it is empty, and in :meth:`blocks` if it is no text or damaged.
    """

    def __init__(self, name: str, any_bytes: bool = False):
        self.name, self.any_bytes, self.n_bytes = name, any_bytes, 0
        self._digest, self._newlines = hashlib.blake2b(digest_size=16), 0
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        if name.startswith("bundled:") and name not in BUNDLED:
            raise DataError(f"prepare: there is no bundled text {name!r}.{nearest(name, BUNDLED)}")
        self.path = BUNDLED.get(name, Path(name))
        self._raw = self._open()
        head, status = self._raw.peek(2)[:2], os.fstat(self._raw.fileno())
        self.size_bytes = status.st_size if stat.S_ISREG(status.st_mode) else None
        self.is_gzip = head == _GZIP
        if not head:
            self._refuse("is empty. Give a file with text in it")
        if self.path.suffix == ".gz" and not self.is_gzip:
            self._refuse(f"starts with {head!r} and gzip with {_GZIP!r}. Give it a name without .gz if it is plain text, else copy it again")
        if self.size_bytes is not None:
            self._raw.close()  # opened again by blocks: there may be more texts than files that can be open

    @property
    def digest(self) -> str:
        """The digest so far, hexadecimal."""
        return self._digest.hexdigest()

    @property
    def place_bytes(self) -> int:
        """The bytes of the file, compressed as it is, that have been read."""
        try:
            return self._raw.tell()
        except (OSError, ValueError):
            return self.n_bytes

    def close(self) -> None:
        """Close the file; twice does no harm."""
        self._raw.close()

    def blocks(self) -> Iterator[bytes]:
        """Yield the text in blocks of at most ``BLOCK_BYTES``, each checked."""
        self._raw = self._open() if self._raw.closed else self._raw
        with self._raw:
            stream = gzip.GzipFile(fileobj=self._raw) if self.is_gzip else self._raw
            while True:
                try:
                    block = stream.read(BLOCK_BYTES)
                except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                    self._refuse(f"is damaged gzip after {self.n_bytes:,} bytes of text: {error}. Copy or download it again")
                except OSError as error:
                    self._refuse(f"cannot be read after {self.n_bytes:,} bytes: {error.strerror or error}. Give a file of text, plain or gzip")
                self._check(block)
                if not block:
                    return
                self._digest.update(block)
                self.n_bytes += len(block)
                self._newlines += block.count(b"\n")
                yield block

    def _open(self):
        try:
            return open(self.path, "rb")  # noqa: SIM115 (closed by blocks or close)
        except OSError as error:
            raise DataError(f"prepare: {self.name} cannot be read: {error.strerror}. Give a file of text, plain or gzip.") from None

    def _check(self, block: bytes) -> None:
        """Refuse a block that is no text; the empty one stands for the end."""
        if self.any_bytes:
            return
        hint = "Give text in UTF-8, or --any-bytes to take any bytes as they are"
        at = block.find(b"\0")
        if at >= 0:
            self._refuse(f"holds a NUL byte at byte {self.n_bytes + at:,} (line {self._line(block, at):,}) and is no text. {hint}")
        n_waiting = len(self._decoder.getstate()[0])
        try:
            self._decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            at = error.start - n_waiting
            self._refuse(f"is no UTF-8: byte {error.object[error.start]:#04x} at byte {self.n_bytes + at:,} (line {self._line(block, max(at, 0)):,}): "
                         f"{error.reason}. {hint}")

    def _line(self, block: bytes, at: int) -> int:
        return self._newlines + block.count(b"\n", 0, at) + 1

    def _refuse(self, found: str) -> None:
        self._raw.close()
        raise DataError(f"prepare: {self.name} {found}.")


def pieces(text: Text, progress: Callable[[Text], None] = lambda text: None) -> Iterator[Piece]:
    """Yield a text as pieces of documents. A document is its lines with "\\n" between them; no document is empty.

    White space at the end of a block waits for the next one; more of it than a block without a blank line in it counts as text.
    ``progress`` is called after each block.
    """
    waiting = b"\n\n"  # as if blank lines stood before and after: no special cases
    is_open = found = False
    for block in text.blocks():
        data = waiting + block
        n = len(data.rstrip())
        waiting = data[n:]
        if len(waiting) > BLOCK_BYTES:
            n, waiting = _squeezed(waiting, n)
        if n:
            piece, is_open = _cut(data[:n], is_open)
            found = True
            yield piece
        progress(text)
    if not found:
        raise DataError(f"prepare: {text.name} holds only blank lines, no document. Give text.")
    piece, _ = _cut(waiting + b"\n\n", is_open)
    if len(piece.parts) > 1:
        yield piece


def _squeezed(waiting: bytes, n: int) -> tuple[int, bytes]:
    """Return how much of the data is text and the white space that waits, when that is more than a block."""
    first, last = waiting.find(b"\n"), waiting.rfind(b"\n")
    if first < last and len(waiting) - (last - first) <= BLOCK_BYTES:
        return n, waiting[:first] + b"\n\n" + waiting[last + 1:]
    return n + len(waiting), b""


def _cut(data: bytes, is_open: bool) -> tuple[Piece, bool]:
    """Cut at the borders of documents; return the piece, and whether its last document goes on."""
    parts = _BORDER.split(data)
    if not parts[0] and not is_open and len(parts) > 1:
        del parts[0]
    return Piece(parts), bool(parts[-1])

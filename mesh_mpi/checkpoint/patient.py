"""A file for HDF5 to write to, on a disk that may become full.

Invariant: HDF5 never sees an error. It writes also when objects are merely let go of, where an error cannot be raised and has been seen to
end the process; so the first error is kept here, what follows it is dropped, and whoever writes asks.
"""

from __future__ import annotations

import os
from pathlib import Path


class PatientFile:
    """What h5py needs of a file object: ``write``, ``readinto``, ``seek``, ``tell``, ``truncate``, ``flush``. Raises OSError only when made."""

    def __init__(self, path: Path):
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
        self._at = 0
        self.error: OSError | None = None

    def write(self, data) -> int:
        """Write all of ``data`` at the place of the last ``seek``, or nothing more after an error."""
        at, self._at = self._at, self._at + len(memoryview(data).cast("B"))
        self.write_at(at, data)
        return self._at - at

    def write_at(self, offset: int, data) -> None:
        """Write all of ``data`` at ``offset``, or nothing more after an error. Threads may write side by side."""
        rest = memoryview(data).cast("B")
        end = offset + len(rest)
        try:
            while rest and self.error is None:
                rest = rest[os.pwrite(self._descriptor, rest, end - len(rest)):]
        except OSError as error:
            self.error = self.error or error

    def readinto(self, buffer) -> int:
        """Fill ``buffer``, with zeros beyond the end."""
        view = memoryview(buffer).cast("B")
        n = os.preadv(self._descriptor, [view], self._at)
        view[n:] = bytes(len(view) - n)
        self._at += len(view)
        return len(view)

    def read(self, n: int = -1) -> bytes:
        """Return ``n`` bytes (h5py takes an object with this method for a file)."""
        data = bytearray(max(n, 0))
        self.readinto(data)
        return bytes(data)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Set the place from the start, from here or from the end."""
        base = (0, self._at, os.fstat(self._descriptor).st_size)[whence]
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        """Return the place."""
        return self._at

    def truncate(self, size: int | None = None) -> int:
        """Set the size."""
        size = self._at if size is None else size
        try:
            if self.error is None:
                os.ftruncate(self._descriptor, size)
        except OSError as error:
            self.error = error
        return size

    def flush(self) -> None:
        """Nothing is held back here."""

    def check(self) -> None:
        """Raise the first error, if there was one."""
        if self.error is not None:
            raise self.error

    def begin_sync(self) -> None:
        """Bring what is written so far to disk; for a thread, while more is written. An error is kept."""
        try:
            if self.error is None:
                os.fdatasync(self._descriptor)
        except OSError as error:
            self.error = self.error or error

    def sync(self) -> None:
        """Wait until all is on disk. Raises OSError."""
        self.check()
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Close it; an error that a network file system reports only now is kept like the others."""
        if self._descriptor >= 0:
            try:
                os.close(self._descriptor)
            except OSError as error:
                self.error = self.error or error
            self._descriptor = -1


def forget(path: Path) -> None:
    """Take a file that is on disk out of the system's cache, so that reading it reads the disk. Where the system cannot, nothing happens."""
    if hasattr(os, "posix_fadvise"):
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

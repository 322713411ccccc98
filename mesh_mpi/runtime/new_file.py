"""A file that appears under its name whole or not at all, and survives a full disk.

Invariant: until :meth:`NewFile.publish` returns nothing stands under the name that did not stand there before; after
:meth:`NewFile.discard` nothing of the attempt is left.

HDF5 1.10 to 2.0 crash the process (a segmentation fault at close or exit) when a write fails for want of space. So an HDF5 file is written
through this object (``h5py.File(new_file, "w")``): a failed write is kept in ``error`` and reported to the
library as done; the writer looks with :meth:`NewFile.check`, and ``publish`` never passes over it.
"""

from __future__ import annotations

import os
from pathlib import Path


class NewFile:
    """A file open for writing and reading under a temporary name beside ``path``, with the methods of a raw binary file.

    Raises OSError if it cannot be created.
    """

    def __init__(self, path: str | Path):
        self.path, self.error = Path(path), None
        self.temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}.tmp")
        self._raw = open(self.temporary, "x+b", buffering=0)  # noqa: SIM115 (closed by publish or discard)

    def check(self) -> None:
        """Raise the first OSError of a write, if there was one."""
        if self.error is not None:
            raise self.error

    def sync(self) -> None:
        """Bring everything to the disk. Raises OSError."""
        self.check()
        os.fsync(self._raw.fileno())

    def publish(self) -> None:
        """Bring everything to the disk and give the file its name, in place of an older one. Raises OSError; then ``discard`` is still due."""
        self.sync()
        self._raw.close()
        os.replace(self.temporary, self.path)
        folder = os.open(self.path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def discard(self) -> None:
        """Remove what was written; nothing after :meth:`publish`."""
        try:
            self._raw.close()
        finally:
            self.temporary.unlink(missing_ok=True)

    def write(self, data) -> int:
        """Write all of ``data`` (any buffer) and return its bytes, whatever happens to them: see ``error``."""
        view = memoryview(data).cast("B")
        done = 0
        try:
            while done < len(view) and self.error is None:
                done += self._raw.write(view[done:])
        except OSError as error:
            self.error = error
        return len(view)

    def truncate(self, size: int | None = None) -> int:
        """Set the size in bytes; a failure is kept in ``error``."""
        try:
            return self._raw.truncate(size) if self.error is None else size
        except OSError as error:
            self.error = error
            return size

    def read(self, size: int = -1) -> bytes:
        """Read up to ``size`` bytes, by default all that are left."""
        return self._raw.read(size)

    def readinto(self, buffer) -> int:
        """Read into ``buffer`` and return how many bytes that were; zeros stand for what a failed write left out."""
        n = self._raw.readinto(buffer)
        view = memoryview(buffer).cast("B")
        if self.error is not None and n < len(view):
            view[n:] = bytes(len(view) - n)
            n = len(view)
        return n

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move to ``offset`` bytes and return the place."""
        return self._raw.seek(offset, whence)

    def tell(self) -> int:
        """Return the place in bytes."""
        return self._raw.tell()

    def flush(self) -> None:
        """Do nothing: nothing is held back here."""

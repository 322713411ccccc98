"""Write token files; ``tokens`` reads them and says what is in them.

Invariant: the same rows and description give the same file to the byte, and it appears under its name whole or not at all.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np

from ..errors import DataError
from ..runtime.new_file import NewFile
from .packing import Statistics, segment_dtype
from .tokens import FORMAT, FORMAT_VERSION
from .vocabulary import ByteVocabulary

CHUNK_TOKENS = 2**15


class TokenWriter:
    """A token file being written: :meth:`write` rows, :meth:`close` it with its description, :meth:`publish` or :meth:`discard` it.

    Raises DataError, naming the path, where the system refuses.
    """

    def __init__(self, path: str | Path, length: int):
        self.path, self.length, self._h5 = Path(path), length, None
        try:
            self._file = NewFile(self.path)
        except OSError as error:
            raise self._refused(error) from None
        self._h5 = h5py.File(self._file, "w", libver=("earliest", "v110"))
        chunk = (max(1, CHUNK_TOKENS // length), length)
        for name, dtype in (("targets", np.uint16), ("segments", segment_dtype(length))):
            dataset = self._h5.create_dataset(name, (0, length), dtype, maxshape=(None, length), chunks=chunk)
            dataset.dims[0].label, dataset.dims[1].label = "row", "position"

    def write(self, targets: np.ndarray, segments: np.ndarray) -> None:
        """Append rows, [row, position] each."""
        for name, rows in (("targets", targets), ("segments", segments)):
            dataset = self._h5[name]
            n = dataset.shape[0]
            dataset.resize(n + len(rows), 0)
            dataset[n:] = rows
        self._checked(self._file.check)

    def close(self, vocabulary: ByteVocabulary, statistics: Statistics, provenance: dict) -> None:
        """Write the description; nothing can be added after it."""
        given = {"format": FORMAT, "format_version": FORMAT_VERSION, "vocabulary": vocabulary.name, "vocab_size": vocabulary.size,
                 "length": self.length, **{name: n for name, n in statistics._asdict().items() if name != "n_rows"}}
        for name, value in given.items():
            self._h5.attrs[name] = value
        self._h5.create_dataset("provenance", data=json.dumps(provenance, indent=1, ensure_ascii=False), dtype=h5py.string_dtype())
        self._h5.close()
        self._checked(self._file.sync)

    def publish(self) -> None:
        """Give the closed file its name, on the disk for good."""
        self._checked(self._file.publish)

    def discard(self) -> None:
        """Leave nothing behind of a file that was not published."""
        if self._h5 is not None:
            self._h5.close()
        self._file.discard()

    def _checked(self, action: Callable[[], None]) -> None:
        try:
            action()
        except OSError as error:
            raise self._refused(error) from None

    def _refused(self, error: OSError) -> DataError:
        return DataError(f"prepare: {self.path} cannot be written: {error.strerror or error}. "
                         "Make room, or choose a path in a folder that exists and can be written to.")

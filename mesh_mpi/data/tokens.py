"""Rows of tokens: of a token file, or in memory.

Invariant: reading touches the asked rows only, whatever thread asks, and what is read does not depend on how the rows were asked for.

A token file is HDF5. /targets [row, position] uint16: ids, 0 padding. /segments [row, position] uint8 or uint16: 0 padding, else the number of
the document's part within the row, from 1. Attributes of /: format, format_version, vocabulary, vocab_size, length, and counts. /provenance: the
sources with their digests, as JSON.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

import h5py
import numpy as np

from ..errors import DataError
from .rows import FEEDS, feeds_of
from .vocabulary import VOCABULARIES, ByteVocabulary, make_vocabulary

FORMAT, FORMAT_VERSION = "mesh_mpi tokens", 1
_MAKE_ONE = "Make one with mesh-mpi prepare TEXT {path} --length L."


class TokenRows:
    """Rows of ``length`` tokens; ``name`` says where they come from.

    ``targets`` and ``segments`` are anything that is sliced like an array [row, position].
    """

    def __init__(self, name: str, targets, segments, vocabulary: ByteVocabulary):
        self.name, self.vocabulary = name, vocabulary
        self._targets, self._segments = targets, segments
        self.n_rows, self.length = targets.shape
        self._lock = threading.Lock()

    @property
    def vocab_size(self) -> int:
        """How many ids there are, padding and end included."""
        return self.vocabulary.size

    def rows(self, indices, positions: slice = slice(None)) -> dict[str, np.ndarray]:
        """Return ``inputs``, ``targets``, ``segments`` and ``positions`` of rows, each int32 [len(indices), positions].

        ``indices`` are whole numbers in any order, also doubled; -1 stands for a row of padding. Raises DataError for a row that does not exist.
        """
        indices = np.asarray(indices, np.int64).ravel()
        if indices.size and not -1 <= indices.min() <= indices.max() < self.n_rows:
            raise DataError(f"data: {self.name} has {self.n_rows:,} rows, and rows from {indices.min():,} to {indices.max():,} were asked for. "
                            f"Ask for 0 to {self.n_rows - 1:,}.")
        start, stop, _ = positions.indices(self.length)
        if start >= stop or not indices.size:
            return {name: np.zeros((len(indices), max(0, stop - start)), np.int32) for name in FEEDS}
        wanted, places = np.unique(indices, return_inverse=True)
        targets = np.zeros((len(wanted), stop), self._targets.dtype)  # from position 0 on: a segment's start may lie before the asked slice
        segments = np.zeros((len(wanted), stop), self._segments.dtype)
        with self._lock:
            for first, last in _runs(wanted):
                begin, end = int(wanted[first]), int(wanted[last - 1]) + 1
                targets[first:last] = self._targets[begin:end, :stop]
                segments[first:last] = self._segments[begin:end, :stop]
        self._check_rows(wanted, targets)
        return {name: array[places] for name, array in feeds_of(targets, segments, slice(start, stop)).items()}

    def _check_rows(self, wanted: np.ndarray, targets: np.ndarray) -> None:
        """Rows in memory were made by this program."""

    def check_fits(self, length: int, vocab_size: int) -> None:
        """Raise DataError if the rows do not fit a model of that ``length`` and ``vocab_size``, with every number."""
        found, advice = [], []
        if self.length != length:
            found.append(f"rows of {self.length} positions and model.length is {length}")
            advice.append(f"Train with model.length={self.length}, or prepare the text again with --length {length}.")
        if self.vocab_size > vocab_size:
            found.append(f"{self.vocab_size} symbols (vocabulary {self.vocabulary.name!r}) and model.vocab_size is {vocab_size}")
            advice.append(f"Set model.vocab_size={self.vocab_size}.")
        if found:
            raise DataError(f"data: {self.name} has {'; it has '.join(found)}. {' '.join(advice)}")


class TokenFile(TokenRows):
    """A token file, opened for reading. Raises DataError, naming the path, if it is none or is damaged."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        if not os.path.isfile(self.path):
            kind = "is a folder" if os.path.isdir(self.path) else "does not exist"
            raise DataError(f"data: {path} {kind}. {_MAKE_ONE.format(path='OUTPUT.h5')}")
        try:
            if not h5py.is_hdf5(self.path):
                raise DataError(f"data: {path} is no token file: it is not HDF5. {_MAKE_ONE.format(path='OUTPUT.h5')}")
            # without chunk cache: single rows are read directly; without locks: many ranks read, and network file systems refuse locks
            self._h5 = h5py.File(self.path, "r", rdcc_nbytes=0, locking=False)
        except OSError as error:
            raise DataError(f"data: {path} cannot be opened: {error}. {_MAKE_ONE.format(path='OUTPUT.h5')}") from None
        try:
            targets, segments, vocabulary = self._parts()
        except DataError:
            self._h5.close()
            raise
        super().__init__(str(path), targets, segments, vocabulary)

    @property
    def attributes(self) -> dict:
        """The description of the file: ``n_documents``, ``n_tokens``, ``n_bytes``, ``n_words``, ``n_padding`` and so on."""
        return {name: value.item() if isinstance(value, np.generic) else value for name, value in self._h5.attrs.items()}

    @property
    def provenance(self) -> str:
        """The sources, as JSON."""
        return self._h5["provenance"].asstr()[()]

    def close(self) -> None:
        """Close the file; no row can be read after it."""
        with self._lock:
            self._h5.close()

    def __enter__(self) -> TokenFile:
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def rows(self, indices, positions: slice = slice(None)) -> dict[str, np.ndarray]:
        """Return what :meth:`TokenRows.rows` does. Raises DataError also where the system refuses to read."""
        try:
            return super().rows(indices, positions)
        except (OSError, ValueError) as error:
            state = "it is closed" if not self._h5 else error
            raise DataError(f"data: {self.path} cannot be read: {state}. Open it again; if it is damaged, prepare it again.") from None

    def _check_rows(self, wanted: np.ndarray, targets: np.ndarray) -> None:
        """Raise DataError for rows that nobody prepared: a file cut short while it is open reads as zeros, and would train on nothing."""
        largest = targets.max(axis=1)
        bad = np.flatnonzero((wanted >= 0) & ((largest == 0) | (largest >= self.vocab_size)))
        if bad.size:
            raise DataError(f"data: {self.name} is damaged: the largest id in row {wanted[bad[0]]:,} is {largest[bad[0]]}; ids are from 1 to "
                            f"{self.vocab_size - 1}, with 0 for padding at a row's end. Prepare the text again.")

    def _parts(self):
        """Return targets, segments and vocabulary, or raise DataError."""
        said = self._h5.attrs
        if said.get("format") != FORMAT:
            raise DataError(f"data: {self.path} is no token file: its attribute format is {said.get('format')!r}, not {FORMAT!r}. "
                            + _MAKE_ONE.format(path="OUTPUT.h5"))
        if said.get("format_version") != FORMAT_VERSION:
            raise DataError(f"data: {self.path} has format version {said.get('format_version')}, and this program reads {FORMAT_VERSION}. "
                            "Prepare the text again, or use a newer mesh_mpi.")
        targets, segments = (self._h5.get(name) for name in ("targets", "segments"))
        shapes = [getattr(dataset, "shape", None) for dataset in (targets, segments)]
        if None in shapes or shapes[0] != shapes[1] or len(shapes[0]) != 2 or shapes[0][1] != said.get("length") or not shapes[0][0]:
            raise DataError(f"data: {self.path} is damaged: targets {shapes[0]}, segments {shapes[1]}, length {said.get('length')}. Prepare the text again.")
        name = said.get("vocabulary")
        if name not in VOCABULARIES or said.get("vocab_size") != VOCABULARIES[name].size:
            raise DataError(f"data: {self.path} has vocabulary {name!r} of {said.get('vocab_size')} ids, and this program knows "
                            f"{', '.join(f'{n} ({v.size})' for n, v in VOCABULARIES.items())}. Prepare the text again.")
        return targets, segments, make_vocabulary(name)


def _runs(wanted: np.ndarray) -> list[tuple[int, int]]:
    """Return the runs of consecutive numbers in sorted, different ``wanted``, as ranges of places; -1 (padding) is in none."""
    skipped = int(wanted[0] == -1)
    breaks = np.flatnonzero(np.diff(wanted[skipped:]) != 1) + 1 + skipped
    borders = [skipped, *breaks.tolist(), len(wanted)]
    return [(a, b) for a, b in zip(borders[:-1], borders[1:]) if a < b]

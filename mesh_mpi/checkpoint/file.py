"""The HDF5 file of a checkpoint while rank 0 writes it.

Invariant: on other ranks every method does nothing; a failure while writing is kept until ``refuse_if_failed``, so that ranks that still
send are served first.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import sys
import time
from pathlib import Path

import h5py
import numpy as np

from ..compiler.program import Bound
from ..errors import CheckpointError
from ..runtime.state import State
from ..runtime.versions import kernels_digest, package_version
from .folder import FILE, on_disk, sync
from .format import (CHECKSUM, CONTENTS, FORMAT, FORMAT_VERSION, LIBVER, PROVENANCE, STATE, Description, contents_checksum, describe,
                     read_description)
from .streaming import Checksum, Checksums, Slices


class CheckpointFile:
    """``create``, then ``begin``, ``put`` ..., ``end`` for each variable, ``finish``; ``discard`` removes what was not published."""

    def __init__(self, step: int):
        self.step, self.partial, self.checksums = step, None, None
        self._file: h5py.File | None = None
        self._item: h5py.Dataset | None = None
        self._checksum: Checksum | None = None
        self._pending: list[tuple[str, Checksum]] = []
        self._fault: CheckpointError | None = None

    def create(self, partial: Path) -> None:
        """Create the file in the folder ``partial``. Raises CheckpointError."""
        self.partial, self.checksums = partial, Checksums()
        with self._disk():
            self._file = h5py.File(partial / FILE, "w", libver=LIBVER, locking=False)
            self._file.attrs.update({"format": FORMAT, "format_version": FORMAT_VERSION, "step": self.step, "saved_at": time.time()})

    def begin(self, path: str, b: Bound) -> None:
        """Start a variable: an empty dataset with labels and attributes."""
        if self._file is None or self._fault is not None:
            return
        try:
            with self._disk():
                self._item = self._file.create_dataset(path, b.shape, b.value.dtype)
                for i, dim in enumerate(b.dims):
                    self._item.dims[i].label = dim.name
                self._item.attrs.update({"dtype": b.value.dtype, "initializer": repr(b.variable.init), "storage_class": b.variable.storage_class})
        except CheckpointError as fault:
            self._fault = fault
        self._checksum = self.checksums.of(int(np.prod(b.shape, dtype=np.int64)) * np.dtype(b.value.dtype).itemsize)
        self._pending.append((path, self._checksum))

    def put(self, block: Slices, array: np.ndarray, slot: list) -> None:
        """Write the next block; ``slot`` is that of its buffer."""
        if self._file is None or self._fault is not None:
            return
        slot[1] = self._checksum.update(array)
        try:
            with self._disk():
                self._item[block] = array
        except CheckpointError as fault:
            self._fault = fault

    def end(self) -> None:
        """End a variable."""
        self._item = self._checksum = None

    def refuse_if_failed(self) -> None:
        """Raise what failed since the last call."""
        if self._fault is not None:
            raise self._fault

    def finish(self, values: dict, texts: dict[str, str]) -> tuple[Description, float]:
        """Add checksums, counters and texts, close, bring to disk; return the description as read back and the seconds waited for checksums."""
        start = time.perf_counter()
        checksums = [(path, checksum.hexdigest()) for path, checksum in self._pending]
        waited_s = time.perf_counter() - start
        self._end_checksums()
        texts[PROVENANCE] = json.dumps({**json.loads(texts[PROVENANCE]), "variables": [path for path, _ in checksums]}, indent=1)
        with self._disk():
            for path, checksum in checksums:
                self._file[path].attrs[CHECKSUM] = checksum
            for key, value in values.items():
                self._file[f"{STATE}/{key}"] = value
            for key, text in texts.items():
                self._file.create_dataset(key, data=text, dtype=h5py.string_dtype())
            path = self.partial / FILE
            self._file.attrs[CONTENTS] = contents_checksum(read_description(path, self._file))
            self._file.flush()
            self._file.close()
            self._file = None
            sync(path)
            _forget(path)
        return describe(path), waited_s

    def discard(self) -> None:
        """Close and remove the file and its folder, unless it has been published: then there is none under this name."""
        self._end_checksums()
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.truncate(self.partial / FILE, 0)  # on a full disk HDF5 needs room to close it
            with contextlib.suppress(Exception):
                self._file.close()
            self._file = None
        if self.partial is not None:
            shutil.rmtree(self.partial, ignore_errors=True)

    def _end_checksums(self) -> None:
        if self.checksums is not None:
            self.checksums.close()
            self.checksums = None

    def _disk(self):
        return on_disk(f"save step {self.step}", self.partial)


def provenance(state: State) -> str:
    """Return the JSON text of what made a checkpoint: versions, mesh, layouts. None of it matters for loading."""
    world = getattr(state.machine, "world", None)
    return json.dumps({
        "mesh_mpi": package_version(), "kernels": kernels_digest(), "python": platform.python_version(), "numpy": np.__version__,
        "h5py": h5py.__version__, "hdf5": h5py.version.hdf5_version, "mpi": world.vendor if world is not None else "simulated",
        "platform": f"{sys.platform} {platform.machine()}", "mesh": repr(state.mesh), "n_ranks": state.mesh.size,
        "programs": {p.name: f"{p.rules_text}; digest {p.digest}" for p in state.programs},
    })


def _forget(path: Path) -> None:
    """Take a file out of the system's cache, so that reading it again reads the disk."""
    if hasattr(os, "posix_fadvise"):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)

"""The HDF5 file of a checkpoint while rank 0 writes it.

HDF5 lays the file out and writes all but the arrays' elements. Those lie contiguous at offsets that it gives out when a dataset is made,
and are written there directly, while threads compute the checksums and bring to disk what was written before.

Invariant: on other ranks every method does nothing; a failure while writing is kept until ``refuse_if_failed``, so that ranks that still
send are served first.
"""

from __future__ import annotations

import contextlib
import json
import platform
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import h5py
import numpy as np

from ..compiler.program import Bound
from ..errors import CheckpointError
from ..runtime.state import State
from ..runtime.versions import kernels_digest, package_version
from .folder import FILE, on_disk
from .format import (CHECKSUM, CONTENTS, FORMAT, FORMAT_VERSION, LIBVER, PROVENANCE, STATE, Dataset, Description, allocate, contents_checksum, label,
                     write_attributes)
from .patient import PatientFile
from .streaming import Checksum, Checksums

SYNC_BYTES = 32 << 20  # written until the disk is asked to begin


class CheckpointFile:
    """``create``, then ``begin``, ``put`` ..., ``end`` for each variable, ``finish``; ``discard`` removes what was not published."""

    def __init__(self, step: int):
        self.step, self.partial, self.checksums = step, None, None
        self._raw: PatientFile | None = None
        self._file: h5py.File | None = None
        self._checksum: Checksum | None = None  # of the variable under way
        self._offset = 0  # in the file, of its next block
        self._syncing, self._unsynced = ThreadPoolExecutor(1, "mesh_mpi sync"), 0
        self._written: list[tuple[Dataset, h5py.Dataset, Checksum]] = []
        self._attributes = {"format": FORMAT, "format_version": FORMAT_VERSION, "step": int(step), "saved_at": time.time()}
        self._fault: CheckpointError | None = None

    def create(self, partial: Path) -> None:
        """Create the file in the folder ``partial``. Raises CheckpointError."""
        self.partial, self.checksums = partial, Checksums()
        with self._disk():
            self._raw = PatientFile(partial / FILE)
            self._file = h5py.File(self._raw, "w", libver=LIBVER)
            write_attributes(self._file, self._attributes)

    def begin(self, path: str, b: Bound) -> None:
        """Start a variable: a dataset with labels and attributes, whose elements have their place in the file."""
        if self._file is None or self._fault is not None:
            return
        dataset = Dataset(path, b.shape, tuple(dim.name for dim in b.dims), np.dtype(b.value.dtype).name,
                          {"dtype": b.value.dtype, "initializer": repr(b.variable.init), "storage_class": b.variable.storage_class})
        try:
            with self._disk():
                item, self._offset = allocate(self._file, dataset)
                label(item, dataset.dims)
                write_attributes(item, dataset.attributes)
        except CheckpointError as fault:
            self._fault = fault
            return
        self._checksum = self.checksums.of(dataset.n_bytes)
        self._written.append((dataset, item, self._checksum))

    def put(self, array: np.ndarray, slot: list) -> None:
        """Write the next block, contiguous; ``slot`` is that of its buffer, and what is in neither must not change before ``finish``."""
        if self._file is None or self._fault is not None or array.size == 0:
            return
        slot[1] = self._checksum.update(array)
        self._raw.write_at(self._offset, array.reshape(-1).view(np.uint8))
        self._offset += array.nbytes
        self._unsynced += array.nbytes
        if self._unsynced >= SYNC_BYTES:
            self._unsynced = 0
            self._syncing.submit(self._raw.begin_sync)

    def end(self) -> None:
        """End a variable."""
        self._checksum = None

    def refuse_if_failed(self) -> None:
        """Raise what failed so far."""
        if self._fault is not None:
            raise self._fault
        if self._raw is not None:
            with self._disk():
                pass

    def finish(self, values: dict, texts: dict[str, str]) -> None:
        """Add checksums, counters and texts, close, bring to disk.

        The checksum over the contents is of what was meant to be written: reading the file again finds what was not.
        """
        for dataset, _, checksum in self._written:
            dataset.attributes[CHECKSUM] = checksum.hexdigest()
        self._end_checksums()
        datasets = [dataset for dataset, *_ in self._written]
        texts[PROVENANCE] = json.dumps({**json.loads(texts[PROVENANCE]), "variables": [d.path for d in datasets]}, indent=1)
        values = {key: np.asarray(value) for key, value in values.items()}
        path = self.partial / FILE
        meant = Description(path, self._attributes, datasets, {key: value.item() for key, value in values.items()}, texts)
        with self._disk():
            for dataset, item, _ in self._written:
                write_attributes(item, {CHECKSUM: dataset.attributes[CHECKSUM]})
            for key, value in values.items():
                self._file.create_dataset(f"{STATE}/{key}", data=value)
            for key, text in texts.items():
                self._file.create_dataset(key, data=text, dtype=h5py.string_dtype())
            write_attributes(self._file, {CONTENTS: contents_checksum(meant)})
            self._close()
            self._raw.sync()
            self._syncing.shutdown()
            self._raw.close()
            self._raw.check()

    def discard(self) -> None:
        """Close and remove the file and its folder, unless it has been published: then there is none under this name."""
        self._end_checksums()
        if self._file is not None:
            with contextlib.suppress(Exception):
                self._close()
        self._syncing.shutdown(cancel_futures=True)
        if self._raw is not None:
            self._raw.close()
        if self.partial is not None:
            shutil.rmtree(self.partial, ignore_errors=True)

    def _close(self) -> None:
        file, self._file = self._file, None
        self._written = []  # HDF5 closes a file with its last object
        file.close()

    def _end_checksums(self) -> None:
        if self.checksums is not None:
            self.checksums.close()
            self.checksums = None

    @contextlib.contextmanager
    def _disk(self):
        with on_disk(f"save step {self.step}", self.partial):
            yield
            if self._raw is not None:
                self._raw.check()


def provenance(state: State) -> str:
    """Return the JSON text of what made a checkpoint: versions, mesh, layouts. None of it matters for loading."""
    world = getattr(state.machine, "world", None)
    return json.dumps({
        "mesh_mpi": package_version(), "kernels": kernels_digest(), "python": platform.python_version(), "numpy": np.__version__,
        "h5py": h5py.__version__, "hdf5": h5py.version.hdf5_version, "mpi": world.vendor if world is not None else "simulated",
        "platform": f"{sys.platform} {platform.machine()}", "mesh": repr(state.mesh), "n_ranks": state.mesh.size,
        "programs": {p.name: f"{p.rules_text}; digest {p.digest}" for p in state.programs},
    })

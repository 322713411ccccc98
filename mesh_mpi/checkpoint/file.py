"""The HDF5 file of a checkpoint while rank 0 writes it.

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
from pathlib import Path

import h5py
import numpy as np

from ..compiler.program import Bound
from ..errors import CheckpointError
from ..runtime.state import State
from ..runtime.versions import kernels_digest, package_version
from .folder import FILE, on_disk
from .format import (CHECKSUM, CONTENTS, FORMAT, FORMAT_VERSION, LIBVER, PROVENANCE, STATE, Dataset, Description, contents_checksum, label,
                     write_attributes)
from .patient import PatientFile
from .streaming import Checksum, Checksums, Slices


class CheckpointFile:
    """``create``, then ``begin``, ``put`` ..., ``end`` for each variable, ``finish``; ``discard`` removes what was not published."""

    def __init__(self, step: int):
        self.step, self.partial, self.checksums = step, None, None
        self._raw: PatientFile | None = None
        self._file: h5py.File | None = None
        self._item: h5py.Dataset | None = None
        self._checksum: Checksum | None = None
        self._written: list[tuple[Dataset, Checksum]] = []
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
        """Start a variable: an empty dataset with labels and attributes."""
        if self._file is None or self._fault is not None:
            return
        dataset = Dataset(path, b.shape, tuple(dim.name for dim in b.dims), np.dtype(b.value.dtype).name,
                          {"dtype": b.value.dtype, "initializer": repr(b.variable.init), "storage_class": b.variable.storage_class})
        try:
            with self._disk():
                self._item = self._file.create_dataset(path, dataset.shape, dataset.dtype)
                label(self._item, dataset.dims)
                write_attributes(self._item, dataset.attributes)
        except CheckpointError as fault:
            self._fault = fault
        self._checksum = self.checksums.of(dataset.n_bytes)
        self._written.append((dataset, self._checksum))

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

    def finish(self, values: dict, texts: dict[str, str]) -> float:
        """Add checksums, counters and texts, close, bring to disk; return the seconds waited for checksums.

        The checksum over the contents is of what was meant to be written: reading the file again finds what was not.
        """
        start = time.perf_counter()
        for dataset, checksum in self._written:
            dataset.attributes[CHECKSUM] = checksum.hexdigest()
        waited_s = time.perf_counter() - start
        self._end_checksums()
        datasets = [dataset for dataset, _ in self._written]
        texts[PROVENANCE] = json.dumps({**json.loads(texts[PROVENANCE]), "variables": [d.path for d in datasets]}, indent=1)
        values = {key: np.asarray(value) for key, value in values.items()}
        path = self.partial / FILE
        meant = Description(path, self._attributes, datasets, {key: value.item() for key, value in values.items()}, texts)
        with self._disk():
            for dataset in datasets:
                write_attributes(self._file[dataset.path], {CHECKSUM: dataset.attributes[CHECKSUM]})
            for key, value in values.items():
                self._file.create_dataset(f"{STATE}/{key}", data=value)
            for key, text in texts.items():
                self._file.create_dataset(key, data=text, dtype=h5py.string_dtype())
            write_attributes(self._file, {CONTENTS: contents_checksum(meant)})
            self._file.close()
            self._file = None
            self._raw.sync()
            self._raw.close()
            self._raw.check()
        return waited_s

    def discard(self) -> None:
        """Close and remove the file and its folder, unless it has been published: then there is none under this name."""
        self._end_checksums()
        if self._file is not None:
            with contextlib.suppress(Exception):
                self._file.close()
            self._file = None
        if self._raw is not None:
            self._raw.close()
        if self.partial is not None:
            shutil.rmtree(self.partial, ignore_errors=True)

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

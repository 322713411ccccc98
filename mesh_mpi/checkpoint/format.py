"""The format: what stands in a checkpoint's HDF5 file, and how it is described without reading the arrays.

Invariant: everything in a file but the arrays' own bytes goes into its attribute ``contents_checksum``, the last thing written, so a
file that was cut short or changed is recognised before any of it is used.

    /                       format, format_version, step, saved_at (seconds since 1970), contents_checksum
    /parameters/NAME        one dataset a variable, global shape, C order, dimension labels;
    /optimizer/NAME           attributes dtype, initializer, storage_class, checksum (SHA-256 of the little-endian bytes)
    /state/COUNTER          scalars: step, seed, and what the training loop counts
    /configuration          text: the resolved YAML
    /provenance             text: JSON of versions, mesh, layout
"""

from __future__ import annotations

import contextlib
import json
import math
from pathlib import Path
from typing import NamedTuple

import h5py
import numpy as np

from ..errors import CheckpointError
from ..keys import text_digest
from .folder import resolve

FORMAT, FORMAT_VERSION = "mesh_mpi checkpoint", 1
TOKENS = "mesh_mpi tokens"
LIBVER = ("earliest", "v110")  # readable by every HDF5 from 1.10 on
STATE, CONFIGURATION, PROVENANCE = "state", "configuration", "provenance"
CHECKSUM, CONTENTS, LABELS = "checksum", "contents_checksum", "DIMENSION_LABELS"


class Dataset(NamedTuple):
    """One array of a file: ``path`` as in HDF5 ("parameters/decoder/w"), global ``shape``, names of its dimensions, ``attributes``."""

    path: str
    shape: tuple[int, ...]
    dims: tuple[str, ...]
    dtype: str
    attributes: dict

    @property
    def group(self) -> str:
        """The group at the top: ``parameters``, ``optimizer``; "" for an array at the top itself."""
        return self.path.split("/")[0] if "/" in self.path else ""

    @property
    def name(self) -> str:
        """The variable's full name."""
        return self.path.split("/", 1)[-1]

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def n_bytes(self) -> int:
        """Bytes of the elements."""
        return self.size * np.dtype(self.dtype).itemsize

    def __str__(self):
        return f"[{', '.join(f'{d}={n}' if d else str(n) for d, n in zip(self.dims, self.shape))}]"


class Description(NamedTuple):
    """What a file says of itself: root ``attributes``, its arrays, the scalars of /state, the texts. ``path`` is the HDF5 file."""

    path: Path
    attributes: dict
    datasets: list[Dataset]
    values: dict[str, int | float]
    texts: dict[str, str]

    @property
    def is_checkpoint(self) -> bool:
        """False for a file of tokens."""
        return self.attributes["format"] == FORMAT


@contextlib.contextmanager
def opened(path: Path):
    """Open an HDF5 file for reading; whatever HDF5 finds wrong with it becomes a CheckpointError that names it."""
    try:
        with h5py.File(path, "r", locking=False) as file:
            yield file
    except CheckpointError:
        raise
    except Exception as error:  # h5py has no one class for a file that makes no sense
        raise CheckpointError(f"checkpoint {path}: it cannot be read, {type(error).__name__}: {error}. Use another checkpoint.") from None


def describe(path) -> Description:
    """Return the description of a checkpoint (its folder or file), of a run's latest, or of a file of tokens. No array is read.

    Communication: none. Raises CheckpointError if it is none of these, of another version, cut short or changed (arrays apart: see verify).
    """
    path = resolve(path)
    with opened(path) as file:
        found = read_description(path, file)
    if not found.is_checkpoint:
        return found
    if CONTENTS not in found.attributes:
        raise CheckpointError(f"checkpoint {path}: it was not finished, the attribute {CONTENTS} is missing. Use another checkpoint.")
    computed = contents_checksum(found)
    if computed != found.attributes[CONTENTS]:
        raise CheckpointError(f"checkpoint {path}: its contents were changed{_missing(found)}: names, shapes, attributes, counters and texts have "
                              f"checksum {computed} and {found.attributes[CONTENTS]} was saved. Use another checkpoint.")
    return found


def _missing(found: Description) -> str:
    """Return which variables the file lacks, by the list in its provenance."""
    try:
        names = json.loads(found.texts[PROVENANCE])["variables"]
        lost = sorted(set(names) - {d.path for d in found.datasets})
    except (KeyError, TypeError, ValueError):
        return ""
    return f", {', '.join(lost)} {'are' if len(lost) > 1 else 'is'} missing" if lost else ""


def read_description(path: Path, file: h5py.File) -> Description:
    """Describe an open file, whole or not. Raises CheckpointError for another format or version."""
    attributes = read_attributes(file)
    kind, version = attributes.get("format"), attributes.get("format_version")
    if kind not in (FORMAT, TOKENS):
        raise CheckpointError(f"checkpoint {path}: its format is {kind!r} and not {FORMAT!r} or {TOKENS!r}. Give a file that mesh-mpi wrote.")
    if kind == FORMAT and version != FORMAT_VERSION:
        raise CheckpointError(f"checkpoint {path}: format_version is {version} and this mesh_mpi reads {FORMAT_VERSION}. "
                              "Use the version of mesh_mpi that wrote it.")
    datasets: list[Dataset] = []
    values, texts = {}, {}

    def visit(name: str, item) -> None:
        if not isinstance(item, h5py.Dataset):
            return
        if h5py.check_string_dtype(item.dtype) is not None:
            texts[name] = item.asstr()[()]
        elif name.startswith(STATE + "/"):
            values[name.split("/", 1)[1]] = item[()].item()
        else:
            found = read_attributes(item)
            labels = found.pop(LABELS, [""] * item.ndim)
            datasets.append(Dataset(name, item.shape, tuple(labels), item.dtype.name, found))

    file.visititems(visit)
    return Description(path, attributes, datasets, values, texts)


def contents_checksum(found: Description) -> str:
    """Return the digest of a description: names, shapes, labels, element types, attributes (each array's checksum too), counters, texts."""
    lines = [f"{k}={v!r}" for k, v in sorted(found.attributes.items()) if k != CONTENTS]
    lines += [f"{d.path} {d} {d.dtype} {sorted(d.attributes.items())!r}" for d in sorted(found.datasets)]
    lines += [f"{k}={v!r}" for k, v in sorted(found.values.items())]
    lines += [f"{k}={v}" for k, v in sorted(found.texts.items())]
    return text_digest(*(line.encode(errors="backslashreplace").decode() for line in lines))  # damaged texts may not encode


def read_configuration(path) -> str:
    """Return the resolved YAML that a checkpoint was saved with. Communication: none. Raises CheckpointError."""
    found = describe(path)
    if CONFIGURATION not in found.texts:
        raise CheckpointError(f"checkpoint {path}: {found.path} is a {found.attributes['format']} file and holds no configuration. Give a checkpoint.")
    return found.texts[CONFIGURATION]


def saved_at(path: Path) -> float:
    """Return when a checkpoint's file was saved, in seconds since 1970: what it says, or else the file system."""
    try:
        with opened(path) as file:
            return float(file.attrs["saved_at"])
    except CheckpointError:
        return next((p.stat().st_mtime for p in (path, path.parent) if p.exists()), 0.0)


def read_attributes(item) -> dict:
    """Return the attributes of an object as numbers, texts, and lists of texts."""
    found = {}
    for i in range(h5py.h5a.get_num_attrs(item.id)):
        attribute = h5py.h5a.open(item.id, index=i)
        name, dtype = attribute.name.decode(), attribute.dtype
        if dtype.kind == "O" or attribute.shape:  # few of these: the slower, general way
            value = item.attrs[name]
            found[name] = value.tolist() if isinstance(value, np.ndarray) else value
            continue
        value = np.zeros((), dtype)
        attribute.read(value)
        found[name] = value.item().decode() if dtype.kind == "S" else value.item()
    return found


def allocate(file: h5py.File, dataset: Dataset) -> tuple[h5py.Dataset, int]:
    """Make a dataset, and groups on its path, with its elements' place in the file; return it and the place's offset.

    The elements are not written. (``create_dataset`` takes twice as long.)
    """
    links = h5py.h5p.create(h5py.h5p.LINK_CREATE)
    links.set_create_intermediate_group(True)
    links.set_char_encoding(h5py.h5t.CSET_UTF8)
    creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    creation.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    creation.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    creation.set_obj_track_times(False)
    space = h5py.h5s.create_simple(dataset.shape) if dataset.shape else h5py.h5s.create(h5py.h5s.SCALAR)
    item = h5py.h5d.create(file.id, dataset.path.encode(), h5py.h5t.py_create(np.dtype(dataset.dtype)), space, creation, links)
    return h5py.Dataset(item), item.get_offset() if dataset.size else 0


def write_attributes(item, attributes: dict[str, int | float | str]) -> None:
    """Add attributes: texts of fixed length, integers of 64 bits, floats. (``item.attrs`` takes 5 times as long: 0.2 s for 160 variables.)"""
    for name, value in attributes.items():
        raw = np.array(value.encode() if isinstance(value, str) else value)
        kind = h5py.h5t.py_create(raw.dtype, logical=True)
        if isinstance(value, str):
            kind.set_cset(h5py.h5t.CSET_UTF8)
        h5py.h5a.create(item.id, name.encode(), kind, h5py.h5s.create(h5py.h5s.SCALAR)).write(raw, mtype=kind)


def label(item, names: tuple[str, ...]) -> None:
    """Name the dimensions of a dataset as HDF5's dimension labels."""
    if names:
        dtype = h5py.string_dtype("ascii")
        kind = h5py.h5t.py_create(dtype, logical=True)
        attribute = h5py.h5a.create(item.id, LABELS.encode(), kind, h5py.h5s.create_simple((len(names),)))
        attribute.write(np.array(names, dtype), mtype=h5py.h5t.py_create(dtype))

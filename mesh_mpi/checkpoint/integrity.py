"""Is a checkpoint whole? Every array is read again and its checksum compared with the one that was computed while it was written.

Invariant: nothing is believed for its name; a checkpoint passes only if its description and each array's bytes have their checksums.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import h5py
import numpy as np

from ..errors import CheckpointError
from ..runtime.agreement import on_every_rank, on_rank_0
from .format import CHECKSUM, Dataset, Description, describe, opened
from .streaming import Checksums, blocks, extent

ROUND_BYTES = 1 << 30  # read by a rank between two signs of life


def verify(path, machine=None) -> Description:
    """Read a checkpoint (its folder, its file, or a run's latest) once and return its description.

    Comm    with ``machine``, collective: ranks share the arrays; without, this process reads them all.
    Raises  CheckpointError, alike on every rank, naming every array that is damaged.
    """
    if machine is None:
        description = describe(path)
        _refuse(description, damaged(description, _arrays(description)))
        return description
    description = on_rank_0(machine, f"checkpoint {path}", lambda: describe(path))
    verify_arrays(machine, description, machine.n_ranks if not machine.is_simulated else 1)
    return description


def verify_arrays(machine, description: Description, n_readers: int) -> None:
    """Read every array on the first ``n_readers`` ranks; as :func:`verify`."""
    faults: list[str] = []
    for batch in _batches(_arrays(description), n_readers * ROUND_BYTES):
        mine = _share(batch, machine.rank, n_readers)
        found = on_every_rank(machine, f"checkpoint {description.path}", lambda mine=mine: damaged(description, mine) if mine else [])
        faults += [fault for one in machine.gather_objects(found) for fault in one]
    _refuse(description, faults)


def damaged(description: Description, datasets: Sequence[Dataset]) -> list[str]:
    """Read arrays and return a sentence about each that is damaged. Communication: none."""
    faults: list[str] = []
    with opened(description.path) as file, Checksums() as checksums:
        pending = []
        for dataset in datasets:
            checksum = checksums.of(dataset.n_bytes)
            try:
                for array, slot in _read(file[dataset.path], dataset, checksums):
                    slot[1] = checksum.update(array)
                pending.append((dataset, checksum))
            except Exception as error:  # h5py has no one class for it
                faults.append(f"{dataset.path} cannot be read ({error})")
        for dataset, checksum in pending:
            computed = checksum.hexdigest()
            if computed != dataset.attributes.get(CHECKSUM):
                faults.append(f"{dataset.path}{dataset} has checksum {computed} and {dataset.attributes.get(CHECKSUM)} was saved")
    return faults


def _read(item: h5py.Dataset, dataset: Dataset, checksums: Checksums) -> Iterator[tuple[np.ndarray, list]]:
    for block in blocks(dataset.shape, np.dtype(dataset.dtype).itemsize):
        array, slot = checksums.buffer(extent(block), item.dtype)
        if block:
            item.read_direct(array, block)
        else:
            array[...] = item[()]
        yield array, slot


def _refuse(description: Description, faults: list[str]) -> None:
    if faults:
        raise CheckpointError(f"checkpoint {description.path}: {len(faults)} of {len(description.datasets)} arrays are damaged: "
                              f"{'; '.join(faults)}. Use another checkpoint.")


def _arrays(description: Description) -> list[Dataset]:
    return description.datasets if description.is_checkpoint else []  # a file of tokens has no checksums


def _batches(datasets: Sequence[Dataset], n_bytes: int) -> Iterator[list[Dataset]]:
    batch, total = [], 0
    for dataset in datasets:
        batch.append(dataset)
        total += dataset.n_bytes
        if total >= n_bytes:
            yield batch
            batch, total = [], 0
    if batch:
        yield batch


def _share(datasets: Sequence[Dataset], rank: int, n_readers: int) -> list[Dataset]:
    """Return what one rank reads: the largest arrays first, each to the rank with the least so far."""
    shares: list[list[Dataset]] = [[] for _ in range(n_readers)]
    loads = [0] * n_readers
    for dataset in sorted(datasets, key=lambda d: (-d.n_bytes, d.path)):
        least = loads.index(min(loads))
        shares[least].append(dataset)
        loads[least] += dataset.n_bytes
    return shares[rank] if rank < n_readers else []

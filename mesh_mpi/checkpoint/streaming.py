"""Arrays in bounded blocks, and checksums of them on threads.

Invariant: blocks of an array follow one another in C order and each is contiguous in it, so that a checksum over blocks is the
checksum of the whole array's little-endian bytes.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

BLOCK_BYTES = 8 << 20
N_BUFFERS = 4  # blocks under way at once
MAX_THREADS = 4

Slices = tuple[slice, ...]


def blocks(shape: Sequence[int], itemsize: int, block_bytes: int = 0) -> Iterator[Slices]:
    """Yield index ranges that cover an array of ``shape`` in C order, each of at most ``block_bytes`` (default BLOCK_BYTES) or one element."""
    limit = max(1, (block_bytes or BLOCK_BYTES) // itemsize)
    split = 0  # the first dimension of whose rows several fit
    while split < len(shape) and math.prod(shape[split + 1:]) > limit:
        split += 1
    if split >= len(shape):
        yield from (tuple(slice(i, i + 1) for i in index) for index in itertools.product(*map(range, shape)))
        return
    rows = max(1, limit // math.prod(shape[split + 1:]))
    rest = tuple(slice(0, n) for n in shape[split + 1:])
    for index in itertools.product(*map(range, shape[:split])):
        for start in range(0, shape[split], rows):
            yield (*(slice(i, i + 1) for i in index), slice(start, min(shape[split], start + rows)), *rest)


def overlap(a: Slices, b: Slices) -> Slices | None:
    """Return the common index range, or None if there is none."""
    common = tuple(slice(max(x.start, y.start), min(x.stop, y.stop)) for x, y in zip(a, b))
    return common if all(s.start < s.stop for s in common) else None


def within(part: Slices, whole: Slices) -> Slices:
    """Return ``part`` counted from the start of ``whole``."""
    return tuple(slice(p.start - w.start, p.stop - w.start) for p, w in zip(part, whole))


def extent(slices: Slices) -> tuple[int, ...]:
    """Return the shape of an index range."""
    return tuple(s.stop - s.start for s in slices)


class Checksum:
    """The SHA-256 of one array, block by block in order, computed on a thread."""

    def __init__(self, pool: ThreadPoolExecutor):
        self._hash, self._pool, self._last = hashlib.sha256(), pool, None  # in hardware on most processors: twice as fast as blake2b

    def update(self, array: np.ndarray) -> Future:
        """Count the next block, contiguous; it must not change before the future returned is done."""
        self._last = self._pool.submit(self._hash.update, memoryview(array.reshape(-1).view(np.uint8)))
        return self._last

    def hexdigest(self) -> str:
        """Wait for the blocks and return 64 hexadecimal digits."""
        if self._last is not None:
            self._last.result()
        return self._hash.hexdigest()


class Checksums:
    """Checksums of several arrays at once, on as many threads as this process has cores (4 at most), and buffers for blocks."""

    def __init__(self):
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._pools = [ThreadPoolExecutor(1, "mesh_mpi checksum") for _ in range(max(1, min(MAX_THREADS, cores)))]
        self._load = [0] * len(self._pools)
        self._buffers: list[list] = []  # [memory, the future of its last use], the longest unused first

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self) -> None:
        """End the threads; what they have not begun is dropped."""
        for pool in self._pools:
            pool.shutdown(wait=True, cancel_futures=True)

    def of(self, n_bytes: int) -> Checksum:
        """Start the checksum of an array of ``n_bytes``, on the thread with the least to do."""
        i = self._load.index(min(self._load))
        self._load[i] += n_bytes
        return Checksum(self._pools[i])

    def buffer(self, shape: Sequence[int], dtype) -> tuple[np.ndarray, list]:
        """Return an array for one block and its slot; set ``slot[1]`` to the future of its checksum before asking for the next."""
        n_bytes = math.prod(shape) * np.dtype(dtype).itemsize
        if len(self._buffers) < N_BUFFERS:
            slot = [np.empty(max(n_bytes, BLOCK_BYTES), np.uint8), None]
        else:
            slot = self._buffers.pop(0)
            if slot[1] is not None:
                slot[1].result()
            if slot[0].size < n_bytes:
                slot[0] = np.empty(n_bytes, np.uint8)
        self._buffers.append(slot)
        return slot[0][:n_bytes].view(dtype).reshape(shape), slot

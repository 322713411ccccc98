"""What every kernel promises: shapes, scratch, aliasing, flops, bytes and error, in pure Python.

A kernel is a factory ``KERNELS[name](outs, ins, scratch, **params) -> call``. ``outs`` and ``ins`` are tuples of
arrays, bound once; ``scratch`` is a 64-byte aligned uint8 array of exactly ``scratch_bytes`` bytes, or None when that
is 0; ``call()`` does the work and allocates nothing of size. The texts in ``doc`` use these suffixes:

    R rows   D normalised or embedded size   V local vocabulary   B batch   H heads
    T query length   S memory length   K per-head size   M, N, K the sizes of a matrix product
"""

from __future__ import annotations

from .contracts import attention, elementwise, movement, products, rows, updates
from .contracts.base import BLOCK_BYTES, KernelContract, Piece, itemsize

KERNELS: dict[str, KernelContract] = {
    contract.name: contract
    for family in (elementwise, movement, products, rows, attention, updates)
    for contract in family.CONTRACTS
}

__all__ = ["BLOCK_BYTES", "KERNELS", "KernelContract", "Piece", "itemsize"]

"""The memory of one rank: an arena for everything a program makes, and the variables.

Invariant: every buffer starts at a multiple of 64 bytes and every page of it was touched before the first run.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..compiler.memory import MemoryPlan
from ..errors import MeshMpiError
from ..spmd.value import ITEMSIZE, Value

ALIGN = 64


def allocate(n_bytes: int) -> np.ndarray:
    """Return ``n_bytes`` zero bytes, 64-byte aligned. The one place where the runtime takes memory, so that it can be pinned."""
    try:
        raw = np.empty(max(n_bytes, 1) + ALIGN, np.uint8)
    except (MemoryError, ValueError):  # ValueError: more bytes than an address has
        raise MeshMpiError(f"state: {n_bytes / 2**30:.2f} GiB could not be allocated on a rank. Use more ranks, split more "
                           "dimensions, or make the batch smaller.") from None
    start = -raw.ctypes.data % ALIGN
    block = raw[start:start + max(n_bytes, 1)]
    block.fill(0)  # touches every page now rather than within a step
    return block


class Memory:
    """The buffers of the rank at ``coordinate``; turns the program's values into arrays."""

    def __init__(self, coordinate: dict[str, int], arena: np.ndarray, variables: dict[str, np.ndarray]):
        self.coordinate, self.arena, self.variables = coordinate, arena, variables

    def _place(self, plan: MemoryPlan, value: Value) -> tuple[np.ndarray, int]:
        name, start = plan.address(value.root)
        return (self.variables[name] if name else self.arena), start + value.offset.at(self.coordinate) * ITEMSIZE[value.dtype]

    def view(self, plan: MemoryPlan, value: Value) -> np.ndarray:
        """Return the array that ``value`` is on this rank: [value.shape], strided, no copy."""
        buffer, offset = self._place(plan, value)
        item = ITEMSIZE[value.dtype]
        return np.ndarray(value.shape, value.dtype, buffer, offset, tuple(s * item for s in value.strides))

    def flat(self, plan: MemoryPlan, values: Sequence[Value]) -> np.ndarray:
        """Return contiguous values that lie one behind the other as one array [number of all elements].

        A plan that did not lay them so is a fault of the compiler, found here before anything runs.
        """
        buffer, offset = self._place(plan, values[0])
        end, item = offset, ITEMSIZE[values[0].dtype]
        for value in values:
            there, at = self._place(plan, value)
            assert there is buffer and at == end and value.dtype == values[0].dtype and value.is_contiguous, \
                f"grouped reduction: a member lies at byte {at}, not {end}"
            end += value.n_bytes
        return np.ndarray(((end - offset) // item,), values[0].dtype, buffer, offset)

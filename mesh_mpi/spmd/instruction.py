"""Instructions: kernels and collectives, one flat kind of thing.

Invariant: an instruction says everything that running, costing and listing it needs; it holds
values and plain parameters, never arrays or ranks.
"""

from __future__ import annotations

from typing import Any

from .value import Value

COLLECTIVES = ("allreduce", "reduce_scatter", "allgather", "alltoall", "swap")


class Instruction:
    """``name(outputs; inputs; params)``.

    A kernel has ``axes == ()``; ``scratch`` is a byte value or None; ``n_flops`` and ``n_bytes`` are its cost on one rank.
    A collective runs over the mesh ``axes``: ``payload_bytes`` is the size of the larger buffer that is passed,
    ``wire_bytes`` what one rank sends in a ring. ``params["reduce"]`` is ``sum`` or ``max``.
    An ``allreduce`` may have several outputs, each in place of its input: a group that lies adjacent in memory.
    """

    __slots__ = ("name", "outputs", "inputs", "params", "origin", "axes", "scratch", "n_flops", "n_bytes",
                 "payload_bytes", "wire_bytes", "note")

    def __init__(self, name: str, outputs, inputs, params: dict[str, Any] | None = None, origin: str = "", axes=(), note: str = ""):
        self.name, self.outputs, self.inputs = name, tuple(outputs), tuple(inputs)
        self.params, self.origin, self.axes, self.note = params or {}, origin, tuple(axes), note
        self.scratch: Value | None = None
        self.n_flops = self.n_bytes = self.payload_bytes = self.wire_bytes = 0

    @property
    def is_collective(self) -> bool:
        """True for an instruction that every rank of a group must reach."""
        return bool(self.axes)

    def __repr__(self):
        return f"{self.name}({', '.join(str(v.number) for v in self.outputs)}; {', '.join(str(v.number) for v in self.inputs)})"


def wire_bytes(name: str, payload_bytes: int, n: int) -> int:
    """Return what one of ``n`` ranks sends for a collective, by the ring algorithm (a swap sends its buffer once)."""
    if name == "allreduce":
        return 2 * payload_bytes * (n - 1) // n
    if name == "swap":
        return payload_bytes
    return payload_bytes * (n - 1) // n

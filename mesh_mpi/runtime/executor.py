"""Binding: a program and the memory of the ranks in this process become a flat list of calls.

Invariant: everything that depends on shapes, addresses or coordinates happens here, once; a run is
``for call in calls: call()`` and allocates nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from ..compiler.listing import instruction_text
from ..compiler.program import Program, offset_at
from ..errors import MeshMpiError, nearest
from ..spmd.instruction import Instruction
from .memory import Memory

Call = Callable[[], object]
POISON = 0xFF  # a NaN in every width of float, -1 in every signed integer


def bind(program: Program, machine, memories: Sequence[Memory], poison: bool = False) -> tuple[Call, ...]:
    """Return the calls of one run, in order; ``memories`` are those of the ranks that ``machine`` has in this process.

    All ranks of this process take an instruction before any takes the next. With ``poison``, each block of the arena is
    overwritten right after the last instruction that needs it, so that a premature end shows as NaN.
    """
    from ..kernels.cpu import KERNELS

    ends = _ends(program) if poison else {}
    numbers: dict[int, int] = {}
    for bound in (*program.feeds.values(), *program.variables.values()):
        numbers.setdefault(bound.value.root.number, len(numbers))
    calls: list[Call] = []
    for position, instruction in enumerate(program.instructions):
        text = instruction_text(instruction, numbers)
        if instruction.is_collective:
            calls.append(_collective(program, instruction, machine, memories, f"{program.name}, instruction {position}: {text}"))
        else:
            calls += [_kernel(program, instruction, memory, KERNELS) for memory in memories]
        calls += [partial(memory.arena[b.offset:b.offset + b.size].fill, POISON) for b in ends.get(position, ()) for memory in memories]
    return tuple(calls)


def _kernel(program: Program, instruction: Instruction, memory: Memory, kernels) -> Call:
    factory = kernels.get(instruction.name)
    if factory is None:
        raise MeshMpiError(f"{instruction.origin}: the kernel {instruction.name!r} does not exist for this device.{nearest(instruction.name, kernels)}")
    outs = tuple(memory.view(program.plan, v) for v in instruction.outputs)
    ins = tuple(memory.view(program.plan, v) for v in instruction.inputs)
    scratch = None if instruction.scratch is None else memory.view(program.plan, instruction.scratch)
    params = {key: offset_at(value, memory.coordinate) for key, value in instruction.params.items()}
    return factory(outs, ins, scratch, **params)


def _collective(program: Program, instruction: Instruction, machine, memories: Sequence[Memory], label: str) -> Call:
    outs = [memory.flat(program.plan, instruction.outputs) for memory in memories]
    ins = [memory.flat(program.plan, instruction.inputs) for memory in memories]
    return machine.bind(instruction.name, instruction.axes, outs, ins, instruction.params.get("reduce", ""), label)


def _ends(program: Program) -> dict[int, list]:
    """Return the blocks of the arena by the last instruction that needs them; those alive at the end of the program are left out."""
    ends: dict[int, list] = {}
    for block in program.plan.blocks:
        if not block.variable and block.end < len(program.instructions):
            ends.setdefault(block.end, []).append(block)
    return ends


def execute(calls: tuple[Call, ...]) -> None:
    """Run the calls in order, floating-point warnings off: an overflow is a value here, and updates look for it themselves."""
    with np.errstate(all="ignore"):
        for call in calls:
            call()

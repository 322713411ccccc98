"""Faulty copies of programs: one collective removed, or done twice.

Invariant: the program itself is left as it is; the copies are to be run without poison.
"""

from __future__ import annotations

import copy
import math

from mesh_mpi.spmd.instruction import Instruction
from mesh_mpi.spmd.value import Offset


def collectives_of(program) -> list[int]:
    """Return the positions of the collectives of a program."""
    return [i for i, instruction in enumerate(program.instructions) if instruction.is_collective]


def replaced(program, position: int, instructions: list[Instruction]):
    """Return a copy of a program with other instructions in place of one."""
    changed = copy.copy(program)
    changed.instructions = [*program.instructions[:position], *instructions, *program.instructions[position + 1:]]
    return changed


def removed(program, position: int):
    """Return a copy in which each rank keeps its own operand where it should have communicated."""
    instruction = program.instructions[position]
    return replaced(program, position, _local(program, instruction))


def doubled(program, position: int):
    """Return a copy in which a sum is taken twice, so that it comes out multiplied by the number of ranks, and anything else is done twice."""
    instruction = program.instructions[position]
    n = math.prod(program.mesh.axes[a] for a in instruction.axes)
    if instruction.params.get("reduce") == "sum":
        return replaced(program, position, [instruction, *(_scaled(v, n) for v in instruction.outputs)])
    return replaced(program, position, [instruction, instruction])


def _scaled(v, factor: int) -> Instruction:
    return Instruction("elementwise", [v], [v], {"steps": (("mul", (("i", 0), ("c", factor)), ("o", 0)),), "temp_dtypes": (),
                                                 "in_dtypes": (v.dtype,), "out_dtypes": (v.dtype,)}, "planted")


def _local(program, instruction: Instruction) -> list[Instruction]:
    if instruction.name in ("allreduce", "alltoall", "swap"):
        return [Instruction("copy", [out], [source], {}, "planted") for out, source in zip(instruction.outputs, instruction.inputs)
                if program.plan.address(out.root) != program.plan.address(source.root)]
    out, source = instruction.outputs[0], instruction.inputs[0]
    n = math.prod(program.mesh.axes[a] for a in instruction.axes)
    if instruction.name == "reduce_scatter":
        terms, block = [], out.size * n
        for axis in instruction.axes:
            block //= program.mesh.axes[axis]
            terms.append((axis, block))
        return [Instruction("copy", [out], [source.view(out.shape, out.strides, source.offset + Offset(0, tuple(terms)))], {}, "planted")]
    assert instruction.name == "allgather", instruction.name
    return [Instruction("copy", [out.view(source.shape, source.strides, out.offset + i * source.size)], [source], {}, "planted") for i in range(n)]

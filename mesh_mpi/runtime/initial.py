"""The program that gives variables their first values.

Invariant: a value depends on the seed, the variable's full name and the element's global position only, so
every mesh and layout starts from the same bits.
"""

from __future__ import annotations

from ..compiler.memory import plan_memory
from ..compiler.program import Bound, Program
from ..graph.variable import Accumulator
from ..kernels import contract
from ..keys import name_key
from ..mesh import Mesh
from ..spmd.builder import Builder
from ..spmd.instruction import Instruction
from ..spmd.placement import Placement
from ..spmd.value import Value


def initial_program(mesh: Mesh, variables: dict[str, Bound]) -> Program:
    """Return the program ``initialize``: one kernel a variable, no communication. Accumulators start as zeros and are left out.

    It has one feed, the scalar ``seed`` (uint64).
    """
    seed = Value((), "uint64", kind="feed", name="seed")
    builder = Builder(mesh, None)
    filled = {name: b for name, b in variables.items() if not isinstance(b.variable, Accumulator)}
    instructions = []
    for name, b in filled.items():
        init = {"kind": b.variable.init.kind, **b.variable.init.numbers}
        start = tuple(builder.start(dim, b.placement.axes_of(dim.name)) for dim in b.dims)
        instruction = Instruction("initialize", [b.value], [seed],
                                  {"init": init, "name_key": name_key(name), "global_shape": b.shape, "start": start}, name)
        n = contract.KERNELS["initialize"].scratch_bytes([b.value.shape], [()], b.value.dtype, instruction.params)
        instruction.scratch = Value([n], "uint8") if n else None
        instructions.append(instruction)
    plan, instructions = plan_memory(instructions, [b.value for b in filled.values()], [seed], [], [])
    feeds = {"seed": Bound("seed", seed, (), Placement())}
    return Program("initialize", mesh, feeds, {}, filled, tuple(filled), instructions, plan, {}, [], [], "initial values")

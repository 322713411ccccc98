"""Passes over the flat list of instructions: dead code, fusion of pointwise chains, early updates.

Invariant: each root is written by exactly one instruction, and no pass is worse than O(n log n).
"""

from __future__ import annotations

from ..spmd.instruction import Instruction
from ..spmd.value import Value

FUSION_DISTANCE = 16  # a pointwise result waits at most this many instructions for its one reader
FUSION_STEPS = 16


def without_dead(instructions: list[Instruction], live_values) -> list[Instruction]:
    """Drop every instruction none of whose outputs is read."""
    live = {v.root.number for v in live_values}
    kept = []
    for instruction in reversed(instructions):
        if any(v.root.number in live for v in instruction.outputs):
            live.update(v.root.number for v in instruction.inputs)
            kept.append(instruction)
    return kept[::-1]


def readers(instructions: list[Instruction]) -> dict[int, list[int]]:
    """Return the positions of the instructions that read each root."""
    found: dict[int, list[int]] = {}
    for position, instruction in enumerate(instructions):
        for number in dict.fromkeys(v.root.number for v in instruction.inputs):
            found.setdefault(number, []).append(position)
    return found


def fuse_pointwise(instructions: list[Instruction], live_values) -> list[Instruction]:
    """Merge a pointwise kernel into the one pointwise kernel that reads its result, so that the result stays in cache."""
    reads = readers(instructions)
    live = {v.root.number for v in live_values}
    result: list[Instruction | None] = list(instructions)
    for position, first in enumerate(instructions):
        if first.name != "elementwise" or len(first.outputs) != 1:
            continue
        first = result[position]
        root = first.outputs[0].root
        users = reads.get(root.number, [])
        if len(users) != 1 or root.number in live or users[0] - position > FUSION_DISTANCE:
            continue
        second = result[users[0]]
        if second.name == "elementwise" and _fusable(first, second, root):
            result[users[0]] = _fused(first, second, root)
            result[position] = None
    return [x for x in result if x is not None]


def _fusable(first: Instruction, second: Instruction, root: Value) -> bool:
    out = first.outputs[0]
    if out.shape != second.outputs[0].shape or len(first.params["steps"]) + len(second.params["steps"]) > FUSION_STEPS:
        return False
    return all(v.root is not root or (v.shape == out.shape and v.strides == out.strides) for v in second.inputs)


def _fused(first: Instruction, second: Instruction, root: Value) -> Instruction:
    inputs: list[Value] = []

    def slot(v: Value) -> int:
        for i, u in enumerate(inputs):
            if u is v or (u.root is v.root and u.strides == v.strides and u.offset is v.offset and u.shape == v.shape):
                return i
        inputs.append(v)
        return len(inputs) - 1

    first_slots = [slot(v) for v in first.inputs]
    second_slots = [None if v.root is root else slot(v) for v in second.inputs]
    n_first = len(first.params["temp_dtypes"])
    temp_dtypes = (*first.params["temp_dtypes"], first.outputs[0].dtype, *second.params["temp_dtypes"])

    def of_first(ref):
        return {"i": lambda: ("i", first_slots[ref[1]]), "o": lambda: ("t", n_first), "t": lambda: ref, "c": lambda: ref}[ref[0]]()

    def of_second(ref):
        if ref[0] == "i":
            return ("t", n_first) if second_slots[ref[1]] is None else ("i", second_slots[ref[1]])
        return ("t", n_first + 1 + ref[1]) if ref[0] == "t" else ref

    steps = tuple((fn, tuple(map(of_first, srcs)), of_first(dst)) for fn, srcs, dst in first.params["steps"])
    steps += tuple((fn, tuple(map(of_second, srcs)), of_second(dst)) for fn, srcs, dst in second.params["steps"])
    return Instruction("elementwise", second.outputs, inputs, {
        "steps": steps, "temp_dtypes": temp_dtypes, "in_dtypes": tuple(v.dtype for v in inputs),
        "out_dtypes": second.params["out_dtypes"]}, second.origin)


def early_reductions(instructions: list[Instruction]) -> list[Instruction]:
    """Move each allreduce(sum), and a pointwise kernel made for it alone, to right behind what makes their operands, so that neighbours can be grouped."""
    reads = readers(instructions)
    producer: dict[int, float] = {}
    keys = []
    for position, instruction in enumerate(instructions):
        key = float(position)
        if _is_sum(instruction) or (instruction.name == "elementwise" and len(instruction.outputs) == 1 and all(
                _is_sum(instructions[p]) for p in reads.get(instruction.outputs[0].root.number, [position]))):
            key = max((producer[v.root.number] for v in instruction.inputs if v.root.number in producer), default=key - 0.5) + 0.5
        for v in instruction.outputs:
            producer[v.root.number] = key
        keys.append((key, position))
    return [instructions[position] for _, position in sorted(keys)]


def _is_sum(instruction: Instruction) -> bool:
    return instruction.name == "allreduce" and instruction.params["reduce"] == "sum"


def early_updates(instructions: list[Instruction], updates) -> list[Instruction]:
    """Move each instruction that makes a variable's new value to where its operands are ready and the old value is read no more.

    Gradients then die as soon as they are applied, instead of all living to the end.
    """
    producer: dict[int, int] = {}
    for position, instruction in enumerate(instructions):
        for v in instruction.outputs:
            producer[v.root.number] = position
    reads = readers(instructions)
    written = {new.root.number: variable.root.number for variable, new in updates}
    keys: list[tuple[float, int]] = []
    placed: dict[int, float] = {}
    for position, instruction in enumerate(instructions):
        key = float(position)
        variables = [written[v.root.number] for v in instruction.outputs if v.root.number in written]
        if variables and not instruction.is_collective:
            after = [placed[producer[v.root.number]] for v in instruction.inputs if v.root.number in producer]
            after += [placed[p] for number in variables for p in reads.get(number, ()) if p < position]
            later = [p for number in variables for p in reads.get(number, ()) if p > position]
            if not later:
                key = max(after, default=-1.0) + 0.5
        placed[position] = key
        keys.append((key, position))
    return [instructions[position] for _, position in sorted(keys)]

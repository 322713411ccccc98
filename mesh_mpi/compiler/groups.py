"""Grouped reductions: allreduces over the same axes become one, in place, over adjacent memory.

Invariant: a group ends before the first instruction that reads a member, and at a size bound, so
grouping delays no one and gradients need not all stay alive.
"""

from __future__ import annotations

from ..spmd.instruction import Instruction, wire_bytes

GROUP_BYTES = 32 << 20


def group_reductions(instructions: list[Instruction], extent, bound: int = GROUP_BYTES, live_values=()) -> list[Instruction]:
    """Gather allreduce(sum) instructions over the same axes and element type into groups of at least two; ``live_values`` are needed at the end."""
    n_readers: dict[int, int] = {v.root.number: 1 for v in live_values}
    reduced = {v.root.number for i in instructions if i.name == "allreduce" for v in i.outputs}  # may lie in a group already
    for instruction in instructions:
        for v in instruction.inputs:
            n_readers[v.root.number] = n_readers.get(v.root.number, 0) + 1
    result: list[Instruction] = []
    groups: dict[tuple, list[Instruction]] = {}
    member: dict[int, tuple] = {}

    def close(key):
        members = groups.pop(key)
        for m in members:
            for v in m.outputs:
                member.pop(v.root.number, None)
        result.append(members[0] if len(members) == 1 else _group(members, extent))

    for instruction in instructions:
        for number in [v.root.number for v in instruction.inputs]:
            if number in member:
                close(member[number])
        if not _groupable(instruction, n_readers) or instruction.inputs[0].root.number in reduced:
            result.append(instruction)
            continue
        key = (instruction.axes, instruction.outputs[0].dtype)
        if key in groups and sum(m.payload_bytes for m in groups[key]) + instruction.payload_bytes > bound:
            close(key)
        groups.setdefault(key, []).append(instruction)
        member[instruction.outputs[0].root.number] = key
    for key in list(groups):
        close(key)
    return result


def _groupable(instruction: Instruction, n_readers: dict[int, int]) -> bool:
    """Only sums whose operand nobody else reads are reduced in place in a group."""
    return (instruction.name == "allreduce" and instruction.params["reduce"] == "sum" and instruction.inputs[0].root.kind == "temporary"
            and n_readers[instruction.inputs[0].root.number] == 1)


def _group(members: list[Instruction], extent) -> Instruction:
    members = sorted(members, key=lambda m: -m.payload_bytes)  # large ones first keeps them aligned; sorted() is stable
    group = Instruction("allreduce", [v for m in members for v in m.outputs], [v for m in members for v in m.inputs],
                        dict(members[0].params), f"{members[0].origin} and {len(members) - 1} more", members[0].axes)
    group.payload_bytes = sum(m.payload_bytes for m in members)
    group.wire_bytes = wire_bytes("allreduce", group.payload_bytes, extent(group.axes))
    return group

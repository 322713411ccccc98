"""The memory plan: one arena, laid out by liveness.

Invariant: two blocks overlap in the arena only if they are never alive at the same instruction; an
output takes an input's place only where the kernel's contract allows it and nobody reads that input again.
"""

from __future__ import annotations

import bisect

from ..kernels import contract
from ..spmd.instruction import Instruction
from ..spmd.value import ITEMSIZE, Value

ALIGN = 64


class Block:
    """A piece of the arena (or of a variable): ``start``..``end`` are the first and last instruction that need it.

    ``is_group``: it holds the members of a grouped reduction side by side.
    """

    __slots__ = ("size", "start", "end", "offset", "variable", "is_group")

    def __init__(self, size: int, start: int, end: int, variable: str = ""):
        self.size, self.start, self.end, self.variable = size, start, end, variable
        self.offset, self.is_group = -1, False


class MemoryPlan:
    """Where each root lies: ``place[root number] = (block, byte offset within it)``."""

    def __init__(self):
        self.place: dict[int, tuple[Block, int]] = {}
        self.roots: dict[Block, list[int]] = {}  # the numbers of the roots that lie in a block
        self.blocks: list[Block] = []
        self.to_group: set[int] = set()  # roots that a grouped reduction moves into its block
        self.arena_bytes = 0
        self.live_bytes = 0

    def put(self, number: int, block: Block, offset: int = 0) -> None:
        """Place a root."""
        self.place[number] = (block, offset)
        self.roots.setdefault(block, []).append(number)

    def address(self, root: Value) -> tuple[str, int]:
        """Return (variable name or "" for the arena, byte offset)."""
        block, offset = self.place[root.number]
        return (block.variable, offset) if block.variable else ("", block.offset + offset)


def plan_memory(instructions: list[Instruction], variables, feeds, live_out, updates, reuse: bool = True) -> tuple[MemoryPlan, list[Instruction]]:
    """Place every root and return the plan and the instructions, closing copies of updates included.

    ``variables`` are roots, ``feeds`` roots alive from the start, ``live_out`` values alive at the end, ``updates`` pairs of
    (variable root, new value). With ``reuse=False`` every block has memory of its own and nothing is in place: the oracle.
    """
    reads: dict[int, list[int]] = {}
    writer: dict[int, int] = {}
    for position, instruction in enumerate(instructions):
        for v in instruction.inputs:
            reads.setdefault(v.root.number, []).append(position)
        for v in instruction.outputs:
            writer[v.root.number] = position
    direct = _direct_updates(instructions, reads, writer, updates) if reuse else {}
    instructions = instructions + _closing_copies(updates, direct)
    end = len(instructions)
    last = {n: p[-1] for n, p in reads.items()}
    for position, instruction in enumerate(instructions):
        for v in instruction.inputs:
            last[v.root.number] = position
        for v in instruction.outputs:
            last.setdefault(v.root.number, position)
    for v in live_out:
        last[v.root.number] = end
    plan = MemoryPlan()
    plan.to_group = {v.root.number for i in instructions if i.name == "allreduce" and len(i.outputs) > 1 for v in i.inputs}
    for root in variables:
        plan.put(root.number, Block(root.n_bytes, -1, end, root.name))
    for root in feeds:
        _add(plan, root, -1, last.get(root.number, -1))
    for number, root in direct.items():
        plan.put(number, *plan.place[root.number])
    for position, instruction in enumerate(instructions):
        _place_outputs(plan, instruction, position, last, reuse)
    plan.blocks = [block for block in plan.blocks if block.size]
    _lay_out(plan, reuse)
    return plan, instructions


def _add(plan: MemoryPlan, root: Value, start: int, end: int) -> Block:
    block = Block(-(-max(root.n_bytes, 1) // ALIGN) * ALIGN, start, end)
    plan.blocks.append(block)
    plan.put(root.number, block)
    return block


def _same_view(a: Value, b: Value) -> bool:
    return a.shape == b.shape and a.strides == b.strides and a.dtype == b.dtype and a.is_whole and b.is_whole


def _may_alias(instruction: Instruction, i_out: int, i_in: int) -> bool:
    if instruction.is_collective:
        return instruction.name == "allreduce"
    return contract.KERNELS[instruction.name].may_alias(instruction.params, i_out, i_in)


def _direct_updates(instructions, reads, writer, updates) -> dict[int, Value]:
    """Return new roots that may be written straight into their variable: nobody reads the old value afterwards."""
    direct: dict[int, Value] = {}
    taken = set()
    users: dict[int, list[Value]] = {}  # variables that take over (a view of) another variable's old value
    for variable, new in updates:
        users.setdefault(new.root.number, []).append(variable)
    for variable, new in updates:
        root = new.root
        if root.kind != "temporary" or not new.is_whole or new.shape != variable.shape or root.number in direct or variable.number in taken:
            continue
        position = writer[root.number]
        instruction = instructions[position]
        if instruction.is_collective and len(instruction.outputs) > 1:
            continue
        old = reads.get(variable.number, [])
        if any(p > position for p in old) or any(v is not variable for v in users.get(variable.number, ())):
            continue
        i_out = next(i for i, v in enumerate(instruction.outputs) if v.root is root)
        fine = all(v.root is not variable or (_may_alias(instruction, i_out, i) and v.is_whole and _same_order(v, instruction.outputs[i_out]))
                   for i, v in enumerate(instruction.inputs))
        if fine:
            direct[root.number] = variable
            taken.add(variable.number)
    return direct


def _same_order(a: Value, b: Value) -> bool:
    return a.shape == b.shape and a.strides == b.strides


def _closing_copies(updates, direct) -> list[Instruction]:
    """Copy the other new values at the end; values that are themselves variables go through a temporary first."""
    first, second = [], []
    for variable, new in updates:
        if new.root.number in direct and direct[new.root.number] is variable:
            continue
        if new.root.kind != "temporary" or new.root.number in direct:
            kept = Value(new.shape, new.dtype)
            first.append(Instruction("copy", [kept], [new], {}, f"{variable.name}:="))
            new = kept
        second.append(Instruction("copy", [variable], [new], {}, f"{variable.name}:="))
    return first + second


def _place_outputs(plan: MemoryPlan, instruction: Instruction, position: int, last, reuse: bool) -> None:
    if len(instruction.outputs) > 1 and instruction.name == "allreduce":
        _place_group(plan, instruction, position, last)
    for i, out in enumerate(instruction.outputs):
        root = out.root
        if root.number in plan.place:
            continue
        block = _reusable(plan, instruction, i, position, last) if reuse else None
        if block is None:
            _add(plan, root, position, last[root.number])
        else:
            plan.put(root.number, block, plan.place[_donor(instruction, i, plan, block)][1])
            block.end = max(block.end, last[root.number])
    if instruction.scratch is not None:
        _add(plan, instruction.scratch, position, position)


def _reusable(plan, instruction, i_out, position, last) -> Block | None:
    out = instruction.outputs[i_out]
    for i, v in enumerate(instruction.inputs):
        if v.root.kind != "temporary" or not _same_view(v, out) or not _may_alias(instruction, i_out, i):
            continue
        block = plan.place[v.root.number][0]
        if block.is_group and out.root.number in plan.to_group:
            continue
        if not block.variable and block.end <= position and last[v.root.number] == position \
                and not any(u.root is v.root and u is not v for u in instruction.inputs) and not _taken(plan, instruction, block, i_out):
            return block
    return None


def _taken(plan, instruction, block, i_out) -> bool:
    """Tell whether an earlier output of the same instruction already took this block."""
    return any(v.root.number in plan.place and plan.place[v.root.number][0] is block for v in instruction.outputs[:i_out])


def _donor(instruction, i_out, plan, block) -> int:
    out = instruction.outputs[i_out]
    return next(v.root.number for i, v in enumerate(instruction.inputs)
                if plan.place[v.root.number][0] is block and _same_view(v, out) and _may_alias(instruction, i_out, i))


def _place_group(plan: MemoryPlan, group: Instruction, position: int, last) -> None:
    """Lay the members of a grouped reduction one behind the other, inputs and outputs in the same memory."""
    roots = [v.root for v in group.inputs]
    start = min(plan.place[r.number][0].start for r in roots)
    size = sum(r.size * ITEMSIZE[r.dtype] for r in roots)
    block = Block(-(-size // ALIGN) * ALIGN, start, max(last[v.root.number] for v in group.outputs))
    block.is_group = True
    offset, moved = 0, {}
    for r, out in zip(roots, group.outputs):
        moved[plan.place[r.number][0]] = offset
        plan.put(out.root.number, block, offset)
        offset += r.n_bytes
    for old, at in moved.items():
        for number in plan.roots.pop(old):
            plan.put(number, block, at)
        old.size = 0  # gone; its roots lie in the group's block
    plan.blocks.append(block)


def _lay_out(plan: MemoryPlan, reuse: bool) -> None:
    """Give every block its offset: best fit in time order, or by size where that packs closer."""
    blocks = plan.blocks
    plan.live_bytes = _live_peak(blocks)
    if not reuse:
        top = 0
        for block in blocks:
            block.offset, top = top, top + block.size
        plan.arena_bytes = top
        return
    plan.arena_bytes = _best_fit(blocks)
    if plan.arena_bytes > 1.02 * plan.live_bytes and len(blocks) <= 20000:
        kept = [b.offset for b in blocks]
        by_size = _by_size(blocks)
        if by_size < plan.arena_bytes:
            plan.arena_bytes = by_size
        else:
            for b, offset in zip(blocks, kept):
                b.offset = offset


def _live_peak(blocks) -> int:
    changes: dict[int, int] = {}
    for b in blocks:
        changes[b.start] = changes.get(b.start, 0) + b.size
        changes[b.end + 1] = changes.get(b.end + 1, 0) - b.size
    peak = now = 0
    for position in sorted(changes):
        now += changes[position]
        peak = max(peak, now)
    return peak


def _best_fit(blocks) -> int:
    """Place blocks in order of their start in the smallest hole that fits; return the arena's size."""
    starts = sorted(range(len(blocks)), key=lambda i: (blocks[i].start, -blocks[i].size, i))
    ends = sorted(range(len(blocks)), key=lambda i: (blocks[i].end, i))
    holes: list[tuple[int, int]] = []  # (offset, size), sorted by offset, coalesced
    top, gone = 0, 0
    for i in starts:
        block = blocks[i]
        while gone < len(ends) and blocks[ends[gone]].end < block.start:
            _free(holes, blocks[ends[gone]].offset, blocks[ends[gone]].size)
            gone += 1
        fit = min((h for h in holes if h[1] >= block.size), key=lambda h: (h[1], h[0]), default=None)
        if fit is not None:
            at = bisect.bisect_left(holes, fit)
            block.offset = fit[0]
            holes[at:at + 1] = [(fit[0] + block.size, fit[1] - block.size)] if fit[1] > block.size else []
        elif holes and holes[-1][0] + holes[-1][1] == top:
            block.offset = holes.pop()[0]
            top = block.offset + block.size
        else:
            block.offset, top = top, top + block.size
    return top


def _free(holes, offset: int, size: int) -> None:
    at = bisect.bisect_left(holes, (offset, 0))
    if at < len(holes) and offset + size == holes[at][0]:
        size += holes.pop(at)[1]
    if at and holes[at - 1][0] + holes[at - 1][1] == offset:
        offset, size = holes[at - 1][0], holes.pop(at - 1)[1] + size
        at -= 1
    holes.insert(at, (offset, size))


def _by_size(blocks) -> int:
    """Place the largest blocks first, each at the lowest offset free of all blocks alive with it."""
    order = sorted(range(len(blocks)), key=lambda i: (-blocks[i].size, blocks[i].start, i))
    placed: list[Block] = []
    top = 0
    for i in order:
        block, offset = blocks[i], 0
        for other in placed:  # kept sorted by offset
            if other.start <= block.end and block.start <= other.end:
                if other.offset - offset >= block.size:
                    break
                offset = max(offset, other.offset + other.size)
        block.offset = offset
        top = max(top, offset + block.size)
        bisect.insort(placed, block, key=lambda x: x.offset)
    return top

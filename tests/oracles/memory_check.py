"""A second opinion on a memory plan: who wrote each byte last, followed instruction by instruction.

Invariant: nothing here asks the plan for lifetimes; only addresses are taken from it.
"""

from __future__ import annotations

import numpy as np


def clobbered(program) -> list[str]:
    """Return what reads memory that somebody else has written since, as seen by the addresses alone."""
    owner = {"": np.full(max(program.arena_bytes, 1), -1, np.int64)}
    for name, b in program.variables.items():
        owner[name] = np.full(b.value.n_bytes, b.value.root.number, np.int64)
    for b in program.feeds.values():
        _write(program, owner, b.value)
    faults = []
    for position, instruction in enumerate(program.instructions):
        for v in instruction.inputs:
            if not _owned(program, owner, v):
                faults.append(f"instruction {position}, {instruction}: operand {v.root.number} was written over")
        if instruction.scratch is not None:
            _write(program, owner, instruction.scratch)
            faults += [f"instruction {position}, {instruction}: scratch lies on operand {v.root.number}" for v in instruction.inputs
                       if not _owned(program, owner, v)]
        for v in instruction.outputs:
            _write(program, owner, v)
        faults += [f"instruction {position}, {instruction}: results lie on one another" for v in instruction.outputs if not _owned(program, owner, v)]
    for b in program.outputs.values():
        if not _owned(program, owner, b.value):
            faults.append(f"output {b.name} was written over")
    return faults


def written_once(program) -> list[str]:
    """Return the values that are written twice, or read before they are written."""
    known = {b.value.root.number for table in (program.feeds, program.variables) for b in table.values()}
    faults, written = [], set()
    for position, instruction in enumerate(program.instructions):
        faults += [f"instruction {position}, {instruction}: {v.root.number} does not exist yet" for v in instruction.inputs
                   if v.root.number not in known and v.root.number not in written]
        for number in {v.root.number for v in instruction.outputs}:
            if number in written or (number in known and instruction.name != "copy"):
                faults.append(f"instruction {position}, {instruction}: {number} is written twice")
            written.add(number)
    return faults


def _span(program, v):
    name, start = program.plan.address(v.root)
    return name, slice(start, start + v.root.n_bytes)


def _write(program, owner, v) -> None:
    name, span = _span(program, v)
    assert span.stop <= len(owner[name]), f"{v.root.number} lies beyond the end of {name or 'the arena'}"
    owner[name][span] = v.root.number


def _owned(program, owner, v) -> bool:
    name, span = _span(program, v)
    return bool(np.all(owner[name][span] == v.root.number))

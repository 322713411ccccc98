"""A program as text.

Invariant: numbers in a listing are local to the program, so equal programs have equal texts.
"""

from __future__ import annotations

from ..spmd.instruction import Instruction
from ..spmd.value import Value


def placed_text(dims, placement) -> str:
    """Return ``[batch=32/data, d_model=512] partial:model``."""
    parts = [f"{d}" + "".join(f"/{a}" for a in placement.axes_of(d.name)) for d in dims]
    return "[" + ", ".join(parts) + "]" + "".join(f" partial:{a}" for a in placement.partial)


def bytes_text(n: float) -> str:
    """Return a size with a unit: ``96 B``, ``1.5 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(n) < 1024 or unit == "GiB":
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    raise AssertionError


def value_text(v: Value, numbers: dict[int, int], full: bool = False) -> str:
    """Return ``%3[4, 8]``: the root's number in this program, and this view's lengths."""
    number = numbers.setdefault(v.root.number, len(numbers))
    text = f"%{number}[{', '.join(map(str, v.shape))}]"
    if full and v.root is not v:
        text += f"@{v.offset}{list(v.strides)}"
    return text + (f" {v.dtype}" if full else "")


def instruction_text(i: Instruction, numbers: dict[int, int], full: bool = False) -> str:
    """Return one line for an instruction."""
    inputs = ", ".join(value_text(v, numbers, full) for v in i.inputs)
    outputs = ", ".join(value_text(v, numbers, full) for v in i.outputs)
    params = ", ".join(f"{k}={_param(v)}" for k, v in i.params.items() if full or k not in ("temp_dtypes", "in_dtypes", "out_dtypes"))
    over = f" over {'*'.join(i.axes)}" if i.axes else ""
    return f"{outputs} = {i.name}{over}({inputs}{'; ' + params if params else ''})"


def _param(v) -> str:
    if isinstance(v, tuple) and v and isinstance(v[0], tuple) and len(v[0]) == 3 and isinstance(v[0][0], str):
        return " then ".join(f"{dst[0]}{dst[1]}={fn}({','.join(f'{r[0]}{r[1]}' for r in srcs)})" for fn, srcs, dst in v)
    return repr(v)


def _title(program) -> str:
    return "program" if program.name == "program" else f"program {program.name}"


def listing(program) -> str:
    """Return the whole program as text."""
    numbers: dict[int, int] = {}
    lines = [f"{_title(program)} on mesh {program.mesh}, {program.rules_text}"]
    lines += [f"warning: {w}" for w in program.warnings] + list(program.notes)
    for kind, table in (("feed", program.feeds), ("variable", program.variables)):
        for b in table.values():
            numbers.setdefault(b.value.root.number, len(numbers))
            lines.append(f"  {kind:8} %{numbers[b.value.root.number]} {b.name}{placed_text(b.dims, b.placement)} {b.value.dtype}")
    for i in program.instructions:
        cost = f"payload {bytes_text(i.payload_bytes)}, wire {bytes_text(i.wire_bytes)}" if i.axes else \
            (f"{i.n_flops:.3g} flops" if i.n_flops else "")
        lines.append(f"  {instruction_text(i, numbers)}".ljust(96) + f"  # {i.origin}" + (f"; {cost}" if cost else ""))
    for b in program.outputs.values():
        lines.append(f"  output   {value_text(b.value, numbers)} {b.name}{placed_text(b.dims, b.placement)}")
    lines.append(_memory_line(program))
    return "\n".join(lines)


def _memory_line(program) -> str:
    return (f"memory of one rank: variables {bytes_text(program.variable_bytes)} + arena {bytes_text(program.arena_bytes)} "
            f"(largest sum alive {bytes_text(program.live_bytes)}) = {bytes_text(program.peak_bytes)}")


def summary(program) -> str:
    """Return a short account of a program."""
    lines = [f"{_title(program)} on mesh {program.mesh} ({program.mesh.size} ranks), {program.rules_text}"]
    lines += [f"warning: {w}" for w in program.warnings] + list(program.notes)
    lines.append(f"parameters: {program.n_parameters:,}")
    lines.append(f"instructions: {len(program.instructions)}, {program.n_flops:.4g} flops on one rank")
    totals: dict[tuple, list[int]] = {}
    for c in program.collectives():
        row = totals.setdefault((c.name, c.axes), [0, 0, 0])
        row[0] += 1
        row[1] += c.payload_bytes
        row[2] += c.wire_bytes
    for (name, axes), (n, payload, wire) in totals.items():
        lines.append(f"  {n:5} {name} over {'*'.join(axes)}: payload {bytes_text(payload)}, wire {bytes_text(wire)} on one rank")
    if not totals:
        lines.append("  no communication")
    lines.append(_memory_line(program))
    lines.append(f"digest: {program.digest}")
    return "\n".join(lines)

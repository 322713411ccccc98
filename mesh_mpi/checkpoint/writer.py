"""Saving: the owners of slices send them to rank 0, which streams variable by variable into one file.

Invariant: a checkpoint takes its name only after its file was closed, brought to disk, read again and found the same; until then
everything lies in a folder ``step_N.partial``, and the previous checkpoint is untouched. An error is the same on every rank.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..errors import CheckpointError
from ..log import say
from ..runtime.agreement import on_every_rank, on_rank_0
from ..runtime.state import State
from . import folder as folders
from .file import CheckpointFile, provenance
from .format import CONFIGURATION, PROVENANCE, describe, saved_at
from .integrity import verify_arrays
from .patient import forget
from .streaming import blocks, extent, overlap, within

_METADATA_BYTES = 1 << 16  # of a file, and as many for eight variables: more than HDF5 needs


class SaveReport(NamedTuple):
    """``path``: the checkpoint's folder; ``n_bytes`` of its file. ``write_s``: collecting, checksums, writing and bringing to disk;
    ``verify_s``: reading all of it again."""

    path: Path
    n_bytes: int
    write_s: float
    verify_s: float


def save(state: State, run_dir, step: int, counters: Mapping[str, int | float] | None = None, config_text: str = "",
         keep_last: int = 3, keep_every: int = 0) -> SaveReport:
    """Save every variable of ``state`` but accumulators as RUN_DIR/checkpoints/step_NNNNNNNN, and let ``latest`` name it.

    ``counters`` are numbers of the training loop (rows_consumed, tokens); step and seed are added. Afterwards the last ``keep_last``
    saves and every step that is a multiple of ``keep_every`` (0: none) remain.

    Shape   each variable with its global shape; memory on rank 0: four blocks of 8 MiB, whatever the variables' sizes.
    Comm    collective: each slice once, from the first rank that holds it to rank 0, in messages of at most 8 MiB; verdicts from rank 0.
    Raises  CheckpointError (disk full, not allowed, read back otherwise), GraphError (a program did not finish), the same on every
            rank; nothing is left of the attempt and the previous checkpoint stays.
    """
    machine, operation, folder = state.machine, f"save step {step}", folders.checkpoints_of(run_dir)
    on_every_rank(machine, operation, lambda: _check(state, step, counters or {}, keep_last, keep_every))
    start = time.perf_counter()
    values = {**(counters or {}), "step": step, "seed": np.uint64(state.seed)}
    needed = n_bytes_of(state) + _METADATA_BYTES * (1 + len(state.saved_names) // 8) + len(config_text)
    file = CheckpointFile(step)
    try:
        on_rank_0(machine, operation, lambda: file.create(folders.prepare(folder, step, needed)))
        for name in state.saved_names:
            _stream(state, name, file)
            on_rank_0(machine, operation, file.refuse_if_failed)
        texts = {CONFIGURATION: config_text, PROVENANCE: provenance(state) if machine.rank == 0 else ""}
        on_rank_0(machine, operation, lambda: file.finish(values, texts))
        written = time.perf_counter()
        description = on_rank_0(machine, operation, lambda: forget(file.partial / folders.FILE) or describe(file.partial))
        verify_arrays(machine, description, n_readers=1)
        verified = time.perf_counter()
        n_bytes = on_rank_0(machine, operation, lambda: description.path.stat().st_size)
        path = on_rank_0(machine, operation, lambda: folders.publish(folder, description.path.parent, step))
    finally:
        file.discard()
    on_rank_0(machine, operation, lambda: _retire(folder, step, keep_last, keep_every))
    return SaveReport(path, n_bytes, written - start, verified - written)


def _check(state: State, step: int, counters: Mapping, keep_last: int, keep_every: int) -> None:
    state.assert_complete()
    if isinstance(step, bool) or not isinstance(step, (int, np.integer)) or step < 0:
        raise CheckpointError(f"save: step is {step!r}. Give a whole number of at least 0.")
    if keep_last < 1 or keep_every < 0:
        raise CheckpointError(f"save step {step}: keep_last is {keep_last} and keep_every {keep_every}. Keep at least the last 1, and every step "
                              "that is a multiple of a positive number (0: none).")
    for key, value in counters.items():
        if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)) or "/" in key or key in ("step", "seed"):
            raise CheckpointError(f"save step {step}: counter {key!r} is {value!r}. Counters are numbers, other than step and seed, without / in their names.")
    paths = {path_of(state, name) for name in state.saved_names}
    for path in sorted(paths):
        words = path.split("/")
        if any(word in ("", ".", "..") for word in words):
            raise CheckpointError(f"save step {step}: {path!r} is no name in HDF5. Give variables and scopes names without empty parts.")
        inner = next((p for p in ("/".join(words[:i]) for i in range(1, len(words))) if p in paths), None)
        if inner is not None:
            raise CheckpointError(f"save step {step}: variable {inner!r} is also the scope of variable {path!r}. Rename one of the two.")


def n_bytes_of(state: State) -> int:
    """Return the bytes of all elements that are saved."""
    return sum(state.variables[name].variable.shape.size * np.dtype(state.variables[name].value.dtype).itemsize for name in state.saved_names)


def path_of(state: State, name: str) -> str:
    """Return where a variable stands in the file."""
    return f"{state.variables[name].variable.storage_class}/{name}"


def _stream(state: State, name: str, file: CheckpointFile) -> None:
    """Bring one variable to rank 0 and into the file, block by block; what fails there is kept for the verdict."""
    b, machine, mesh = state.variables[name], state.machine, state.mesh
    pieces, on_0 = state.pieces(name), machine.rank == 0
    owners = {rank: b.slices(mesh, c) for rank in range(mesh.size) if b.is_owner(mesh, c := mesh.coordinate(rank))} if on_0 else {}
    file.begin(path_of(state, name), b)
    for block in blocks(b.shape, np.dtype(b.value.dtype).itemsize):
        sources = [_part(piece, block) for piece in pieces]
        targets, array, slot = [None] * mesh.size, None, [None, None]
        if on_0:
            array = next((s for s in sources if s is not None and s.shape == extent(block) and s.flags.c_contiguous), None)
            if array is None:
                array, slot = file.checksums.buffer(extent(block), b.value.dtype)
                for rank, slices in owners.items():
                    common = overlap(slices, block)
                    targets[rank] = None if common is None else array[(..., *within(common, block))]
        machine.collect(sources, targets, f"collecting {name} for a checkpoint")
        file.put(array, slot)
    file.end()


def _part(piece, block) -> np.ndarray | None:
    """Return this rank's part of a block, a view, or None if it has none or another rank owns it."""
    common = overlap(piece.slices, block) if piece.is_owner else None
    return None if common is None else piece.array[(..., *within(common, piece.slices))]  # ...: a view, also without dimensions


def _retire(folder: Path, step: int, keep_last: int, keep_every: int) -> None:
    """Remove what need not be kept; a checkpoint that cannot be removed is told, and no error."""
    times = {s: saved_at(folder / folders.step_name(s) / folders.FILE) for s in folders.steps_in(folder)}
    by_age = [s for s in sorted(times, key=lambda s: (times[s], s)) if s != step] + [step]
    for old in folders.superfluous(by_age, keep_last, keep_every):
        try:
            folders.remove(folder, old)
        except OSError as error:
            say(f"save step {step}: {folders.step_name(old)} could not be removed: {error}")

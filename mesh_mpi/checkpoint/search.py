"""Which checkpoint a run goes on from.

Invariant: what is returned was read and found whole a moment ago; nothing is passed over in silence.
"""

from __future__ import annotations

from pathlib import Path

from ..errors import CheckpointError
from ..log import say
from ..runtime.agreement import on_rank_0
from ..runtime.machine import any_machine
from .folder import FILE, checkpoints_of, latest_name, step_name, steps_in
from .format import saved_at
from .integrity import verify


def find(run_dir, which="auto", machine=None) -> Path | None:
    """Return the HDF5 file of the checkpoint to go on from; load it with ``verified=True``.

    ``which`` is a path (a checkpoint's folder or file, a run's folder: its latest), or "auto": the newest whole one of ``run_dir``, by
    the time of saving; each that is passed over is named on stderr with the reason. None: the run has no checkpoint yet.

    Comm    collective; ranks share the reading. ``machine``: any machine of this process, made if not given.
    Raises  CheckpointError, alike on every rank: a given checkpoint is damaged or missing, or a run has checkpoints and none is whole.
    """
    machine = any_machine() if machine is None else machine
    if str(which) != "auto":
        return verify(which, machine).path
    folder = checkpoints_of(run_dir)
    candidates, pointer = on_rank_0(machine, f"checkpoints of {run_dir}", lambda: (_by_age(folder), latest_name(folder)))
    names = [path.parent.name for path in candidates]
    lost = pointer is not None and pointer not in names
    skipped = [f"latest names {pointer!r}, which is not there"] if lost else []
    if candidates and pointer is None:
        skipped.append("there is no file latest")
    for path in candidates:
        try:
            found = verify(path, machine).path
        except CheckpointError as fault:
            skipped.append(str(fault))
            continue
        if skipped:
            say(f"checkpoints of {run_dir}: going on from {path.parent.name}; " + "; ".join(skipped))
        return found
    if skipped:
        raise CheckpointError(f"checkpoints of {run_dir}: none of {len(candidates)} can be used: {' '.join(skipped)} "
                              f"Restore one, or remove {folder} to start anew.")
    return None


def _by_age(folder: Path) -> list[Path]:
    """Return the files of all checkpoints, the last save first."""
    files = [folder / step_name(step) / FILE for step in steps_in(folder)]
    return sorted(files, key=lambda path: (saved_at(path), path.parent.name), reverse=True)

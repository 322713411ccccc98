"""The folder of a run's checkpoints: names, the pointer ``latest``, which to keep, what of it survives a power cut.

Invariant: nothing here opens an HDF5 file; a name ``step_NNNNNNNN`` appears in one rename, after its file is on disk, and is never
taken from a checkpoint before the next one stands.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
from pathlib import Path

from ..errors import CheckpointError

FILE = "index.h5"
LATEST = "latest"
PARTIAL, REMOVED = ".partial", ".removed"
_STEP = re.compile(r"step_(\d{8,})")
_NO_SPACE = (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC))
_IN_THE_WAY = (errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY)
_NOT_ALLOWED = (errno.EACCES, errno.EPERM, errno.EROFS)


def checkpoints_of(run_dir) -> Path:
    """Return the folder of a run's checkpoints."""
    return Path(run_dir) / "checkpoints"


def step_name(step: int) -> str:
    """Return ``step_00000010``."""
    return f"step_{step:08d}"


def steps_in(folder: Path) -> list[int]:
    """Return the steps of the checkpoints under their final names, ascending; [] without the folder."""
    if not folder.is_dir():
        return []
    return sorted(int(found.group(1)) for entry in os.listdir(folder) if (found := _STEP.fullmatch(entry)))


def latest_name(folder: Path) -> str | None:
    """Return the name in ``latest``, or None if there is no such file."""
    try:
        return (folder / LATEST).read_bytes().decode(errors="backslashreplace").strip()
    except FileNotFoundError:
        return None


def resolve(path) -> Path:
    """Return the HDF5 file that ``path`` means: a file, a checkpoint's folder, or a run's folder (then what ``latest`` names).

    Raises CheckpointError if there is none.
    """
    try:
        return _resolved(Path(path))
    except OSError as error:
        raise CheckpointError(f"checkpoint {path}: {_reason(error)}. Give a checkpoint's folder, a run's folder, or an HDF5 file.") from None


def _resolved(path: Path) -> Path:
    if path.is_file():
        return path
    if (path / FILE).is_file():
        return path / FILE
    folder = checkpoints_of(path) if checkpoints_of(path).is_dir() else path
    if (folder / LATEST).is_file():
        name = latest_name(folder)
        if (folder / name / FILE).is_file():
            return folder / name / FILE
        raise CheckpointError(f"checkpoint {path}: {folder / LATEST} names {name!r}, where there is no {FILE}. {_others(folder)}")
    if not path.exists():
        raise CheckpointError(f"checkpoint {path}: it does not exist. Give a checkpoint's folder, a run's folder, or an HDF5 file.")
    raise CheckpointError(f"checkpoint {path}: there is neither {FILE} nor {LATEST} in it. {_others(folder)}")


def _others(folder: Path) -> str:
    steps = steps_in(folder)
    return f"Give one of the {len(steps)} checkpoints there: {', '.join(map(step_name, steps))}." if steps else \
        "No checkpoint stands there. Give a checkpoint's folder, a run's folder, or an HDF5 file."


def prepare(folder: Path, step: int, n_bytes: int) -> Path:
    """Make an empty temporary folder for ``step`` and return it; what interrupted saves left is removed.

    Raises CheckpointError if ``n_bytes`` do not fit or nothing can be written there.
    """
    with on_disk(f"save step {step}", folder):
        folder.mkdir(parents=True, exist_ok=True)
        for entry in os.listdir(folder):
            if entry.endswith((PARTIAL, REMOVED)) and _STEP.match(entry):
                shutil.rmtree(folder / entry)
        free = free_bytes(folder)
        if free < n_bytes:
            raise CheckpointError(f"save step {step}: the checkpoint needs {n_bytes:,} bytes and {folder} has {free:,} free. "
                                  "Free some space, or keep fewer checkpoints.")
        partial = folder / (step_name(step) + PARTIAL)
        partial.mkdir()
    return partial


def free_bytes(folder: Path) -> int:
    """Return the bytes that may still be written in a folder's file system."""
    return shutil.disk_usage(folder).free


def publish(folder: Path, partial: Path, step: int) -> Path:
    """Give the finished folder ``partial`` its name and let ``latest`` name it; return the checkpoint's folder.

    A checkpoint of the same step is replaced, its file in one rename.
    """
    final = folder / step_name(step)
    with on_disk(f"save step {step}", folder):
        sync(partial)
        if final.is_dir():
            os.replace(partial / FILE, final / FILE)
            sync(final)
            partial.rmdir()
        else:
            os.rename(partial, final)
        sync(folder)
        temporary = folder / f".{LATEST}{PARTIAL}"
        temporary.write_text(final.name + "\n")
        sync(temporary)
        os.replace(temporary, folder / LATEST)
        sync(folder)
        sync(folder.parent)
    return final


def superfluous(by_age: list[int], keep_last: int, keep_every: int) -> list[int]:
    """Return the steps to remove: all but the last ``keep_last`` of ``by_age`` (the oldest save first) and every multiple of ``keep_every`` (0: none)."""
    return [step for step in by_age[:-keep_last] if not (keep_every and step % keep_every == 0)]


def remove(folder: Path, step: int) -> None:
    """Remove a checkpoint: first its name, then its files. Raises OSError."""
    gone = folder / (step_name(step) + REMOVED)
    os.rename(folder / step_name(step), gone)
    shutil.rmtree(gone)


def sync(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP) or not os.path.isdir(path):
            raise  # some file systems have no fsync of folders
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def on_disk(operation: str, place: Path):
    """Turn what the system says of a disk (also through HDF5) into a CheckpointError with what to do."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{operation}: {_reason(error)}, in {place}. {_advice(error)}") from None


def _code(error: OSError) -> int | None:
    if error.errno:
        return error.errno
    found = re.search(r"errno = (\d+)", str(error))
    return int(found.group(1)) if found else None


def _reason(error: OSError) -> str:
    code, place = _code(error), error.filename2 or error.filename
    if not code:
        return str(error)
    return f"{os.strerror(code)} (errno {code})" + (f": {place}" if code in _IN_THE_WAY and place else "")


def _advice(error: OSError) -> str:
    code = _code(error)
    if code in _NO_SPACE:
        return "Free some space, or keep fewer checkpoints."
    if code in _IN_THE_WAY:
        return "Move away what stands there under that name."
    if code in _NOT_ALLOWED:
        return "Choose a run_dir in which rank 0 may write."
    return "See that the file system is there and writable."

"""The folder of a run: configuration, environment, metrics, checkpoints; one run at a time.

Invariant: only rank 0 writes here (each verdict is every rank's), what a resumed run finds is kept, and a folder that another run holds is refused.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import sys
import time
from collections import deque
from importlib import metadata
from pathlib import Path

from ..errors import ConfigError
from ..log import say
from ..runtime.agreement import on_rank_0
from ..runtime.new_file import NewFile

METRICS, LOCK = "metrics.jsonl", "run.lock"
KEPT_LOSSES = 10
_PACKAGES = ("mesh-mpi", "numpy", "mpi4py", "mpich", "h5py", "msgspec", "PyYAML", "threadpoolctl")
_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "SLURM_JOB_ID", "SLURM_RESTART_COUNT", "SLURM_NTASKS",
              "SLURM_JOB_NODELIST", "MPI4PY_MPIABI", "MPI4PY_LIBMPI", "HDF5_USE_FILE_LOCKING", "MESH_MPI_WATCHDOG_S")


class RunFolder:
    """The folder ``path``, made if need be and held until ``close``.

    Comm    verdicts of rank 0. Raises ConfigError, alike on every rank: another run holds the folder, or it cannot be made or written.
    """

    def __init__(self, path: str, machine):
        self.given, self.path, self.machine = path, Path(path), machine
        self._lock, self._made = None, False
        on_rank_0(machine, f"run_dir {path}", self._open)

    def _open(self) -> None:
        try:
            if not self.given:
                raise ValueError("it is empty")
            self._made = not self.path.exists()
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = open(self.path / LOCK, "a+", errors="replace")
        except (OSError, ValueError) as error:
            raise ConfigError(f"run_dir: {self.given!r} cannot be written: {getattr(error, 'strerror', None) or error}. "
                              "Choose another run_dir, or mend its permissions.") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.seek(0)
            holder = self._lock.read().strip() or "an unknown process"
            self._lock.close()
            self._lock = None
            raise ConfigError(f"run_dir: {self.path} is in use by another run ({holder}). Wait for it to end, or choose another run_dir.") from None
        except OSError as error:  # some file systems of clusters have no locks
            say(f"run_dir: {self.path} cannot be locked ({error.strerror or error}). See to it that no other run has the same run_dir.")
        self._lock.truncate(0)
        self._lock.write(f"process {os.getpid()} on {platform.node()} since {time.strftime('%Y-%m-%d %H:%M:%S')}")
        self._lock.flush()

    def describe(self, config_text: str, banner: str) -> None:
        """Write ``config.resolved.yaml``, and add to ``environment.txt``. Comm: a verdict of rank 0."""
        def write():
            (self.path / "config.resolved.yaml").write_text(config_text)
            with open(self.path / "environment.txt", "a") as file:  # a part for each start: the history of the run
                file.write(_environment(banner))
        on_rank_0(self.machine, f"run_dir {self.path}", write)

    def close(self) -> None:
        """Let go of the folder; one that was made here and in which nothing came to stand is removed."""
        if self._lock is not None:
            with contextlib.suppress(OSError):
                if self._made and os.listdir(self.path) == [LOCK]:
                    (self.path / LOCK).unlink()
                    self.path.rmdir()
            self._lock.close()
            self._lock = None


class Metrics:
    """``metrics.jsonl``, a line a step and a line an evaluation, written by rank 0.

    Opening keeps the lines up to ``last_step`` and drops later ones (of steps that a resumed run takes again), so that there is neither gap nor double.
    Writing never raises: the first ``error`` (a full disk) is kept, what follows it is dropped, and the loop asks.
    """

    def __init__(self, folder: RunFolder | None, last_step: int):
        self._file, self.error = None, None
        self._last: set[str] = set()  # what rank 0 found of last_step
        self.losses: deque[float] = deque(maxlen=KEPT_LOSSES)  # that rank 0 found, the last ones
        if folder is not None:
            on_rank_0(folder.machine, f"metrics of {folder.path}", lambda: self._open(folder.path / METRICS, last_step))

    @property
    def owes_evaluation(self) -> bool:
        """Whether the file, when opened, had the loss of ``last_step`` and no held-out loss of it; on rank 0."""
        return "loss" in self._last and "valid_loss" not in self._last

    def _open(self, path: Path, last_step: int) -> None:
        kept, damaged = [], 0
        for line in path.read_bytes().splitlines() if path.exists() else ():
            try:
                values = json.loads(line.decode())
                if values["step"] <= last_step:
                    kept.append(line)
                    self._last |= set(values) if values["step"] == last_step else set()
                    if isinstance(values.get("loss"), float):
                        self.losses.append(values["loss"])
            except (ValueError, KeyError, TypeError, RecursionError):
                damaged += 1  # the half line of a run that was killed while writing, if no more
        if damaged:
            say(f"metrics of {path.parent}: {damaged} of {damaged + len(kept)} lines were damaged and are left out")
        new = NewFile(path)
        try:
            new.write(b"".join(line + b"\n" for line in kept))
            new.publish()
        finally:
            new.discard()
        self._file = open(path, "ab", buffering=0)

    def write(self, **values) -> None:
        """Append a line; numbers that are not finite are written as null."""
        if self._file is None or self.error is not None:
            return
        clean = {k: None if isinstance(v, float) and not abs(v) < float("inf") else v for k, v in values.items()}
        rest = (json.dumps(clean) + "\n").encode()
        try:
            while rest:
                rest = rest[self._file.write(rest):]
        except OSError as error:
            self.error = error

    def close(self) -> None:
        """Bring the file to disk and close it; twice does no harm."""
        if self._file is not None:
            try:
                os.fsync(self._file.fileno())
                self._file.close()
            except OSError as error:
                self.error = self.error or error
            self._file = None


def _environment(banner: str) -> str:
    lines = [f"started {time.strftime('%Y-%m-%d %H:%M:%S')}", banner, ""]
    lines += [f"command: {' '.join(sys.argv)}", f"folder: {os.getcwd()}", f"host: {platform.node()}, {platform.platform()}", f"Python {sys.version}"]
    for name in _PACKAGES:
        try:
            lines.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    lines += [f"{name}={os.environ[name]}" for name in _VARIABLES if name in os.environ]
    return "\n".join(lines) + "\n\n"

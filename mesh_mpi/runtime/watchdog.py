"""The watchdog: a thread that notices when this rank waits too long in a collective, says who waits where, and ends the job.

The first rank to run out of patience speaks; ranks that are elsewhere then show their own stacks, and it ends the job.

Invariant: a collective pays for it two attribute stores; files are written by the thread alone, at a low rate.

MESH_MPI_WATCHDOG_S        seconds without an end of a collective (default 600; 0: off)
MESH_MPI_WATCHDOG_ABORT    0: report and go on waiting
MESH_MPI_WATCHDOG_DIR      folder for one small file a rank; on a shared file system, ranks of other nodes are seen too
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import math
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from ..errors import LaunchError
from ..log import say
from ..mesh import Mesh
from . import abort


class Progress:
    """Where a rank is: ``count`` collectives ended, and ``label`` of the one it is in ("" outside)."""

    __slots__ = ("count", "label")

    def __init__(self):
        self.count, self.label = 0, ""

    @contextlib.contextmanager
    def during(self, label: str):
        """Mark a collective of the host's (not of a program)."""
        self.label = label
        try:
            yield
        finally:
            self.count += 1
            self.label = ""


class Watchdog(threading.Thread):
    """Looks at ``progress`` every ``period_s`` and reports after ``timeout_s`` in one collective."""

    def __init__(self, progress: Progress, rank: int, n_ranks: int, folder: Path, timeout_s: float, ends_job: bool):
        super().__init__(name="mesh_mpi watchdog", daemon=True)
        self.progress, self.rank, self.n_ranks, self.folder = progress, rank, n_ranks, folder
        self.timeout_s, self.ends_job = timeout_s, ends_job
        self.period_s = min(15.0, max(0.05, timeout_s / 20))
        self.mesh: Mesh | None = None
        self._seen: tuple[int, str] = (0, "")
        self._since = time.time()
        self._ended = threading.Event()
        self._reported = self._wrote = False

    def run(self) -> None:
        """Write and look until stopped."""
        while not self._ended.wait(self.period_s):
            now = (self.progress.count, self.progress.label)
            if now != self._seen:
                self._seen, self._since = now, time.time()
            self._write()
            if self._seen[1] and time.time() - self._since > self.timeout_s and self._speaks_first():
                self._report()
                self._ended.wait(1.5 * self.period_s + 0.2)  # the others show their stacks meanwhile
                if self.ends_job and self._seen == (self.progress.count, self.progress.label):
                    abort.end_job(1)
            elif not self._reported and self._call.exists():
                self._reported = True
                self._show_stacks_if_elsewhere()

    def stop(self) -> None:
        """End the thread and remove the folder: called when all ranks leave, or when this one ends the job."""
        self._ended.set()
        with contextlib.suppress(OSError):
            gone = self.folder.rename(f"{self.folder}_ended")  # first out of the way of those that still write
            shutil.rmtree(gone, ignore_errors=True)

    @property
    def _call(self) -> Path:
        """The file with which the first rank to report calls for the others' stacks."""
        return self.folder / "report.json"

    def _speaks_first(self) -> bool:
        if self._reported:
            return False
        self._reported = True
        try:
            with open(self._call, "x") as file:
                json.dump(self._seen, file)
        except FileExistsError:
            self._show_stacks_if_elsewhere()
            return False
        except FileNotFoundError:
            return not self._wrote  # a folder that was there is gone: another rank ends the job already
        except OSError:
            pass  # a full disk: better two ranks that report than none
        return True

    def _show_stacks_if_elsewhere(self) -> None:
        try:
            called_from = tuple(json.loads(self._call.read_text()))
        except (OSError, ValueError):
            called_from = None  # its disk was full
        if called_from != (self.progress.count, self.progress.label):
            self._show_stacks()

    def _show_stacks(self) -> None:
        sys.stderr.write(f"watchdog: Python stacks of {self._who(self.rank)}:\n")
        sys.stderr.flush()
        faulthandler.dump_traceback(sys.__stderr__, all_threads=True)
        sys.__stderr__.flush()

    def _file(self, rank: int) -> Path:
        return self.folder / f"rank_{rank}.json"

    def _write(self) -> None:
        record = {"count": self._seen[0], "label": self._seen[1], "since": self._since, "written": time.time()}
        with contextlib.suppress(OSError):  # a full disk must not end a run
            temporary = self.folder / f".rank_{self.rank}"
            temporary.write_text(json.dumps(record))
            os.replace(temporary, self._file(self.rank))
            self._wrote = True

    def _report(self) -> None:
        count, label = self._seen
        lines = [f"watchdog: {self._who(self.rank)} has waited {time.time() - self._since:.1f} s in its collective number {count + 1}: {label}"]
        lines += [f"watchdog:   {self._who(rank)} {self._state(rank, count, label)}" for rank in range(self.n_ranks) if rank != self.rank]
        sys.stderr.write("\n".join(lines) + "\n")
        self._show_stacks()

    def _who(self, rank: int) -> str:
        place = f" {self.mesh.coordinate(rank)}" if self.mesh is not None and self.mesh.names else ""
        return f"rank {rank}{place}"

    def _state(self, rank: int, count: int, label: str) -> str:
        try:
            record = json.loads(self._file(rank).read_text())
        except (OSError, ValueError):
            return "left no file here: it ended, or runs on a node that does not share MESH_MPI_WATCHDOG_DIR, or that folder's disk is full"
        silent = time.time() - record["written"]
        dead = f"; its process has been silent for {silent:.1f} s" if silent > 3 * self.period_s + 2 else ""
        if (record["count"], record["label"]) == (count, label):
            return f"is there too{dead}"
        doing = f"waits in its collective number {record['count'] + 1}: {record['label']}" if record["label"] else f"is outside collectives, {record['count']} done"
        late = "HAS NOT ARRIVED: " if record["count"] <= count else "is further: "
        return f"{late}{doing}, since {time.time() - record['since']:.1f} s{dead}"


def settings(environment: Mapping[str, str] = os.environ) -> tuple[float, bool]:
    """Return MESH_MPI_WATCHDOG_S and whether the watchdog ends the job. Raises LaunchError for what is no such value."""
    given, ends = environment.get("MESH_MPI_WATCHDOG_S") or "600", environment.get("MESH_MPI_WATCHDOG_ABORT") or "1"
    try:
        timeout_s = float(given)
    except ValueError:
        timeout_s = math.nan
    if not 0 <= timeout_s < math.inf:
        raise LaunchError(f"launch: MESH_MPI_WATCHDOG_S is {given!r}. Give the seconds that a rank may wait in a collective, or 0 for no watchdog.")
    if ends not in ("0", "1"):
        raise LaunchError(f"launch: MESH_MPI_WATCHDOG_ABORT is {ends!r}. Give 1 to end the job after a report, or 0 to go on waiting.")
    return timeout_s, ends == "1"


def start_watchdog(progress: Progress, rank: int, n_ranks: int, from_rank_0: Callable[[str], str]) -> Watchdog | None:
    """Start this rank's watchdog, or return None where it is off. Comm: ``from_rank_0`` spreads the folder's name."""
    timeout_s, ends_job = settings()
    folder = ""
    if rank == 0 and timeout_s > 0 and n_ranks > 1:
        base = os.environ.get("MESH_MPI_WATCHDOG_DIR") or tempfile.gettempdir()
        try:
            os.makedirs(base, exist_ok=True)
            folder = tempfile.mkdtemp(prefix="mesh_mpi_watchdog_", dir=base)
        except OSError as error:
            folder = os.path.join(base, f"mesh_mpi_watchdog_{os.getpid()}")
            say(f"warning: the watchdog cannot write in {base}: {error.strerror}. It will not know where other ranks are. "
                "Set MESH_MPI_WATCHDOG_DIR to a folder with room.")
    folder = from_rank_0(folder)
    if not folder:
        return None
    with contextlib.suppress(OSError):
        os.makedirs(folder, exist_ok=True)  # on another node the folder is that node's own
    watchdog = Watchdog(progress, rank, n_ranks, Path(folder), timeout_s, ends_job)
    watchdog.start()
    abort.at_leave(watchdog.stop)
    return watchdog

"""How a rank leaves: an error, a ``sys.exit`` or a lost thread on one rank ends the whole job, quickly and with a reason.

Invariant: no rank waits for another that will never come. An error that all ranks raise alike is printed once and all end with
code 2, as does a process without a launcher; whatever happens on one rank alone is printed by that rank, with its coordinates, and
MPI_Abort ends the others. The hooks come with the import of mesh_mpi, since a script may fail before it has a machine.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable

from ..errors import LaunchError, MeshMpiError
from ..keys import name_key
from ..log import is_speaker, launcher_rank
from . import patience
from .library import start_mpi

GRACE_S = 1.5  # how long a rank that fails waits for the others to fail alike
KILL_S = 3.0  # how long MPI_Abort, or joining the others in MPI_Init, may take before this process kills itself
ERROR_CODE = 2


class _Job:
    """This process's part in the job; ``comm`` is a communicator used for leaving only, None before MPI started."""

    def __init__(self):
        self.installed = self.left = False
        self.comm = None
        self.place = ""
        self.exit_code = 0
        self.hook_before = sys.excepthook
        self.at_leave: list[Callable[[], None]] = []


_job = _Job()


def install() -> None:
    """Take over uncaught exceptions and, in a process that a launcher started, those of threads and ``sys.exit``. Once."""
    if _job.installed:
        return
    _job.installed, _job.hook_before = True, sys.excepthook
    sys.excepthook = _on_exception
    if launcher_rank() is not None:
        threading.excepthook = _on_thread_exception
        sys.exit = _exit
        atexit.register(_leave)


def attach(mpi) -> None:
    """From now on agree with the other ranks about leaving, on a communicator for this purpose alone. Comm: makes it."""
    install()
    if _job.comm is None:
        _job.comm = mpi.COMM_WORLD.Dup()


def describe(place: str) -> None:
    """Set the coordinates that messages show for this rank."""
    _job.place = place


def at_leave(action: Callable[[], None]) -> None:
    """Register what is done when all ranks leave, or when this one ends the job."""
    _job.at_leave.append(action)


def rank_text() -> str:
    """Return ``rank 3 {'data': 1, 'model': 1}``."""
    rank = _job.comm.Get_rank() if _job.comm is not None else launcher_rank()
    return f"rank {rank if rank is not None else 0}" + (f" {_job.place}" if _job.place else "")


def report(error: MeshMpiError) -> int:
    """Print an error of the user's as all ranks should see it and return the exit code, 2.

    Raised by all ranks alike: the speaking rank prints its text. Raised here alone: this rank prints it and ends the job.
    """
    text = f"{type(error).__name__}: {error}"
    if launcher_rank() is None:
        _print(text, True)
        return ERROR_CODE
    _join(f"{rank_text()}: {text}")
    codes = _agree(name_key(text) >> 1, GRACE_S)
    if codes is None:
        _print(f"{rank_text()}: {text}", True)
        end_job(ERROR_CODE)
    elif len(dict.fromkeys(codes)) == 1:
        _print(text, is_speaker())
    else:
        _print(f"{rank_text()}: {text}", True)
    return ERROR_CODE


def end_job(code: int) -> None:
    """End every rank of the job, this one included, within seconds. Does not return under MPI."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    for action in _job.at_leave:
        action()
    if launcher_rank() is None:
        os._exit(code)
    _kill_from_a_thread(KILL_S, "")
    _join("")
    _job.comm.Abort(code)


def _kill_after(seconds: float, text: str) -> Callable[[], None]:
    """Print ``text`` and kill this process after a while, unless what is returned is called: a dead rank makes every launcher end the job.

    Another process does it: no thread of this one runs while it waits in MPI_Init, which mpi4py calls with the interpreter's lock held.
    """
    loop = 'i=0; while [ $i -lt "$1" ]; do sleep 0.1; kill -0 "$3" 2>&- || exit; i=$((i+1)); done; ' \
        '[ -z "$2" ] || printf "%s\\n" "$2" >&2; kill -9 "$3" 2>&-'
    try:
        killer = subprocess.Popen(["/bin/sh", "-c", loop, "sh", str(round(10 * seconds)), text, str(os.getpid())], stdout=subprocess.DEVNULL)
    except OSError:  # no process to be had: a thread is better than nothing
        return _kill_from_a_thread(seconds, text)
    return lambda: (killer.kill(), killer.wait())


def _kill_from_a_thread(seconds: float, text: str) -> Callable[[], None]:
    """As :func:`_kill_after`, where nothing is called that keeps the interpreter's lock."""
    done = threading.Event()

    def kill() -> None:
        if not done.wait(seconds):
            _print(text, bool(text))
            os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()
    return done.set


def _join(text: str, code_without_mpi: int = ERROR_CODE) -> None:
    """Start MPI if this rank failed before it did: the others wait for it in MPI_Init, where nothing else could reach them.

    If they are elsewhere, ``text`` is printed and this process killed, which they cannot miss.
    """
    if _job.comm is None:
        rescued = _kill_after(KILL_S, text)
        try:
            attach(start_mpi())
        except LaunchError:  # no MPI library, or not the launcher's: it fails alike on every rank
            _print(text, bool(text) and is_speaker())
            rescued()
            if not is_speaker():
                time.sleep(GRACE_S)  # the first to go ends the job: not before the text is out
            os._exit(code_without_mpi)
        rescued()


def _print(text: str, really: bool) -> None:
    if really:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.write(text + "\n")
            sys.stderr.flush()


def _on_exception(kind, error, trace) -> None:
    interactive = hasattr(sys, "ps1") or sys.flags.interactive
    if issubclass(kind, MeshMpiError) and not interactive:
        raise SystemExit(report(error))  # raised in the hook, it sets the exit code
    if launcher_rank() is None:
        return _job.hook_before(kind, error, trace)
    if issubclass(kind, KeyboardInterrupt):
        _print(f"{rank_text()}: interrupted", True)
        end_job(130)
    _print(f"{rank_text()} failed and ends the job:\n{''.join(traceback.format_exception(kind, error, trace))}".rstrip(), True)
    end_job(1)


def _on_thread_exception(args) -> None:
    if args.exc_type is SystemExit:
        return
    name = args.thread.name if args.thread is not None else "a thread"
    trace = "".join(traceback.format_exception(args.exc_type, args.exc_value, args.exc_traceback))
    _print(f"{rank_text()}: thread {name!r} failed and ends the job:\n{trace}".rstrip(), True)
    end_job(1)


def _exit(status=None, /) -> None:
    """``sys.exit`` that remembers its code: Python does not tell exit handlers."""
    _job.exit_code = 0 if status is None else status if isinstance(status, int) else 1
    raise SystemExit(status)


def _leave() -> None:
    """Runs at the end of the process, before MPI is finalised: wait for the others, or end them if this rank fails alone."""
    code = _job.exit_code & 0xFF
    if _job.comm is None:
        if not code:
            return  # the command needs no other rank: explain, a script that only compiles
        _join(f"{rank_text()} left with exit code {code} before MPI started, and ends the job.", code)
    if not _job.left and _agree(0, GRACE_S if code else None) is None:
        _print(f"{rank_text()} left with exit code {code} while others are still running, and ends the job.", True)
        end_job(code)
    for action in _job.at_leave:
        action()


def _agree(word: int, timeout_s: float | None) -> list[int] | None:
    """Return the word that each rank left with, once all leave; None if they do not within ``timeout_s``."""
    import numpy as np

    _job.left = True
    mine, all_words = np.array([word], np.int64), np.zeros(_job.comm.Get_size(), np.int64)
    request = _job.comm.Iallgather(mine, all_words)
    return all_words.tolist() if patience.wait(request, timeout_s) else None

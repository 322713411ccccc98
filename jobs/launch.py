"""Start N ranks of a command under the mpiexec that fits the MPI library.

    mesh-mpi launch -n 4 -- bench runs/bench_lm.yaml        a command of mesh-mpi
    mesh-mpi launch -n 2 -- train.py --steps 10             a Python script
    mesh-mpi launch -n 2 --mpiexec /usr/bin/mpiexec -- train.py

mpiexec is --mpiexec, else $MESH_MPI_MPIEXEC, else the one beside the Python interpreter, else the first on PATH if it is
of the same vendor as the MPI library that mpi4py loads. An Open MPI or MPICH given by name brings its own library along.
Ctrl-C and SIGTERM reach the ranks as SIGUSR1 (save and end); a second one kills them.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from mesh_mpi.errors import LaunchError, nearest
from mesh_mpi.jobs import COMMANDS

MOST_RANKS_A_CORE = 32  # more is a slip of the finger, and takes the machine down
THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
_ABIS = {"Open MPI": ("openmpi", "libmpi.so.40"), "MPICH": ("mpich", "libmpi.so.12"), "Intel MPI": ("impi", "libmpi.so.12")}
_LIBRARY_PROBE = """
import mpi4py
mpi4py.rc(initialize=False, finalize=False)
from mpi4py import MPI
name, version = MPI.get_vendor()
print(name, ".".join(map(str, version)), sep="\\t")
"""


class Vendor(NamedTuple):
    """Whose MPI it is, and its version: ("Open MPI", "4.1.4")."""

    name: str
    version: str

    def __str__(self):
        return f"{self.name} {self.version}".strip()


class Plan(NamedTuple):
    """What will be started: the whole command line, what is added to the environment, and a line that says so."""

    command: list[str]
    environment: dict[str, str]
    note: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``mesh-mpi launch``."""
    parser.add_argument("-n", type=int, required=True, metavar="N", help="number of ranks")
    parser.add_argument("--mpiexec", metavar="PATH", help="the mpiexec to use")
    parser.add_argument("--threads", type=int, metavar="K", help="threads of each rank (default: cores of this node // ranks on it)")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND ...",
                        help="a command of mesh-mpi, a .py file, or any program")


def run(arguments: argparse.Namespace) -> int:
    """Start the ranks, pass signals on, and return mpiexec's exit code (128 + n after a death by signal n)."""
    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    plan = prepare(arguments.n, command, mpiexec=arguments.mpiexec, threads=arguments.threads)
    print(plan.note, file=sys.stderr, flush=True)
    return supervise(plan)


def prepare(n: int, command: list[str], mpiexec: str | None = None, threads: int | None = None,
            environment: Mapping[str, str] = os.environ) -> Plan:
    """Work out how ``n`` ranks of ``command`` are started. Raises LaunchError if mpiexec and library do not fit."""
    if n < 1:
        raise LaunchError(f"launch: -n is {n}. Give a number of ranks of at least 1.")
    if threads is not None and threads < 1:
        raise LaunchError(f"launch: --threads is {threads}. Give at least 1, or leave it out.")
    if not command:
        raise LaunchError("launch: no command is given. Write for example: mesh-mpi launch -n 4 -- bench runs/bench_lm.yaml")
    most = MOST_RANKS_A_CORE * _cores() * _n_nodes(environment)
    if n > most:
        raise LaunchError(f"launch: {n} ranks on {_n_nodes(environment)} node(s) of {_cores()} cores are more than {MOST_RANKS_A_CORE} a core. "
                          f"Give -n {most} at most here, or ask the batch system for more nodes; mesh-mpi explain plans any number without starting it.")
    path, origin = _find_mpiexec(mpiexec or environment.get("MESH_MPI_MPIEXEC"))
    vendor = mpiexec_vendor(path)
    added, said = _fitting_library(path, origin, vendor, environment)
    k = threads or max(1, _cores() // -(-n // _n_nodes(environment)))
    for name in THREAD_VARIABLES:
        if threads or not re.fullmatch(r"[1-9]\d*(,.*)?", environment.get(name, "")):  # 0 and words would mean all cores to each rank
            added[name] = str(k)
    added["MESH_MPI_WORLD_SIZE"] = str(n)
    flags = ["-n", str(n)]
    if vendor.name == "Open MPI":
        flags += ["--bind-to", "none"] + [word for name in sorted(added) for word in ("-x", name)]
        added.update({"OMPI_MCA_rmaps_base_oversubscribe": "1", "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"})
        if hasattr(os, "geteuid") and os.geteuid() == 0:
            added.update({"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"})
    each = added.get(THREAD_VARIABLES[0]) or environment[THREAD_VARIABLES[0]]
    note = f"launch: ranks {n}, threads of each {each}, {path} ({vendor}, {origin}){said}"
    return Plan([str(path), *flags, *_program(command)], added, note)


def supervise(plan: Plan) -> int:
    """Run a plan's mpiexec to its end, passing signals on; return the exit code."""
    def pass_on(number, frame):
        received.append(number)
        if number == signal.SIGUSR1 or sum(s != signal.SIGUSR1 for s in received) == 1:
            process.send_signal(signal.SIGUSR1)
            _tell("launch: the ranks are asked to save and stop" + ("; once more ends them at once" if number != signal.SIGUSR1 else ""))
        else:
            _tell("launch: the ranks are ended")
            stop(process)

    received: list[int] = []
    process = subprocess.Popen(plan.command, env={**os.environ, **plan.environment}, start_new_session=True, preexec_fn=_end_with_parent())
    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    try:
        code = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return 128 - code if code < 0 else code


def _tell(text: str) -> None:
    with contextlib.suppress(OSError):  # also from a handler, where print may not be
        os.write(2, f"{text}\n".encode())


def _end_with_parent() -> Callable[[], None] | None:
    """Return what makes a new process get SIGTERM when this one is killed, which could pass nothing on (Linux; else None)."""
    try:
        prctl = ctypes.CDLL(None).prctl
    except (OSError, AttributeError):
        return None
    return lambda: prctl(1, int(signal.SIGTERM))  # PR_SET_PDEATHSIG


def stop(process: subprocess.Popen) -> None:
    """Kill a process that leads its own group, its group and all its descendants, at once.

    mpiexec moves its ranks into groups and sessions of their own, and those of Open MPI outlive a killed mpiexec.
    """
    doomed = _descendants(process.pid)
    for pid in (-process.pid, *doomed):
        try:
            os.kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue  # it ended by itself meanwhile


def mpiexec_vendor(path: Path) -> Vendor:
    """Return whose mpiexec it is, from what it says about itself."""
    try:
        said = subprocess.run([str(path), "--version"], capture_output=True, text=True, timeout=30, stdin=subprocess.DEVNULL).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise LaunchError(f"launch: {path} --version does not run: {error}. Give another with --mpiexec.") from None
    for name, pattern in (("Intel MPI", r"Intel\(R\) MPI Library.*?Version\s+([\d.]+)"),
                          ("Open MPI", r"\((?:OpenRTE|Open MPI|PRRTE|PRTE)\)\s+([\d.]+)"),
                          ("MPICH", r"HYDRA build details:.*?Version:\s+([\d.]+)")):
        found = re.search(pattern, said, re.DOTALL)
        if found:
            return Vendor(name, found[1])
    return Vendor("unknown MPI", "")


def library_vendor(environment: Mapping[str, str]) -> Vendor | None:
    """Return whose MPI library mpi4py loads under ``environment``, asked in another process that starts no MPI; None if none loads."""
    asked = subprocess.run([sys.executable, "-c", _LIBRARY_PROBE], capture_output=True, text=True, timeout=60,
                           env=dict(environment), stdin=subprocess.DEVNULL)
    name, tab, version = asked.stdout.strip().partition("\t")
    return Vendor(name, version) if asked.returncode == 0 and tab else None


def _find_mpiexec(given: str | None) -> tuple[Path, str]:
    """Return the mpiexec to use and where it comes from, in words."""
    if given:
        found = shutil.which(given)
        if not found:
            raise LaunchError(f"launch: there is no program {given!r}. Give the path of an mpiexec with --mpiexec.")
        return Path(found), "given"
    beside = _beside()
    if os.access(beside, os.X_OK):
        return beside, "beside the interpreter"
    found = shutil.which("mpiexec") or shutil.which("mpirun")
    if not found:
        raise LaunchError(f"launch: there is no mpiexec beside {sys.executable} and none on PATH. "
                          "Install one (pip install 'mesh-mpi[mpi]'), load your site's MPI module, or give --mpiexec PATH.")
    return Path(found), "from PATH"


def _beside() -> Path:
    return Path(sys.executable).parent / "mpiexec"


def _fitting_library(path: Path, origin: str, vendor: Vendor, environment: Mapping[str, str]) -> tuple[dict[str, str], str]:
    """Return the variables that make mpi4py load the library of this mpiexec, and words about it; LaunchError if none does."""
    forced = any(environment.get(name) for name in ("MPI4PY_MPIABI", "MPI4PY_LIBMPI"))
    if origin.startswith("beside") and not forced:
        return {}, ""
    loaded = library_vendor(environment)
    if _fits(vendor, loaded):
        return {}, ""
    found = f"launch: {path} ({origin}) is {vendor}, but mpi4py loads {loaded or 'no MPI library'}"
    if origin != "given" or vendor.name not in _ABIS or forced:
        raise LaunchError(f"{found}: every rank would be alone or none would start. Give the mpiexec of that library with --mpiexec, "
                          f"or give --mpiexec {path} to use its own library, with MPI4PY_MPIABI and MPI4PY_LIBMPI unset.")
    abi, soname = _ABIS[vendor.name]
    library = _library_of(path, soname)
    if library is None:
        raise LaunchError(f"{found}, and no {soname} was found at its prefix. Set MPI4PY_MPIABI={abi} and MPI4PY_LIBMPI to its path.")
    added = {"MPI4PY_MPIABI": abi, "MPI4PY_LIBMPI": str(library)}
    path_too = {"LD_LIBRARY_PATH": os.pathsep.join(filter(None, [str(library.parent), environment.get("LD_LIBRARY_PATH")]))}
    tried = []
    for more in ({}, path_too):  # a library without a name of its own inside is found by the search path only
        loaded = library_vendor({**environment, **added, **more})
        if _fits(vendor, loaded):
            words = " ".join(f"{name}={value}" for name, value in {**added, **more}.items())
            return {**added, **more}, f"; its library instead of the default: {words}"
        tried.append(str(loaded or "nothing"))
    raise LaunchError(f"{found}, and with MPI4PY_MPIABI={abi} MPI4PY_LIBMPI={library}: {tried[0]}, with its folder on LD_LIBRARY_PATH as well: {tried[1]}. "
                      "Give another mpiexec, or set those variables yourself.")


def _fits(mpiexec: Vendor, library: Vendor | None) -> bool:
    same = library is not None and mpiexec.name == library.name
    return same and (mpiexec.name != "Open MPI" or mpiexec.version.split(".")[0] == library.version.split(".")[0])


def _library_of(mpiexec: Path, soname: str) -> Path | None:
    """Return the MPI library that belongs to an mpiexec: what its ompi_info is linked to, else the one at its prefix."""
    info, ldd = mpiexec.parent / "ompi_info", shutil.which("ldd")
    if soname == _ABIS["Open MPI"][1] and info.exists() and ldd:
        said = subprocess.run([ldd, str(info)], capture_output=True, text=True, timeout=30).stdout
        linked = re.search(rf"{re.escape(soname)} => (\S+)", said)
        if linked and Path(linked[1]).exists():
            return Path(os.path.normpath(linked[1]))
    for prefix in (mpiexec.parent.parent, mpiexec.resolve().parent.parent):
        for pattern in ("lib", "lib64", "lib/*-linux-gnu*", "lib/release"):
            for folder in sorted(Path(os.path.normpath(prefix)).glob(pattern)):
                if (folder / soname).exists():
                    return folder / soname
    return None


def _program(command: list[str]) -> list[str]:
    """Return the command line of a rank: our own commands and Python files run under this interpreter."""
    first = command[0]
    if first == "launch":
        raise LaunchError("launch: the command is launch itself. Name what the ranks shall run.")
    if first in COMMANDS:
        return [sys.executable, "-m", "mesh_mpi.jobs.main", *command]
    if first.endswith(".py"):
        return [sys.executable, *command]
    if first in ("python", "python3"):
        return [sys.executable, *command[1:]]
    if shutil.which(first) is None:
        raise LaunchError(f"launch: {first!r} is neither a command of mesh-mpi nor a program on the path.{nearest(first, COMMANDS)}")
    return list(command)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _n_nodes(environment: Mapping[str, str]) -> int:
    """Return the nodes of the Slurm allocation this runs in, 1 outside one."""
    given = environment.get("SLURM_JOB_NUM_NODES") or environment.get("SLURM_NNODES") or "1"
    return max(1, int(given)) if given.isdigit() else 1


def _descendants(pid: int) -> list[int]:
    """Return the processes below ``pid``, by the process table (none where there is no /proc)."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(entry.read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            continue  # it ended while the table was read
        children.setdefault(parent, []).append(int(entry.parent.name))
    found, waiting = [], [pid]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found

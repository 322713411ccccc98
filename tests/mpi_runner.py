"""Start ranks for a test: mpiexec in its own process group, with a hard time limit.

Invariant: nothing here imports mpi4py, and only processes that were started here are ever killed.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from mesh_mpi.jobs.launch import prepare, stop

ROOT = Path(__file__).resolve().parent.parent


class Result(NamedTuple):
    """What a job left: its exit code (negative after a death by signal), output, and whether it ran out of time."""

    returncode: int
    stdout: str
    stderr: str
    timed_out: bool

    def check(self) -> Result:
        """Return self, or raise an AssertionError with the whole output if the job did not end with 0 in time."""
        if self.returncode != 0 or self.timed_out:
            late = " after its time limit" if self.timed_out else ""
            raise AssertionError(f"the job ended with {self.returncode}{late}\n--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}")
        return self


def run_ranks(n: int, command: str | list, timeout: float = 60, mpi: str = "mpich", env: dict | None = None,
              threads: int = 1, cwd=None) -> Result:
    """Run ``command`` on ``n`` ranks and return its Result.

    ``command`` is a list of words (as after ``mesh-mpi launch -n N --``), the path of a .py file, or the text of a Python
    script. ``mpi`` is "mpich" (the mpiexec beside the interpreter) or "openmpi" (the system's). A job that takes more than
    ``timeout`` seconds is killed with all its processes and comes back with ``timed_out``.
    """
    with tempfile.TemporaryDirectory(prefix="mesh-mpi-") as folder:
        words = _words(command, Path(folder))
        environment = {name: value for name, value in os.environ.items() if name != "MESH_MPI_MPIEXEC"}
        path = mpiexec(mpi)
        plan = prepare(n, words, mpiexec=None if mpi == "mpich" else path, threads=threads, environment=environment)
        return run_group(plan.command, timeout, {**import_path(), **plan.environment, **(env or {})}, cwd)


def run_group(command: list[str], timeout: float, env: dict | None = None, cwd=None) -> Result:
    """Run any command as the leader of a new process group; kill that group and its descendants at the time limit."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(command, stdout=out, stderr=err, stdin=subprocess.DEVNULL, cwd=cwd or ROOT,
                                   env={**os.environ, **(env or {})}, start_new_session=True)
        timed_out = False
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:
            if process.poll() is None:
                stop(process)
                process.wait()
        texts = [stream.seek(0) or stream.read().decode(errors="replace") for stream in (out, err)]
    return Result(process.returncode, texts[0], texts[1], timed_out)


def mpiexec(mpi: str) -> str:
    """Return the path of the mpiexec of "mpich" (this environment's) or "openmpi" (the system's); a missing one fails the test."""
    candidates = {"mpich": [Path(sys.executable).parent / "mpiexec"],
                  "openmpi": [Path("/usr/bin/mpiexec.openmpi"), Path("/usr/bin/mpirun.openmpi"), Path("/usr/bin/mpiexec")]}[mpi]
    found = next((path for path in candidates if path.exists()), None)
    if found is None:
        how = "pip install 'mesh-mpi[mpi]'" if mpi == "mpich" else "apt-get install openmpi-bin libopenmpi-dev"
        raise AssertionError(f"{mpi}: there is no {' or '.join(map(str, candidates))}. This test needs it: {how}.")
    return str(found)


def import_path() -> dict[str, str]:
    """Return the variables with which another Python process imports the same mesh_mpi as this one."""
    package = Path(list(importlib.util.find_spec("mesh_mpi").submodule_search_locations)[0])
    if package.parent != ROOT:
        return {}
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))}


def _words(command: str | list, folder: Path) -> list[str]:
    if not isinstance(command, str):
        return [str(word) for word in command]
    if "\n" not in command and command.endswith(".py"):
        return [command]
    script = folder / "script.py"
    script.write_text(command)
    return [str(script)]

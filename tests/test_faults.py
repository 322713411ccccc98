"""Faults of a job under way, each started through launch and judged by mpiexec's exit code and what it printed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from mpi_runner import ROOT, import_path, mpiexec, run_group, run_ranks

from mesh_mpi.jobs import launch

PATH = {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]))}
STEPS = """
import os, signal, sys, time
import mesh_mpi as mm
from mesh_mpi.errors import MeshMpiError
from runtime.two_layers import batch_of, training_step

step = training_step("data:2;model:2", "batch:data;d_ff:model")
state = mm.State([step])
rank, x = state.machine.rank, batch_of()

def feed(slices):
    if rank == 2 and i == 3:
        print(f"at {time.time()}", flush=True)
        FAULT
    return x[slices]

for i in range(200):
    state.run(step, x=feed)
    time.sleep(0.01)
print("done")
"""
MPIS = pytest.mark.parametrize("mpi", ["mpich", "openmpi"])
WITHIN_S = 5.0  # of the fault, the job must have ended


def faulty(fault: str, mpi: str = "mpich", **env):
    """Run the steps with ``fault`` on rank 2 at step 3; return the result and the seconds from the fault to the end of the job."""
    result = run_ranks(4, STEPS.replace("FAULT", fault), timeout=60, mpi=mpi, env={**PATH, **env})
    ended = time.time()
    assert not result.timed_out, f"the job hangs\n{result.stdout}\n{result.stderr}"
    began = re.search(r"^at ([\d.]+)$", result.stdout, re.MULTILINE)
    assert began and "done" not in result.stdout, f"{result.stdout}\n{result.stderr}"
    return result, ended - float(began[1])


@MPIS
def test_an_exception_in_the_feed_of_one_rank_ends_the_job_within_5_s_with_its_traceback_and_coordinates(mpi):
    result, seconds = faulty("raise ValueError('no rows for me')", mpi)
    assert result.returncode != 0 and seconds < WITHIN_S
    assert "rank 2 {'data': 1, 'model': 0} failed and ends the job:\nTraceback" in result.stderr
    assert result.stderr.count("ValueError: no rows for me") == 1 and "in feed" in result.stderr


def test_an_error_of_the_user_s_in_the_feed_of_one_rank_ends_the_job_with_2_and_no_traceback():
    result, seconds = faulty("raise MeshMpiError('feed: 0 rows were found. Give some.')")
    assert result.returncode == 2 and seconds < WITHIN_S
    assert result.stderr.count("rank 2 {'data': 1, 'model': 0}: MeshMpiError: feed: 0 rows were found. Give some.") == 1
    assert "Traceback" not in result.stderr


@MPIS
def test_a_rank_that_is_killed_ends_the_job(mpi):
    result, seconds = faulty("os.kill(os.getpid(), signal.SIGKILL)", mpi)
    assert result.returncode != 0 and seconds < WITHIN_S


def test_a_rank_stuck_outside_the_collectives_is_reported_in_time_with_who_waits_where_and_the_job_ends(tmp_path):
    result, seconds = faulty("time.sleep(600)", MESH_MPI_WATCHDOG_S="2", MESH_MPI_WATCHDOG_DIR=str(tmp_path))
    text = result.stderr
    assert result.returncode != 0 and 2 < seconds < 2 + WITHIN_S
    waiting = re.search(r"watchdog: rank (\d) \{[^}]*\} has waited (\d\.\d) s in its collective number \d+: (.*)", text)
    assert waiting and float(waiting[2]) < 3.5 and waiting[1] != "2"
    assert re.match(r"step, instruction \d+: .*over (data|model|data\*model)\b", waiting[3]), "the collective, its axes"
    assert "rank 2 {'data': 1, 'model': 0} HAS NOT ARRIVED: is outside collectives" in text
    assert f"Python stacks of rank {waiting[1]} " in text and "Python stacks of rank 2 {'data': 1, 'model': 0}:" in text
    assert re.search(r'File ".*script\.py", line \d+ in feed', text), "the stack shows where it sleeps"
    assert not list(tmp_path.iterdir())


def test_a_watchdog_that_can_write_nowhere_says_so_and_still_reports_and_ends_the_job():
    result, seconds = faulty("time.sleep(600)", MESH_MPI_WATCHDOG_S="2", MESH_MPI_WATCHDOG_DIR="/dev/null/folder")
    assert result.returncode != 0 and 2 < seconds < 2 + WITHIN_S
    assert result.stderr.count("warning: the watchdog cannot write in /dev/null/folder: Not a directory.") == 1
    assert re.search(r"watchdog: rank \d \{[^}]*\} has waited \d\.\d s in its collective number \d+: step, instruction", result.stderr)
    assert "thread 'mesh_mpi watchdog' failed" not in result.stderr


def test_a_rank_that_exits_before_mpi_starts_ends_the_job_in_which_the_others_wait():
    start = time.monotonic()
    result = run_ranks(4, """
import os, sys
import mesh_mpi as mm
from mesh_mpi.runtime.machine import choose_machine
if os.environ["PMI_RANK"] == "1":
    sys.exit(3)
choose_machine(mm.Mesh("data:4"))
""", timeout=40, env=PATH)
    assert not result.timed_out and result.returncode != 0 and time.monotonic() - start < 15
    assert "rank 1 left with exit code 3 while others are still running, and ends the job." in result.stderr


def test_ranks_that_leave_alike_without_mpi_give_their_code_and_no_words():
    result = run_ranks(2, "import sys\nimport mesh_mpi\nsys.exit(3)", timeout=40, env=PATH)
    assert (result.returncode, result.stderr) == (3, "")


OPENMPI_LIBRARY = "/usr/lib/x86_64-linux-gnu/libmpi.so.40"
ALONE = "import mesh_mpi as mm\nfrom mesh_mpi.runtime.machine import choose_machine\nchoose_machine(mm.Mesh('data:4'))\n"


@pytest.mark.parametrize("starter, words, library", [
    ("mpich", (), {"MPI4PY_MPIABI": "openmpi", "MPI4PY_LIBMPI": OPENMPI_LIBRARY}),
    ("openmpi", ("--allow-run-as-root", "--oversubscribe"), {}),
])
def test_a_launcher_that_does_not_fit_the_library_is_recognised_before_anything_runs(starter, words, library):
    """Each process is rank 0 of 1; without the check each would train alone and write the same files."""
    command = [mpiexec(starter), *words, "-n", "4", sys.executable, "-c", ALONE]
    result = run_group(command, 40, {**PATH, **library})
    assert (result.returncode, result.timed_out) == (2, False), result.stderr
    found = r"meant 4 ranks and the MPI library \(Open MPI .*every process is rank 0 of 1" if library else r"meant 4 ranks and the MPI library is MPICH"
    assert len(re.findall(rf"LaunchError: launch: .*{found}", result.stderr)) == 1 and "mesh-mpi launch -n 4 -- ... finds it" in result.stderr
    assert "Traceback" not in result.stderr


DIFFERENT = """
import os
from mesh_mpi.config import load, to_yaml
import mesh_mpi as mm
from mesh_mpi.training.step import build
third = os.environ["PMI_RANK"] == "2"
"""


@pytest.mark.parametrize("script, words", [
    ("""
config = load("runs/quickstart.yaml", ["model.length=16", *(["seed=1"] if third else [])])
mm.State(build(config).programs, seed=config.seed, extra_digest=to_yaml(config))
""", ["seed is '0' on ranks 0-1, 3, '1' on rank 2", "configuration is "]),
    ("""
config = load("runs/quickstart.yaml", ["model.length=16", *(["optimizer.beta2=0.9"] if third else [])])
mm.State(build(config).programs, seed=config.seed)
""", ["program 0 (step) is ", " on ranks 0-1, 3, ", " on rank 2. "]),
    ("""
x = mm.placeholder("x", [mm.Dimension("batch", 8)])
with mm.scope("rank_2" if third else "rank"):
    y = mm.dropout(x, 0.5, "drop", mm.placeholder("step", (), "int64"), mm.placeholder("row_offset", (), "int64"), "batch")
mm.State(mm.compile({"y": y}, mesh_shape="data:4", layout="batch:data"))
""", ["program 0 (program) is ", " on ranks 0-1, 3, ", " on rank 2. "]),
])
def test_a_rank_with_another_configuration_or_model_is_refused_with_the_part_and_the_rank(script, words):
    result = run_ranks(4, DIFFERENT + script, timeout=60, env=PATH)
    assert (result.returncode, result.timed_out) == (2, False), result.stderr
    assert result.stderr.count("LaunchError: start: the ranks do not agree: ") == 1 and "Traceback" not in result.stderr
    for word in words:
        assert word in result.stderr


SIGNALLED = """
import os, signal, sys, time
import mesh_mpi as mm
from runtime.two_layers import batch_of, training_step
caught = []
signal.signal(signal.SIGUSR1, lambda *a: caught.append(1))
step = training_step("data:2;model:2", "batch:data;d_ff:model")
state, x, ends = mm.State([step]), batch_of(), sys.argv[2] == "ends"
open(f"{sys.argv[1]}/{os.getpid()}", "w").close()
while not (ends and max(state.machine.gather_objects(len(caught)))):
    state.run(step, x=x)
    if caught and not ends:
        os.write(1, b"caught\\n")
        while True:
            time.sleep(10)
os.write(1, b"saved\\n")
"""


def started(tmp_path: Path, how: str) -> tuple[subprocess.Popen, list[int]]:
    """Start four ranks that train until a signal comes; return launch's process and the ranks' once they run."""
    (tmp_path / "train.py").write_text(SIGNALLED)
    up = tmp_path / "up"
    up.mkdir()
    process = subprocess.Popen([sys.executable, "-m", "mesh_mpi.jobs.main", "launch", "-n", "4", "--threads", "1", "--", str(tmp_path / "train.py"), str(up), how],
                               stdout=subprocess.PIPE, text=True, env={**os.environ, **import_path(), **PATH})
    try:
        until(lambda: len(list(up.iterdir())) == 4)
    except AssertionError:
        launch.stop(process)
        raise
    return process, [int(file.name) for file in up.iterdir()]


def until(condition, seconds: float = 30) -> None:
    """Wait until a condition holds; fail after a while."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"nothing within {seconds} s"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    """Return whether a process runs (one that ended and was not collected does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_launch_reaches_ranks_that_train_and_they_end_in_order(tmp_path, number):
    process, ranks = started(tmp_path, "ends")
    try:
        process.send_signal(number)
        assert process.communicate(timeout=20)[0].split() == ["saved"] * 4 and process.returncode == 0
        until(lambda: not any(alive(pid) for pid in ranks))
    finally:
        launch.stop(process)


def test_a_second_signal_kills_the_ranks_and_leaves_no_process_behind(tmp_path):
    process, ranks = started(tmp_path, "stays")
    try:
        below = launch._descendants(process.pid)
        assert set(ranks) < set(below)
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "caught\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 128 + signal.SIGKILL
        until(lambda: not any(alive(pid) for pid in below))
    finally:
        launch.stop(process)

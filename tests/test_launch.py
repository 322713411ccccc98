"""The launcher: which mpiexec, whose library, how many threads, and what a signal does."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from mpi_runner import import_path, mpiexec, run_group, run_ranks

from mesh_mpi.errors import LaunchError
from mesh_mpi.jobs import launch
from mesh_mpi.log import launcher_rank, launcher_size

WHO = """
import os, sys
from mpi4py import MPI
world = MPI.COMM_WORLD
meant, threads = os.environ["MESH_MPI_WORLD_SIZE"], os.environ["OMP_NUM_THREADS"]
sys.stdout.write(f"rank {world.rank} of {world.size} meant {meant} threads {threads} by {MPI.get_vendor()[0]}\\n")  # one write: lines stay whole
"""
LAUNCH = [sys.executable, "-m", "mesh_mpi.jobs.main", "launch"]


def _launch(*words, timeout=60, **env):
    return run_group([*LAUNCH, *map(str, words)], timeout, {**import_path(), **env})


@pytest.mark.parametrize("mpi, vendor", [("mpich", "MPICH"), ("openmpi", "Open MPI")])
def test_ranks_start_under_either_mpi_from_the_same_environment(mpi, vendor):
    result = run_ranks(2, WHO, mpi=mpi).check()
    assert sorted(result.stdout.splitlines()) == [f"rank {r} of 2 meant 2 threads 1 by {vendor}" for r in range(2)]


def test_launch_says_which_library_it_put_in_the_default_one_s_place(tmp_path):
    (tmp_path / "who.py").write_text(WHO)
    result = _launch("-n", 2, "--mpiexec", mpiexec("openmpi"), "--", tmp_path / "who.py").check()
    assert "MPI4PY_MPIABI=openmpi MPI4PY_LIBMPI=" in result.stderr and "Open MPI" in result.stderr
    assert result.stdout.count("of 2") == 2


def test_a_library_forced_by_the_user_that_does_not_fit_is_refused_with_both_names(tmp_path):
    library = launch._library_of(Path(mpiexec("openmpi")), "libmpi.so.40")
    result = _launch("-n", 2, "--", "x.py", MPI4PY_MPIABI="openmpi", MPI4PY_LIBMPI=str(library))
    assert result.returncode == 2 and "MPICH" in result.stderr and "Open MPI" in result.stderr and "Traceback" not in result.stderr


def test_a_foreign_mpiexec_on_path_is_refused_and_the_same_one_given_by_name_is_not(monkeypatch, tmp_path):
    monkeypatch.setattr(launch.shutil, "which", lambda name, real=launch.shutil.which: mpiexec("openmpi") if name == "mpiexec" else real(name))
    monkeypatch.setattr(launch, "_beside", lambda: tmp_path / "mpiexec")
    with pytest.raises(LaunchError, match=r"from PATH\) is Open MPI .* mpi4py loads MPICH"):
        launch.prepare(2, ["x.py"])
    plan = launch.prepare(2, ["x.py"], mpiexec=mpiexec("openmpi"))
    assert plan.environment["MPI4PY_MPIABI"] == "openmpi"


def test_threads_share_the_cores_unless_the_user_has_set_them(monkeypatch):
    monkeypatch.setattr(launch, "_cores", lambda: 8)
    free = {k: v for k, v in os.environ.items() if k not in launch.THREAD_VARIABLES and not k.startswith("SLURM")}
    for n, environment, threads, expected in [(1, {}, None, "8"), (3, {}, None, "2"), (16, {}, None, "1"), (2, {}, 3, "3"),
                                              (16, {"SLURM_JOB_NUM_NODES": "4"}, None, "2")]:
        plan = launch.prepare(n, ["x.py"], threads=threads, environment={**free, **environment})
        assert {plan.environment[name] for name in launch.THREAD_VARIABLES} == {expected}
    for senseless in ("0", "-1", "all", ""):
        plan = launch.prepare(2, ["x.py"], environment={**free, "OPENBLAS_NUM_THREADS": senseless})
        assert plan.environment["OPENBLAS_NUM_THREADS"] == "4" and "threads of each 4," in plan.note
    plan = launch.prepare(2, ["x.py"], environment={**free, "OMP_NUM_THREADS": "5"})
    assert "OMP_NUM_THREADS" not in plan.environment and plan.environment["MKL_NUM_THREADS"] == "4"


def test_commands_scripts_and_programs_become_the_right_command_line():
    for words, expected in [(["bench", "c.yaml"], [sys.executable, "-m", "mesh_mpi.jobs.main", "bench", "c.yaml"]),
                            (["a.py", "-x"], [sys.executable, "a.py", "-x"]),
                            (["python", "-c", "1"], [sys.executable, "-c", "1"]),
                            (["hostname"], ["hostname"])]:
        assert launch.prepare(1, words).command[-len(expected):] == expected


def test_the_exit_code_is_that_of_mpiexec_and_a_bad_request_is_two():
    assert _launch("-n", 2, "--", "sh", "-c", "exit 5").returncode == 5
    for words, text in [(("-n", 0, "--", "x.py"), "-n is 0"), (("-n", 2), "no command"), (("-n", 2, "--threads", 0, "--", "x"), "--threads is 0"),
                        (("-n", 2, "--mpiexec", "/nowhere/mpiexec", "--", "x"), "/nowhere/mpiexec")]:
        result = _launch(*words)
        assert result.returncode == 2 and text in result.stderr and "Traceback" not in result.stderr


SIGNALLED = """
import os, signal, sys, time
caught = []
signal.signal(signal.SIGUSR1, lambda *a: caught.append(1))
open(sys.argv[1] + os.environ["PMI_RANK"], "w").close()
while not caught:
    time.sleep(0.01)
os.write(1, b"saved\\n")
if len(sys.argv) > 2:
    time.sleep(1000)
"""


def _until(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"nothing within {seconds} s"
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_the_first_signal_reaches_every_rank_as_usr1(tmp_path, number):
    (tmp_path / "wait.py").write_text(SIGNALLED)
    process = subprocess.Popen([*LAUNCH, "-n", "2", "--", str(tmp_path / "wait.py"), f"{tmp_path}/up"], stdout=subprocess.PIPE, text=True,
                               env={**os.environ, **import_path()})
    try:
        _until(lambda: len(list(tmp_path.glob("up*"))) == 2)
        process.send_signal(number)
        assert process.communicate(timeout=20)[0].split() == ["saved", "saved"]
        assert process.returncode == 0
    finally:
        launch.stop(process) if process.poll() is None else None


def test_a_second_signal_kills_the_ranks_wherever_mpiexec_has_put_them(tmp_path):
    (tmp_path / "wait.py").write_text(SIGNALLED)
    process = subprocess.Popen([*LAUNCH, "-n", "2", "--", str(tmp_path / "wait.py"), f"{tmp_path}/up", "stay"], stdout=subprocess.PIPE, text=True,
                               env={**os.environ, **import_path()})
    try:
        _until(lambda: len(list(tmp_path.glob("up*"))) == 2)
        ranks = launch._descendants(process.pid)
        process.send_signal(signal.SIGTERM)
        assert [process.stdout.readline(), process.stdout.readline()] == ["saved\n", "saved\n"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 128 + signal.SIGKILL
        assert len(ranks) >= 3
        _until(lambda: not any(_alive(pid) for pid in ranks))
    finally:
        launch.stop(process) if process.poll() is None else None


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("mpi", ["mpich", "openmpi"])
def test_a_job_over_its_time_limit_is_killed_with_all_its_ranks(mpi, tmp_path):
    result = run_ranks(2, ["sh", "-c", f"echo up > {tmp_path}/$$; sleep 1000"], timeout=4, mpi=mpi)
    assert result.timed_out and result.returncode == -signal.SIGKILL
    pids = [int(path.name) for path in tmp_path.iterdir()]
    assert len(pids) == 2
    _until(lambda: not any(_alive(pid) for pid in pids))


def test_the_launcher_and_the_help_of_every_command_load_no_mpi_no_hdf5_and_no_gpu_library():
    code = """
import sys
from mesh_mpi.jobs import COMMANDS, launch, main
for words in [["--help"], *([name, "--help"] for name in COMMANDS)]:
    try:
        main.main(words)
    except SystemExit as end:
        assert end.code == 0, (words, end.code)
loaded = [name for name in ("mpi4py", "h5py", "cupy", "threadpoolctl") if name in sys.modules]
assert not loaded, loaded
"""
    run_group([sys.executable, "-c", code], 30, import_path()).check()


def test_the_rank_is_read_from_a_launcher_s_own_variables_only():
    assert launcher_rank({}) is None and launcher_size({}) is None
    assert launcher_rank({"SLURM_PROCID": "3", "SLURM_NTASKS": "4"}) is None
    assert launcher_rank({"SLURM_PROCID": "0", "SLURM_STEP_ID": "4294967290"}) is None
    assert launcher_rank({"SLURM_PROCID": "3", "SLURM_STEP_ID": "0"}) == 3
    assert launcher_rank({"PMI_RANK": "1", "PMI_SIZE": "2"}) == 1 and launcher_size({"PMI_RANK": "1", "PMI_SIZE": "2"}) == 2
    assert launcher_size({"OMPI_COMM_WORLD_RANK": "1", "MESH_MPI_WORLD_SIZE": "4", "OMPI_COMM_WORLD_SIZE": "2"}) == 4


def test_a_number_of_ranks_that_would_take_the_machine_down_is_refused():
    with pytest.raises(LaunchError, match="100000 ranks on 1 node.* more than 32 a core"):
        launch.prepare(100_000, ["train.py"], environment={})


def test_a_misspelt_command_is_refused_before_anything_starts():
    with pytest.raises(LaunchError, match="'trian' is neither a command of mesh-mpi nor a program.* Did you mean 'train'"):
        launch.prepare(2, ["trian", "x.yaml"], environment=os.environ)

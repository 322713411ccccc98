"""No failure of one rank leaves the others hanging: exceptions, sys.exit, wrong sizes, different programs, a rank that never comes."""

from __future__ import annotations

import os
import re
import time

import pytest
from mpi_runner import ROOT, mpiexec, run_group, run_ranks

from mesh_mpi.errors import LaunchError
from mesh_mpi.runtime.watchdog import settings

PATH = {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]))}
START = """
import os, sys, threading, time
import numpy as np
import mesh_mpi as mm
from mesh_mpi.errors import MeshError
from mesh_mpi.runtime import abort
from mesh_mpi.runtime.machine import choose_machine
"""
MACHINE = START + """
machine = choose_machine(mm.Mesh("data:2;model:2"))
rank = machine.rank
began = time.time()
"""
SLACK_S = 4.0  # starting four interpreters on a busy machine


def run(script: str, n: int = 4, timeout: float = 40, env: dict | None = None, mpi: str = "mpich"):
    """Run a script on ranks; return its result and how long the job took."""
    start = time.monotonic()
    result = run_ranks(n, script, timeout=timeout, env={**PATH, **(env or {})}, mpi=mpi)
    assert not result.timed_out, f"the job hangs\n{result.stdout}\n{result.stderr}"
    return result, time.monotonic() - start


@pytest.mark.parametrize("mpi", ["mpich", "openmpi"])
def test_an_exception_on_one_rank_ends_the_job_with_its_coordinates_and_traceback(mpi):
    result, seconds = run(MACHINE + "if rank == 2: raise ValueError('broken here')\nmachine.maxima([1.0]); time.sleep(60)", mpi=mpi)
    assert result.returncode != 0 and seconds < 5 + SLACK_S
    assert "rank 2 {'data': 1, 'model': 0} failed and ends the job" in result.stderr and "ValueError: broken here" in result.stderr


def test_an_exception_in_a_thread_of_one_rank_ends_the_job():
    result, seconds = run(MACHINE + "if rank == 1: threading.Thread(target=lambda: 1 / 0, name='reader').start()\nmachine.maxima([1.0]); time.sleep(60)")
    assert result.returncode != 0 and seconds < 5 + SLACK_S
    assert "rank 1 {'data': 0, 'model': 1}: thread 'reader' failed" in result.stderr and "ZeroDivisionError" in result.stderr


@pytest.mark.parametrize("mpi", ["mpich", "openmpi"])
def test_sys_exit_on_one_rank_ends_the_job_with_its_code(mpi):
    result, seconds = run(MACHINE + "if rank == 3: sys.exit(7)\nmachine.maxima([1.0])", mpi=mpi)
    assert result.returncode == 7 and seconds < 5 + SLACK_S
    assert "rank 3 {'data': 1, 'model': 1} left with exit code 7" in result.stderr


@pytest.mark.parametrize("mpi", ["mpich", "openmpi"])
def test_an_error_that_all_ranks_raise_is_printed_once_and_all_end_with_2(mpi):
    result, _ = run(MACHINE + "raise MeshError('the same everywhere.')", mpi=mpi)
    assert result.returncode == 2
    assert result.stderr.count("MeshError: the same everywhere.") == 1 and "Traceback" not in result.stderr and "Abort" not in result.stderr


def test_an_error_on_one_rank_alone_is_printed_by_that_rank_and_ends_the_job_with_2():
    result, seconds = run(MACHINE + "if rank == 3: raise MeshError('only here.')\nmachine.maxima([1.0])")
    assert result.returncode == 2 and seconds < 5 + SLACK_S
    assert "rank 3 {'data': 1, 'model': 1}: MeshError: only here." in result.stderr and "Traceback" not in result.stderr


@pytest.mark.parametrize("error, code", [("ValueError", 1), ("MeshError", 2)])
def test_a_failure_before_mpi_starts_reaches_the_ranks_that_wait_in_its_start(error, code):
    result, seconds = run(START + f"abort.install()\nif os.environ['PMI_RANK'] == '1': raise {error}('too early')\nchoose_machine(mm.Mesh('data:4'))")
    # hydra kills ranks that are still in MPI_Init and on a loaded machine sometimes reports that (9) instead of the abort's code
    assert result.returncode in (code, 9) and seconds < 5 + SLACK_S
    assert re.search(rf"rank 1.*{error}: too early", result.stderr, re.DOTALL)


@pytest.mark.parametrize("mpi", ["mpich", "openmpi"])
def test_a_rank_that_fails_before_mpi_starts_when_the_others_have_ended_without_it_does_not_wait_for_them(mpi):
    result, seconds = run(START + "from mesh_mpi.log import launcher_rank\nif launcher_rank() == 0:\n    time.sleep(1)\n    raise MeshError('too late')",
                          n=2, mpi=mpi)
    assert result.returncode != 0 and seconds < 10 + SLACK_S
    assert "too late" in result.stderr


def test_commands_for_one_process_end_with_2_and_one_message_on_several_ranks():
    for command in (["inspect", "nowhere"], ["plot", "nowhere"], ["explain", "nowhere"], ["config", "nowhere"]):
        result = run_ranks(2, command, timeout=40)
        assert not result.timed_out and result.returncode == 2 and result.stderr.count("nowhere") == 1, (command, result)


def test_ranks_that_end_at_different_times_wait_for_one_another():
    result, _ = run(MACHINE + "time.sleep(2 * (rank == 1)); print('done'); sys.exit(0)")
    assert result.returncode == 0 and result.stdout.count("done") == 4


@pytest.mark.parametrize("n, mesh, words", [
    (4, "data:4;model:3", "MeshError: mesh [data=4, model=3] needs 12 ranks and 4 are running. Start with -n 12, or choose sizes whose product is 4.\n"),
    (2, "", "MeshError: mesh [] needs 1 rank and 2 are running."),
    (1, "data:2", "MeshError: mesh [data=2] needs 2 ranks and 1 is running. Start with -n 2, or choose sizes whose product is 1.\n"),
])
def test_the_number_of_ranks_must_be_the_mesh_s(n, mesh, words):
    result, _ = run(START + f"choose_machine(mm.Mesh('{mesh}'))", n)
    assert result.returncode == 2 and result.stderr.count(words) == 1 and "Traceback" not in result.stderr


def test_launcher_and_library_that_do_not_fit_are_recognised():
    """MPICH's mpiexec starts processes on Open MPI's library: each is rank 0 of 1."""
    library = next(p for p in ("/usr/lib/x86_64-linux-gnu/libmpi.so.40",) if os.path.exists(p))
    env = {**PATH, "MPI4PY_MPIABI": "openmpi", "MPI4PY_LIBMPI": library, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    command = [mpiexec("mpich"), "-n", "2", os.sys.executable, "-c", START + "choose_machine(mm.Mesh('data:2'))"]
    result = run_group(command, 40, env)
    assert (result.returncode, result.timed_out) == (2, False), result.stderr
    assert result.stderr.count("LaunchError: launch: the launcher meant 2 ranks and the MPI library (Open MPI") == 1
    assert "every process is rank 0 of 1" in result.stderr and "Traceback" not in result.stderr


@pytest.mark.parametrize("change, part", [("rate=0.1 + 0.1 * (rank == 2)", "program 0 (step) is "), ("", "configuration is 'c' on ranks 0-1, 3, 'd' on rank 2")])
def test_ranks_with_different_programs_or_configurations_do_not_start(change, part):
    result, _ = run(MACHINE + f"""
from runtime.two_layers import training_step
step = training_step("data:2;model:2", "batch:data;d_ff:model"{', ' + change if change else ''})
mm.State([step], extra_digest="d" if {not change} and rank == 2 else "c")
""")
    assert result.returncode == 2 and result.stderr.count("LaunchError: start: the ranks do not agree: ") == 1
    assert part in result.stderr and "on ranks 0-1, 3" in result.stderr and "Traceback" not in result.stderr


WAIT = MACHINE + """
x = np.ones(4, np.float32)
call = machine.bind("allreduce", ("model",), [x], [x], "sum", "step, instruction 3: %4[4] = allreduce over model(%2[4])")
call()
if rank == 1: time.sleep(TIME)
call()
machine.maxima([1.0])
print("done")
"""


def test_the_watchdog_says_who_waits_where_and_who_has_not_come(tmp_path):
    result, seconds = run(WAIT.replace("TIME", "60"), env={"MESH_MPI_WATCHDOG_S": "2", "MESH_MPI_WATCHDOG_DIR": str(tmp_path)})
    assert result.returncode != 0 and seconds < 12 + SLACK_S
    text = result.stderr
    assert re.search(r"watchdog: rank \d .* has waited \d\.\d s in its collective number \d+: ", text)
    assert re.search(r"rank 0 \{'data': 0, 'model': 0\}.*step, instruction 3: %4\[4\] = allreduce over model", text)
    assert "rank 1 {'data': 0, 'model': 1} HAS NOT ARRIVED: is outside collectives" in text
    assert text.count("Python stacks of rank 1 ") == 1 and "script.py" in text
    assert not list(tmp_path.iterdir())


def test_the_watchdog_can_be_off_or_only_tell(tmp_path):
    env = {"MESH_MPI_WATCHDOG_S": "1", "MESH_MPI_WATCHDOG_ABORT": "0", "MESH_MPI_WATCHDOG_DIR": str(tmp_path)}
    result, _ = run(WAIT.replace("TIME", "4"), env=env)
    assert result.returncode == 0 and result.stdout.count("done") == 4 and "HAS NOT ARRIVED" in result.stderr
    result, _ = run(WAIT.replace("TIME", "2"), env={**env, "MESH_MPI_WATCHDOG_S": "0"})
    assert result.returncode == 0 and "watchdog" not in result.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("variable, value", [("MESH_MPI_WATCHDOG_S", "ten"), ("MESH_MPI_WATCHDOG_S", "nan"), ("MESH_MPI_WATCHDOG_S", "-1"),
                                             ("MESH_MPI_WATCHDOG_S", "inf"), ("MESH_MPI_WATCHDOG_ABORT", "maybe")])
def test_a_setting_of_the_watchdog_that_means_nothing_is_refused_with_its_name_and_value(variable, value):
    with pytest.raises(LaunchError, match=f"^launch: {variable} is {value!r}. Give "):
        settings({variable: value})
    assert settings({}) == (600.0, True) and settings({"MESH_MPI_WATCHDOG_S": "0", "MESH_MPI_WATCHDOG_ABORT": "0"}) == (0.0, False)


def test_a_simulated_machine_is_chosen_without_a_launcher_whatever_slurm_s_allocation_says(monkeypatch):
    from mesh_mpi.mesh import Mesh
    from mesh_mpi.runtime.machine import choose_machine

    for name in ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_NTASKS", "4")
    monkeypatch.setenv("SLURM_PROCID", "0")
    assert choose_machine(Mesh("data:4")).is_simulated

"""Checkpoints on real ranks: the same file as the simulated machine's, the same error on every rank, no rank left hanging."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest
from checkpoint.small_model import COUNTERS, PATH, TEXT, assert_same, raw_arrays, state_of, trained, training, values
from mpi_runner import run_ranks

from mesh_mpi import checkpoint

START = """
import os, signal, sys, time
import mesh_mpi as mm
from mesh_mpi import checkpoint
from mesh_mpi.errors import CheckpointError, MeshMpiError
from mesh_mpi.mesh import Mesh
from mesh_mpi.runtime.machine import choose_machine
from mesh_mpi.runtime.simulated import SimulatedMachine
from checkpoint.small_model import COUNTERS, SEED, TEXT, assert_same, training, values
MESH, RUN, FOUND = {mesh!r}, {run!r}, {found!r}
train = training(MESH, zero_1={zero_1!r})
state = mm.State(train.programs, seed=SEED)
machine = state.machine
rank = machine.rank
"""


def script(body: str, mesh: str, run="", found="", zero_1: bool = False) -> str:
    return START.format(mesh=mesh, run=str(run), found=str(found), zero_1=zero_1) + body


@pytest.fixture(scope="module")
def trained_run(tmp_path_factory):
    """A run saved by simulated ranks after two steps."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    _, state = trained("data:2", n_steps=2)
    checkpoint.save(state, folder, 2, COUNTERS, TEXT)
    return folder


@pytest.mark.parametrize("mpi, mesh, zero_1", [("mpich", "data:2", True), ("mpich", "model:2", False), ("openmpi", "data:2;model:2", True),
                                              ("mpich", "model:4", False), ("mpich", "model:2;data:2", True)])
def test_ranks_load_what_was_saved_elsewhere_and_write_the_simulated_machines_file(trained_run, tmp_path, mpi, mesh, zero_1):
    body = """
from mesh_mpi.checkpoint import streaming
from mesh_mpi.runtime import communicator
path = checkpoint.find(FOUND)
counters = checkpoint.load(state, path, verified=True)
assert counters == {**COUNTERS, "step": 2, "seed": SEED}, counters
simulated = mm.State(train.programs, seed=SEED, machine=SimulatedMachine(Mesh(MESH)))
checkpoint.load(simulated, path) if rank == 0 else None
assert rank != 0 or all((p.array == simulated.read(n)[p.slices]).all() for n in state.saved_names for p in state.pieces(n))
checkpoint.save(state, RUN, 2, COUNTERS, TEXT)
streaming.BLOCK_BYTES, communicator.MESSAGE_BYTES = 1000, 64  # the ways of large variables
report = checkpoint.save(state, RUN, 3, COUNTERS, TEXT)
checkpoint.load(state, RUN)
print(report.path.name)
"""
    n = 4 if ";" in mesh or "4" in mesh else 2
    result = run_ranks(n, script(body, mesh, tmp_path, trained_run, zero_1), timeout=90, env=PATH, mpi=mpi).check()
    assert result.stdout.count("step_00000003") == n
    state = state_of(training(mesh, zero_1=zero_1), mesh)
    checkpoint.load(state, trained_run)
    simulated = checkpoint.save(state, tmp_path / "simulated", 2, COUNTERS, TEXT).path / "index.h5"
    assert raw_arrays(simulated) == raw_arrays(checkpoint.resolve(trained_run))
    for step in (2, 3):
        written = raw_arrays(tmp_path / "checkpoints" / f"step_0000000{step}" / "index.h5")
        assert {k: v for k, v in written.items() if k != "state/step"} == {k: v for k, v in raw_arrays(simulated).items() if k != "state/step"}


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("moment", ["collecting", "checking", "publishing"])
def test_a_rank_killed_while_saving_leaves_the_previous_checkpoint(trained_run, tmp_path, victim, moment):
    run_dir = tmp_path / "run"
    shutil.copytree(trained_run, run_dir)
    body = f"""
from mesh_mpi.checkpoint import folder, writer
def die(*_):
    if rank == {victim}:
        os.kill(os.getpid(), signal.SIGKILL)
if {moment!r} == "collecting":
    calls, collect = [0], machine.collect
    def collect_some(*arguments):
        calls[0] += 1
        die() if calls[0] == 10 else collect(*arguments)
    machine.collect = collect_some
elif {moment!r} == "checking":
    check = writer.verify_arrays
    writer.verify_arrays = lambda *arguments, **settings: (die(), check(*arguments, **settings))
else:
    folder.publish = lambda *arguments: die() or time.sleep(20)
    check = writer.verify_arrays
    writer.verify_arrays = lambda *arguments, **settings: (check(*arguments, **settings), rank == 1 and die())
checkpoint.load(state, RUN)
checkpoint.save(state, RUN, 3, COUNTERS)
print("survived")
"""
    result = run_ranks(2, script(body, "model:2", run_dir), timeout=60, env=PATH)
    assert result.returncode != 0 and not result.timed_out and "survived" not in result.stdout, result.stderr
    assert (run_dir / "checkpoints" / "latest").read_text() == "step_00000002\n"
    assert checkpoint.find(run_dir).parent.name == "step_00000002"
    state = state_of(training())
    checkpoint.load(state, run_dir)
    checkpoint.save(state, run_dir, 3)
    assert not list((run_dir / "checkpoints").glob("*.partial"))


def same_error(run_dir, words: str, body: str = "checkpoint.save(state, RUN, 3)", code: int = 2) -> None:
    """The error is caught with the same text on both ranks; uncaught, it is printed once and both end with 2."""
    caught = f"""
import hashlib
try:
    {body}
except MeshMpiError as error:
    print(f"<{{type(error).__name__}} {{hashlib.blake2b(str(error).encode()).hexdigest()}} {{{words!r} in str(error)}}>", flush=True)
"""
    result = run_ranks(2, script(caught, "model:2", run_dir), timeout=60, env=PATH).check()
    lines = re.findall("<.*?>", result.stdout)
    assert len(lines) == 2 and lines[0] == lines[1] and lines[0].endswith("True>"), result
    result = run_ranks(2, script(body, "model:2", run_dir), timeout=60, env=PATH)
    assert result.returncode == code and result.stderr.count(words) == 1 and "Traceback" not in result.stderr, result.stderr


def test_a_full_disk_is_the_same_error_on_every_rank_while_others_still_send(trained_run, tmp_path):
    place = tmp_path / "small"
    place.mkdir()
    room = checkpoint.resolve(trained_run).stat().st_size * 3 // 2
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={room}", "tmpfs", str(place)], check=True, timeout=20)
    try:
        shutil.copytree(trained_run, place / "run")
        same_error(place / "run", "save step 3: No space left on device (errno 28)",
                   "from mesh_mpi.checkpoint import folder; folder.free_bytes = lambda place: 1 << 60; checkpoint.save(state, RUN, 3)")
        assert sorted(p.name for p in (place / "run" / "checkpoints").iterdir()) == ["latest", "step_00000002"]
        assert checkpoint.find(place / "run").parent.name == "step_00000002"
    finally:
        subprocess.run(["umount", str(place)], check=True, timeout=20)


def test_a_read_only_folder_and_one_that_is_a_file_are_the_same_error_on_every_rank(trained_run, tmp_path):
    place = tmp_path / "fixed"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=5m", "tmpfs", str(place)], check=True, timeout=20)
    try:
        shutil.copytree(trained_run, place / "run")
        subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True, timeout=20)
        same_error(place / "run", "save step 3: Read-only file system (errno 30)")
    finally:
        subprocess.run(["umount", str(place)], check=True, timeout=20)
    (tmp_path / "taken").write_text("")
    same_error(tmp_path / "taken", "save step 3: Not a directory (errno 20)")


def test_permission_that_rank_0_lacks_is_the_same_error_on_every_rank(trained_run, tmp_path):
    run_dir = tmp_path / "run"
    shutil.copytree(trained_run, run_dir)
    body = """
real = os.listdir
def listdir(path="."):
    if rank == 0 and str(path).endswith("checkpoints"):
        raise PermissionError(13, "Permission denied")
    return real(path)
os.listdir = listdir
checkpoint.save(state, RUN, 3)
"""
    same_error(run_dir, "save step 3: Permission denied (errno 13)", "\n    ".join(f"exec({body!r})".splitlines()))
    assert checkpoint.find(run_dir).parent.name == "step_00000002"


def test_damage_and_differences_are_the_same_error_on_every_rank(trained_run, tmp_path):
    run_dir = tmp_path / "run"
    shutil.copytree(trained_run, run_dir)
    same_error(run_dir, "embedding/table[vocab=64, d_model=16] float32 is not in the model",
               "n = mm.Dimension('n', 8); w = mm.Variable('w', [n]); "
               "checkpoint.load(mm.State([mm.compile(outputs={'w': w}, mesh_shape='model:2', layout='n:model')]), RUN)")
    path = checkpoint.resolve(run_dir)
    raw = bytearray(path.read_bytes())
    held = values(trained("data:2", n_steps=2)[1])
    at = raw.index(held["embedding/table"].tobytes())
    raw[at + 9] ^= 1
    path.write_bytes(raw)
    same_error(run_dir, "parameters/embedding/table[vocab=64, d_model=16] has checksum", "checkpoint.load(state, RUN)")
    same_error(run_dir, "none of 1 can be used", "checkpoint.find(RUN)")
    assert_same(held, values(trained("data:2", n_steps=2)[1]))


def test_find_works_before_any_mesh_is_made_and_tells_once(trained_run, tmp_path):
    run_dir = tmp_path / "run"
    shutil.copytree(trained_run, run_dir)
    shutil.copytree(run_dir / "checkpoints" / "step_00000002", run_dir / "checkpoints" / "step_00000009")
    path = run_dir / "checkpoints" / "step_00000009" / "index.h5"
    path.write_bytes(path.read_bytes()[:5000])
    result = run_ranks(2, f"""
from pathlib import Path
from mesh_mpi import checkpoint
print(checkpoint.find({str(run_dir)!r}).parent.name)
""", timeout=60, env=PATH).check()
    assert result.stdout.count("step_00000002") == 2
    assert result.stderr.count("going on from step_00000002") == 1 and "step_00000009" in result.stderr

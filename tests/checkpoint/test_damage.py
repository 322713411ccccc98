"""Damaged, interrupted and missing checkpoints are named; a run goes on from the previous whole one."""

from __future__ import annotations

import os
import shutil
import subprocess

import h5py
import numpy as np
import pytest
from checkpoint.small_model import COUNTERS, TEXT, assert_same, trained, training, values

import mesh_mpi as mm
from mesh_mpi import checkpoint
from mesh_mpi.checkpoint import file as files
from mesh_mpi.checkpoint import folder as folders
from mesh_mpi.errors import CheckpointError

STEPS = (10, 20, 30)


@pytest.fixture(scope="module")
def run_of_three(tmp_path_factory):
    """A run with three checkpoints."""
    run_dir = tmp_path_factory.mktemp("three") / "run"
    _, state = trained(n_steps=1)
    for step in STEPS:
        checkpoint.save(state, run_dir, step, COUNTERS, TEXT)
    return run_dir


@pytest.fixture
def run_dir(run_of_three, tmp_path):
    """A copy to damage."""
    shutil.copytree(run_of_three, tmp_path / "run")
    return tmp_path / "run"


def file_of(run_dir, step):
    return run_dir / "checkpoints" / f"step_{step:08d}" / "index.h5"


def truncated(path):
    os.truncate(path, path.stat().st_size // 2)


def flipped(path):
    with h5py.File(path) as file:
        offset = file["parameters/embedding/table"].id.get_offset() + 100
    flip(path, offset)


def flip(path, offset):
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))


def without_a_dataset(path):
    with h5py.File(path, "r+") as file:
        del file["parameters/embedding/table"]


def of_another_version(path):
    with h5py.File(path, "r+") as file:
        file.attrs["format_version"] = 2


def of_another_format(path):
    with h5py.File(path, "r+") as file:
        file.attrs["format"] = "somebody's"


def half_written(path):
    with h5py.File(path, "r+") as file:
        del file.attrs["contents_checksum"]


def with_another_counter(path):
    with h5py.File(path, "r+") as file:
        file["state/step"][()] = 31


def with_a_transposed_label(path):
    with h5py.File(path, "r+") as file:
        file["parameters/embedding/table"].dims[0].label = "d_model"


DAMAGE = {
    truncated: "it cannot be read, OSError: .*truncated file",
    flipped: r"1 of \d+ arrays are damaged: parameters/embedding/table\[vocab=64, d_model=16\] has checksum [0-9a-f]{64} and [0-9a-f]{64} was saved",
    without_a_dataset: "its contents were changed, parameters/embedding/table is missing",
    of_another_version: "format_version is 2 and this mesh_mpi reads 1",
    of_another_format: "its format is \"somebody's\" and not 'mesh_mpi checkpoint'",
    half_written: "it was not finished, the attribute contents_checksum is missing",
    with_another_counter: "its contents were changed",
    with_a_transposed_label: "its contents were changed",
    os.remove: "it does not exist",
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_refused_by_name_and_the_previous_whole_one_is_used_and_said(run_dir, damage, capsys):
    damage(file_of(run_dir, 30))
    shown = str(file_of(run_dir, 30))
    with pytest.raises(CheckpointError, match=DAMAGE[damage]) as caught:
        checkpoint.find(run_dir, file_of(run_dir, 30))
    assert shown in str(caught.value)
    if damage is not os.remove:
        state = mm.State(training().programs)
        before = values(state)
        with pytest.raises(CheckpointError, match=DAMAGE[damage]):
            checkpoint.load(state, file_of(run_dir, 30).parent)
        assert_same(values(state), before)
    capsys.readouterr()
    assert checkpoint.find(run_dir) == file_of(run_dir, 20)
    said = capsys.readouterr().err
    assert "going on from step_00000020" in said and shown in said
    flipped(file_of(run_dir, 20))
    assert checkpoint.find(run_dir) == file_of(run_dir, 10)
    truncated(file_of(run_dir, 10))
    with pytest.raises(CheckpointError, match="none of 3 can be used: .*Restore one, or remove .* to start anew"):
        checkpoint.find(run_dir)


def test_any_flipped_byte_is_found_or_changes_nothing(run_of_three, tmp_path):
    path = tmp_path / "index.h5"
    whole = file_of(run_of_three, 30).read_bytes()
    expected = checkpoint.describe(file_of(run_of_three, 30))
    with h5py.File(file_of(run_of_three, 30)) as file:
        first_array = min(file[d.path].id.get_offset() for d in expected.datasets)
    draw = np.random.default_rng(0)
    found = 0
    for offset in [*draw.integers(0, first_array, 40), *draw.integers(0, len(whole), 60)]:
        path.write_bytes(whole)
        flip(path, int(offset))
        try:
            same = checkpoint.verify(path)
            assert same._replace(path=expected.path) == expected, f"byte {offset} changes what is read and is not noticed"
        except CheckpointError as fault:
            assert str(path) in str(fault)
            found += 1
    assert found > 40


def test_without_latest_or_with_one_that_names_a_removed_folder_the_newest_is_used_and_said(run_dir, capsys):
    latest = run_dir / "checkpoints" / "latest"
    assert latest.read_text() == "step_00000030\n" and checkpoint.find(run_dir) == file_of(run_dir, 30)
    assert capsys.readouterr().err == ""
    latest.unlink()
    assert checkpoint.find(run_dir) == file_of(run_dir, 30)
    assert "there is no file latest" in capsys.readouterr().err
    with pytest.raises(CheckpointError, match="neither index.h5 nor latest in it. Give one of the 3 checkpoints there: step_00000010, "):
        checkpoint.find(run_dir, run_dir)
    latest.write_text("step_00000030\n")
    shutil.rmtree(file_of(run_dir, 30).parent)
    assert checkpoint.find(run_dir) == file_of(run_dir, 20)
    assert "latest names 'step_00000030', which is not there" in capsys.readouterr().err
    with pytest.raises(CheckpointError, match="names 'step_00000030', where there is no index.h5"):
        checkpoint.find(run_dir, run_dir)
    for step in (10, 20):
        shutil.rmtree(file_of(run_dir, step).parent)
    with pytest.raises(CheckpointError, match="none of 0 can be used: latest names"):
        checkpoint.find(run_dir)


def test_a_run_without_checkpoints_has_none_and_a_path_that_does_not_exist_is_an_error(tmp_path):
    assert checkpoint.find(tmp_path) is None and checkpoint.find(tmp_path / "nothing") is None
    with pytest.raises(CheckpointError, match="it does not exist. Give a checkpoint's folder"):
        checkpoint.find(tmp_path, tmp_path / "nothing")


def test_the_last_save_is_the_newest_also_after_going_back(run_dir):
    _, state = trained(n_steps=1)
    checkpoint.save(state, run_dir, 15, keep_last=2)
    assert checkpoint.find(run_dir) == file_of(run_dir, 15)
    assert sorted(folders.steps_in(run_dir / "checkpoints")) == [15, 30]


@pytest.mark.parametrize("keep_last, keep_every, kept", [(1, 0, [7]), (3, 0, [5, 6, 7]), (2, 3, [3, 6, 7]), (1, 2, [2, 4, 6, 7]), (9, 0, [1, 2, 3, 4, 5, 6, 7])])
def test_the_last_n_and_every_m_th_are_kept(tmp_path, keep_last, keep_every, kept):
    n = mm.Dimension("n", 4)
    w = mm.Variable("w", [n])
    state = mm.State([mm.compile(outputs={"w": w})])
    for step in range(1, 8):
        state.assign(w, np.full(4, step, np.float32))
        checkpoint.save(state, tmp_path, step, keep_last=keep_last, keep_every=keep_every)
        assert (tmp_path / "checkpoints" / "latest").read_text() == f"step_{step:08d}\n"
    assert folders.steps_in(tmp_path / "checkpoints") == kept
    for step in kept:
        checkpoint.load(state, tmp_path / "checkpoints" / f"step_{step:08d}")
        assert state.read(w).tolist() == [step] * 4
    checkpoint.save(state, tmp_path, kept[0], {"again": 1}, keep_last=9)
    assert checkpoint.describe(tmp_path).values["again"] == 1 and folders.steps_in(tmp_path / "checkpoints") == kept


def test_what_an_interrupted_save_left_is_no_checkpoint_and_goes_with_the_next_save(run_dir):
    folder = run_dir / "checkpoints"
    shutil.copytree(folder / "step_00000030", folder / "step_00000040.partial")
    shutil.copytree(folder / "step_00000030", folder / "step_00000005.removed")
    (folder / "notes").mkdir()
    assert checkpoint.find(run_dir) == file_of(run_dir, 30)
    _, state = trained(n_steps=1)
    checkpoint.save(state, run_dir, 40)
    assert sorted(p.name for p in folder.iterdir()) == ["latest", "notes", "step_00000020", "step_00000030", "step_00000040"]


def mounted(place, options):
    """Mount a tmpfs at ``place`` and return the command that takes it off."""
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)], check=True, timeout=20)
    return ["umount", str(place)]


def test_a_full_disk_leaves_the_previous_checkpoint_and_nothing_else(tmp_path, monkeypatch):
    n = mm.Dimension("n", 600_000)
    state = mm.State([mm.compile(outputs={v.full_name: v for v in (mm.Variable("a", [n]), mm.Variable("b", [n]))})])  # 4.8 MB
    off = mounted(tmp_path / "small", "size=5m")
    try:
        run_dir = tmp_path / "small" / "run"
        checkpoint.save(mm.State([mm.compile(outputs={"a": mm.Variable("a", [mm.Dimension("n", 250_000)])})]), run_dir, 1)
        with pytest.raises(CheckpointError, match=r"save step 2: the checkpoint needs 4,865,536 bytes and .* has [\d,]+ free. Free some space"):
            checkpoint.save(state, run_dir, 2)
        monkeypatch.setattr(folders, "free_bytes", lambda folder: 1 << 60)  # a quota, or another program, takes what seemed free
        for step in (2, 3):
            with pytest.raises(CheckpointError, match=rf"save step {step}: No space left on device \(errno 28\), in .*Free some space"):
                checkpoint.save(state, run_dir, step)
            assert sorted(p.name for p in (run_dir / "checkpoints").iterdir()) == ["latest", "step_00000001"]
        assert checkpoint.find(run_dir) == file_of(run_dir, 1)
        assert shutil.disk_usage(run_dir).free > 3_000_000
    finally:
        subprocess.run(off, check=True, timeout=20)


def test_a_read_only_file_system_is_said(tmp_path):
    _, state = trained(n_steps=1)
    off = mounted(tmp_path / "fixed", "size=5m")
    try:
        run_dir = tmp_path / "fixed" / "run"
        checkpoint.save(state, run_dir, 1)
        subprocess.run(["mount", "-o", "remount,ro", str(tmp_path / "fixed")], check=True, timeout=20)
        with pytest.raises(CheckpointError, match=r"save step 2: Read-only file system \(errno 30\), in .*Choose a run_dir in which rank 0 may write"):
            checkpoint.save(state, run_dir, 2)
        assert checkpoint.find(run_dir) == file_of(run_dir, 1)
        checkpoint.load(state, run_dir)
    finally:
        subprocess.run(off, check=True, timeout=20)


def test_a_byte_that_changes_on_the_way_to_the_disk_is_found_before_the_checkpoint_has_its_name(run_dir, monkeypatch):
    _, state = trained(n_steps=1)
    real = files.PatientFile.close
    monkeypatch.setattr(files.PatientFile, "close", lambda self: (real(self), flipped(run_dir / "checkpoints" / "step_00000040.partial" / "index.h5")))
    with pytest.raises(CheckpointError, match=r"arrays are damaged: parameters/embedding/table"):
        checkpoint.save(state, run_dir, 40)
    assert checkpoint.find(run_dir) == file_of(run_dir, 30) and not list((run_dir / "checkpoints").glob("*.partial"))

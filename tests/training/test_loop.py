"""The training loop on simulated ranks: what a run leaves, how it goes on, what it refuses."""

from __future__ import annotations

import itertools
import shutil
import signal
import sys

import msgspec
import numpy as np
import pytest

from mesh_mpi.checkpoint import compare
from mesh_mpi.config import parse
from mesh_mpi.errors import CheckpointError, ConfigError, DataError, LayoutError, MeshMpiError
from mesh_mpi.training.loop import train
from mesh_mpi.training.run_folder import Metrics, RunFolder
from mesh_mpi.training.step import Training
from training.running import KEYS, configuration, lines, losses


def at_step(monkeypatch, number, before, after=lambda state: None):
    """Do something to the state before step ``number`` is taken, and after it."""
    take = Training.run_step

    def run_step(self, state, step, batch):
        if step == number:
            before(state)
        taken = take(self, state, step, batch)
        if step == number:
            after(state)
        return taken

    monkeypatch.setattr(Training, "run_step", run_step)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A whole run of 6 steps with checkpoints of steps 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("loop") / "whole"
    assert train(configuration(folder))[:2] == (0, 6)
    return folder


def test_a_run_leaves_metrics_checkpoints_its_configuration_and_its_environment(undisturbed):
    steps = lines(undisturbed)
    assert list(steps) == [1, 2, 3, 4, 5, 6] and all(list(line) == KEYS for line in steps.values())
    assert steps[3]["tokens"] == 8 * 16 and steps[3]["comm_bytes"] > 0 and steps[2]["learning_rate"] == 0.005
    assert steps[1]["tokens_per_s"] == pytest.approx(steps[1]["tokens"] / steps[1]["step_s"])
    assert list(lines(undisturbed, "valid_loss")) == [3, 6]
    assert sorted(p.name for p in (undisturbed / "checkpoints").iterdir()) == ["latest", "step_00000002", "step_00000004", "step_00000006"]
    assert "warmup_steps: 4" in (undisturbed / "config.resolved.yaml").read_text()
    assert "simulated, 4 ranks" in (undisturbed / "environment.txt").read_text()


def test_a_run_that_is_asked_to_stop_ends_with_85_and_goes_on_to_the_bit(undisturbed, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        at_step(patch, 3, lambda state: signal.raise_signal(signal.SIGUSR1))
        assert train(configuration(tmp_path))[:2] == (85, 3)
    assert train(configuration(tmp_path))[:2] == (0, 6)
    assert losses(tmp_path) == losses(undisturbed)
    assert {s: line["valid_loss"] for s, line in lines(tmp_path, "valid_loss").items()} == {
        s: line["valid_loss"] for s, line in lines(undisturbed, "valid_loss").items()}
    assert compare(tmp_path, undisturbed).same


def test_a_run_that_was_killed_takes_its_steps_since_the_checkpoint_again_without_double_lines(undisturbed, tmp_path, monkeypatch):
    def die(state):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        at_step(patch, 6, die)
        train(configuration(tmp_path))
    assert list(lines(tmp_path)) == [1, 2, 3, 4, 5]
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 6, "lo')
    assert train(configuration(tmp_path))[:2] == (0, 6)
    assert losses(tmp_path) == losses(undisturbed) and compare(tmp_path, undisturbed).same


@pytest.mark.parametrize("stopped_at", [3, 6])
@pytest.mark.parametrize("when", ["before", "within"])
def test_a_run_that_is_asked_to_stop_while_it_evaluates_saves_at_once_and_evaluates_when_it_goes_on(undisturbed, tmp_path, monkeypatch, stopped_at, when):
    evaluate = Training.evaluate

    def asked(self, state, batches):
        batches = iter(batches)
        first = [next(batches)] if when == "within" else []
        signal.raise_signal(signal.SIGUSR1)
        return evaluate(self, state, itertools.chain(first, batches))

    with monkeypatch.context() as patch:
        if stopped_at == 6:
            patch.setattr(Training, "evaluate", lambda self, state, batches: (asked if len(lines(tmp_path)) == 6 else evaluate)(self, state, batches))
        else:
            patch.setattr(Training, "evaluate", asked)
        assert train(configuration(tmp_path))[:2] == (85, stopped_at)
    assert stopped_at not in lines(tmp_path, "valid_loss")
    assert train(configuration(tmp_path))[:2] == (0, 6)
    assert losses(tmp_path) == losses(undisturbed) and compare(tmp_path, undisturbed).same
    assert [line["valid_loss"] for line in lines(tmp_path, "valid_loss").values()] == [
        line["valid_loss"] for line in lines(undisturbed, "valid_loss").values()]


@pytest.mark.parametrize("mesh_shape", ["model:4", "data:4", ""])
def test_a_run_goes_on_with_the_same_losses_on_another_mesh(undisturbed, tmp_path, mesh_shape):
    start = undisturbed / "checkpoints" / "step_00000002"
    assert train(configuration(tmp_path, mesh_shape, resume=str(start)))[:2] == (0, 6)
    found, expected = losses(tmp_path), losses(undisturbed)
    assert list(found) == [3, 4, 5, 6]
    assert max(abs(found[step] - expected[step]) for step in found) <= 2e-5


def test_a_run_goes_on_on_three_ranks_of_data_if_its_batch_divides_and_is_refused_otherwise(undisturbed, tmp_path):
    first, then = (configuration(tmp_path, mesh, batch=12, steps=steps) for mesh, steps in (("data:2;model:2", 4), ("data:3", 6)))
    assert train(first)[:2] == (0, 4)
    assert train(then)[:2] == (0, 6)
    whole = tmp_path / "whole"
    assert train(configuration(whole, batch=12))[:2] == (0, 6)
    found, expected = losses(tmp_path), losses(whole)
    assert list(found) == [1, 2, 3, 4, 5, 6] and max(abs(found[step] - expected[step]) for step in found) <= 2e-5
    with pytest.raises(MeshMpiError, match="8 sequences do not divide into 2 microbatches over 3 slices of the batch. Choose a multiple of 6"):
        train(configuration(undisturbed, "data:3", steps=8))


def test_a_run_that_would_see_other_data_is_refused(undisturbed):
    with pytest.raises(CheckpointError, match="seed 3 there and 4 here, so the run would see other data"):
        train(configuration(undisturbed, seed=4))
    with pytest.raises(CheckpointError, match="sequences a step 8 there and 16 here"):
        train(configuration(undisturbed, batch=16))


@pytest.mark.parametrize("key", ["resume", "init_from"])
def test_a_run_that_cannot_begin_leaves_no_folder_that_it_made(undisturbed, tmp_path, key):
    with pytest.raises(CheckpointError, match="it does not exist"):
        train(configuration(tmp_path / "runs" / "new", **{key: str(tmp_path / "nowhere")}))
    assert not (tmp_path / "runs" / "new").exists()
    (tmp_path / "mine").mkdir()
    with pytest.raises(CheckpointError):
        train(configuration(tmp_path / "mine", **{key: str(tmp_path / "nowhere")}))
    assert (tmp_path / "mine").exists()


def test_a_used_folder_is_refused_if_nothing_may_be_resumed_and_while_another_run_holds_it(undisturbed):
    with pytest.raises(ConfigError, match="resume: never was asked for and .* holds step_00000006"):
        train(configuration(undisturbed, resume="never"))

    class Alone:
        rank, broadcast = 0, staticmethod(lambda value: value)

    holder = RunFolder(str(undisturbed), Alone())
    try:
        with pytest.raises(ConfigError, match=r"is in use by another run \(process \d+"):
            train(configuration(undisturbed))
    finally:
        holder.close()


def test_a_damaged_newest_checkpoint_is_passed_over_and_named(undisturbed, tmp_path, capsys):
    shutil.copytree(undisturbed, tmp_path / "run")
    file = tmp_path / "run" / "checkpoints" / "step_00000006" / "index.h5"
    file.write_bytes(file.read_bytes()[:-2000])
    assert train(configuration(tmp_path / "run"))[:2] == (0, 6)
    said = capsys.readouterr().err
    assert "going on from step_00000004; " in said and "step_00000006" in said and "going on from step 4" in said
    assert losses(tmp_path / "run") == losses(undisturbed) and compare(tmp_path / "run", undisturbed).same


def test_a_step_without_a_finite_gradient_changes_nothing_and_is_marked(undisturbed, tmp_path, monkeypatch):
    kept = {}

    def spoil(state):
        kept["w"] = state.read("final_norm/scale")
        state.assign("final_norm/scale", np.full_like(kept["w"], np.nan))

    at_step(monkeypatch, 3, spoil, lambda state: state.assign("final_norm/scale", kept["w"]))
    assert train(configuration(tmp_path, steps=4))[:2] == (0, 4)
    found = lines(tmp_path)
    assert found[3]["skipped"] is True and found[3]["loss"] is None and found[3]["grad_norm"] is None
    assert "skipped" not in found[4] and found[2]["loss"] == losses(undisturbed)[2]


def test_a_run_ends_with_1_after_too_many_steps_without_a_finite_gradient(tmp_path, monkeypatch, capsys):
    at_step(monkeypatch, 3, lambda state: state.assign("final_norm/scale", np.full(16, np.nan, np.float32)))
    assert train(configuration(tmp_path, steps=20, train={"max_bad_steps": 2, "checkpoint_every": 1, "keep_last": 1}))[:2] == (1, 4)
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step_00000002\n"  # bad steps push no good checkpoint out
    assert "2 steps in a row had no finite gradient, up to step 4" in capsys.readouterr().err


def test_a_run_may_begin_with_the_parameters_of_another(undisturbed, tmp_path):
    assert train(configuration(tmp_path, steps=1, init_from=str(undisturbed), seed=9))[:2] == (0, 1)
    assert losses(tmp_path)[1] < losses(undisturbed)[1] - 0.1 and list(losses(tmp_path)) == [1]


def test_held_out_rows_for_synthetic_training_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="data.train is synthetic and data.valid bundled:sotu"):
        train(configuration(tmp_path, data={"train": "synthetic", "valid": "bundled:sotu"}))


@pytest.mark.parametrize("wrong", [{"layout": "heads:data;d_ff:model;batch:model;vocab:model"}, {"data": {"train": "no.h5"}}, {"data": {"train": "bundled:no"}}])
def test_a_configuration_that_cannot_run_leaves_no_folder(tmp_path, wrong):
    keys = {**msgspec.to_builtins(configuration(tmp_path / "run")), **wrong}
    with pytest.raises((LayoutError, DataError)):
        train(parse(keys))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("damage", [b"\xff\xfe\x00\n", b"[" * 100_000 + b"\n", b'{"step": ' + b"9" * 5000 + b"}\n", b"null\n"])
def test_damaged_lines_of_metrics_are_left_out_and_told_and_all_others_stay(undisturbed, tmp_path, capsys, damage):
    shutil.copytree(undisturbed, tmp_path / "run")
    file = tmp_path / "run" / "metrics.jsonl"
    file.write_bytes(damage + file.read_bytes())
    assert train(configuration(tmp_path / "run"))[:2] == (0, 6)
    assert losses(tmp_path / "run") == losses(undisturbed)
    assert "1 of 9 lines were damaged and are left out" in capsys.readouterr().err


def test_a_full_disk_under_the_metrics_ends_the_run_with_a_reason_and_the_last_checkpoint_goes_on(undisturbed, tmp_path, monkeypatch):
    def fill(metrics, path, last_step):
        metrics._file = open("/dev/full", "wb", buffering=0)

    with monkeypatch.context() as patch, pytest.raises(MeshMpiError, match="No space left on device, so the run ends. Its last checkpoint is None"):
        patch.setattr(Metrics, "_open", fill)
        train(configuration(tmp_path, train={"checkpoint_every": 4}))
    assert train(configuration(tmp_path))[:2] == (0, 6) and losses(tmp_path) == losses(undisturbed)


def test_event_files_hold_what_the_metrics_hold_and_a_resumed_run_s_steps_once(tmp_path, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with monkeypatch.context() as patch:
        at_step(patch, 2, lambda state: signal.raise_signal(signal.SIGTERM))
        assert train(configuration(tmp_path, steps=3, train={"tensorboard": True}))[:2] == (85, 2)
    assert train(configuration(tmp_path, steps=3, train={"tensorboard": True}))[:2] == (0, 3)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    found = {event.step: event.value for event in events.Scalars("loss")}
    assert {step: pytest.approx(loss, rel=1e-6) for step, loss in losses(tmp_path).items()} == found
    assert [event.step for event in events.Scalars("valid_loss")] == [3]


def test_without_the_package_event_files_are_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto.event_pb2", None)
    with pytest.raises(ConfigError, match=r"train.tensorboard needs the package tensorboard .*pip install 'mesh-mpi\[tensorboard\]'"):
        train(configuration(tmp_path, train={"tensorboard": True}))


def test_ctrl_c_without_a_launcher_asks_to_stop_and_a_second_one_ends():
    import os
    import signal

    from mesh_mpi.training.stop import StopRequest

    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            for _ in range(1000):  # the handler runs between two of these
                pass

"""The command train on real ranks, stopped through its launcher, and what evaluate and generate say of its checkpoint on them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import pytest
from mpi_runner import ROOT, import_path, mpiexec, run_ranks

from mesh_mpi.checkpoint import compare
from mesh_mpi.config import load
from mesh_mpi.jobs import launch
from mesh_mpi.training.loop import train

KEYS = ["step", "loss", "tokens", "step_s", "tokens_per_s", "comm_bytes", "comm_s", "grad_norm", "learning_rate"]
CONFIG = """
mesh_shape: "data:2;model:2"
layout: "batch:data;d_ff:model;heads:model;vocab:model"
sequences_per_batch: 8
seed: 3
model: {d_model: 16, d_ff: 32, heads: 4, d_kv: 4, layers: 1, vocab_size: 258, vocab_multiple: 4, length: 16, dropout: 0.1}
optimizer: {name: adam, clip_norm: 1.0}
schedule: {name: linear_warmup, learning_rate: 0.01, warmup_steps: 4}
data: {train: "bundled:sotu", valid: "bundled:sotu"}
train: {steps: 4, microbatches: 2, log_every: 1, evaluate_every: 4, evaluate_batches: 2}
"""
SLOWLY = """
import sys, time
from mesh_mpi.jobs.main import main
from mesh_mpi.training.step import Training

take = Training.run_step

def run_step(*arguments):
    time.sleep(0.1)
    return take(*arguments)

Training.run_step = run_step
sys.exit(main(sys.argv[1:]))
"""


def metrics(run_dir):
    """Return the lines of the steps."""
    return [line for line in map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines()) if "loss" in line]


def simulated(config, run_dir, steps):
    """Take the same steps on simulated ranks, undisturbed."""
    assert train(load(config, [f"run_dir={run_dir}", f"train.steps={steps}"])).code == 0


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """The path of the configuration."""
    path = tmp_path_factory.mktemp("train") / "tiny.yaml"
    path.write_text(CONFIG)
    return path


@pytest.fixture(scope="module")
def run(config):
    """A run of the command on four ranks, and what it said."""
    folder = config.parent / "runs" / "tiny"
    return folder, run_ranks(4, ["train", config], 90, cwd=config.parent).check().stderr


def test_the_command_leaves_metrics_a_checkpoint_its_configuration_and_its_environment(run):
    folder, said = run
    assert [line["step"] for line in metrics(folder)] == [1, 2, 3, 4] and all(list(line) == KEYS for line in metrics(folder))
    assert (folder / "checkpoints" / "latest").read_text() == "step_00000004\n"
    assert "sequences_per_batch: 8" in (folder / "config.resolved.yaml").read_text()
    assert "4 ranks, 4 on this node; MPICH" in (folder / "environment.txt").read_text()
    assert said.count("step 4/4") == 1 and "the entropy of the training tokens' frequencies is 3.0" in said
    assert f"done: 4 steps. The checkpoint is runs/tiny{os.sep}checkpoints" in said


def test_real_ranks_do_what_simulated_ones_do_to_the_bit(run, config, tmp_path):
    simulated(config, tmp_path, 4)
    assert [line["loss"] for line in metrics(tmp_path)] == [line["loss"] for line in metrics(run[0])]
    assert compare(tmp_path, run[0]).same


@contextlib.contextmanager
def stepping(words, run_dir, mpi, said):
    """Start launch with four slow ranks of ``words`` and yield its process once two steps were taken; nothing of it is left afterwards."""
    given = [] if mpi == "mpich" else ["--mpiexec", mpiexec(mpi)]
    process = subprocess.Popen([sys.executable, "-m", "mesh_mpi.jobs.main", "launch", "-n", "4", *given, "--", *words, "train.steps=1000"], stderr=said,
                               stdin=subprocess.DEVNULL, cwd=ROOT, env={**os.environ, **import_path()}, start_new_session=True)
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not ((run_dir / "metrics.jsonl").exists() and len(metrics(run_dir)) >= 2):
            time.sleep(0.05)
        yield process
    finally:
        if process.poll() is None:
            launch.stop(process)


@pytest.fixture
def slowly(config, tmp_path):
    """The words of a training that takes its steps slowly, in ``tmp_path / "run"``."""
    (tmp_path / "slowly.py").write_text(SLOWLY)
    return [str(tmp_path / "slowly.py"), "train", str(config), f"run_dir={tmp_path / 'run'}"]


@pytest.mark.parametrize("mpi", ["mpich", "openmpi"])
def test_sigterm_to_launch_saves_and_ends_with_85_and_the_same_command_goes_on_as_if_undisturbed(config, slowly, tmp_path, mpi):
    run_dir = tmp_path / "run"
    with open(tmp_path / "said", "w+") as said:
        with stepping(slowly, run_dir, mpi, said) as process:
            process.send_signal(signal.SIGTERM)
            code = process.wait(40)
        said.seek(0)
        text = said.read()
    assert code == 85, text
    stopped = len(metrics(run_dir))
    assert f"asked to stop; saved at step {stopped}. The same command goes on from there" in text
    run_ranks(4, [*slowly, f"train.steps={stopped + 2}"], 60, mpi).check()
    simulated(config, tmp_path / "whole", stopped + 2)
    assert [line["step"] for line in metrics(run_dir)] == list(range(1, stopped + 3))
    assert [line["loss"] for line in metrics(run_dir)] == [line["loss"] for line in metrics(tmp_path / "whole")]
    assert compare(run_dir, tmp_path / "whole").same


@pytest.mark.parametrize("mpi", ["mpich", "openmpi"])
def test_ranks_whose_launch_is_killed_do_not_go_on_without_it(slowly, tmp_path, mpi):
    below = []
    try:
        with open(tmp_path / "said", "w+") as said, stepping(slowly, tmp_path / "run", mpi, said) as process:
            below = launch._descendants(process.pid)
            process.kill()
            process.wait()
            deadline = time.monotonic() + 30
            while time.monotonic() < deadline and (left := [pid for pid in below if os.path.exists(f"/proc/{pid}")]):
                time.sleep(0.05)
    finally:
        for pid in below:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    assert len(below) >= 5 and left == [] and len(metrics(tmp_path / "run")) < 1000


def test_a_refusal_is_one_message_from_one_rank_and_ends_with_2(run, config):
    result = run_ranks(4, ["train", config, "seed=4"], 60, cwd=config.parent)
    assert result.returncode == 2 and result.stderr.count("seed 3 there and 4 here") == 1 and "Traceback" not in result.stderr


def test_evaluate_and_generate_say_the_same_on_real_ranks_as_in_one_process(run):
    script = """
import sys
from mesh_mpi.jobs.main import main
code = main(["evaluate", SOURCE, "--batches", "3", "float_type=float64"]) or main(["generate", SOURCE, "--prompt", "We", "--samples", "2", "--seed", "5",
                                                          "float_type=float64"])
sys.exit(code)
""".replace("SOURCE", repr(str(run[0])))
    said = run_ranks(4, script, 60).check().stdout.split("\n")  # alone: a text of an untrained model holds other ends of lines
    from mesh_mpi.training.evaluation import evaluate_checkpoint
    from mesh_mpi.training.generation import Choice, generate

    layout = ["mesh_shape=", "layout=''"]
    figures, expected = json.loads(said[1]), evaluate_checkpoint(str(run[0]), [*layout, "float_type=float64"], at_most=3).figures()
    assert figures == pytest.approx(expected, rel=1e-9) and figures["rows"] == 12
    samples = generate(str(run[0]), b"We", [*layout, "float_type=float64"], 100, Choice(seed=5), 2)
    assert "\n".join(said[2:]) == "".join((b"We" + s.text).decode("utf-8", "replace") + "\n" for s in samples)

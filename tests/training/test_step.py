"""The training step: invariance of layouts and microbatches, what it returns, what it leaves alone."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
from mpi_runner import run_ranks

import mesh_mpi as mm
from mesh_mpi.config import parse
from mesh_mpi.training.batches import SyntheticBatches
from mesh_mpi.training.measure import MeasuredStep
from mesh_mpi.training.step import build

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"
LAYOUT = "batch:data;d_ff:model;heads:model;vocab:model"


def example(name):
    """Return a program of docs/examples as a module."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def configuration(mesh_shape="", layout=None, microbatches=1, **keys):
    """A small model with dropout, Adam and clipping."""
    names = {part.split(":")[0] for part in mesh_shape.split(";")}
    rules = layout if layout is not None else ";".join(r for r in LAYOUT.split(";") if r.split(":")[1] in names)
    return parse({
        "mesh_shape": mesh_shape, "layout": rules, "sequences_per_batch": 8, "float_type": "float64",
        "model": {"d_model": 16, "d_ff": 32, "heads": 4, "d_kv": 4, "layers": 2, "vocab_size": 30, "vocab_multiple": 8, "length": 8, "dropout": 0.2},
        "optimizer": {"name": "adam", "clip_norm": 0.5, "weight_decay": 0.01},
        "schedule": {"name": "linear_warmup", "learning_rate": 0.01, "warmup_steps": 4}, "train": {"microbatches": microbatches}, **keys})


def train(config, n_steps=3, batches=None, feeds=None):
    """Return the metrics of each step and the final variables by name."""
    training = build(config)
    state = mm.State(training.programs, seed=5)
    batches = batches or SyntheticBatches(30, 8, 8, seed=2)
    metrics = [training.run_step(state, i, {**batches.feeds(i), **(feeds or {})}) for i in range(1, n_steps + 1)]
    return metrics, {name: state.read(name) for name in state.saved_names}


def same(one, two, tolerance=1e-11):
    for a, b in zip(one[0], two[0]):
        np.testing.assert_allclose(b, a, rtol=tolerance)
    assert one[1].keys() == two[1].keys()
    for name in one[1]:
        assert np.abs(one[1][name] - two[1][name]).max() <= tolerance * max(1.0, np.abs(one[1][name]).max()), name


def test_the_quick_matrix_of_layouts_is_within_its_bounds():
    matrix = example("layout_matrix")
    for float_type, (first_bound, bound) in matrix.BOUNDS.items():
        reference = matrix.run("", 1, float_type, 5)
        for mesh_shape, microbatches in matrix.QUICK:
            first, largest, bits = matrix.compare(matrix.run(mesh_shape, microbatches, float_type, 5), reference)
            assert bits and first <= first_bound and largest <= bound, (mesh_shape, microbatches, float_type, first, largest)


def test_the_matrix_would_notice_one_wrong_row_offset():
    """Dropout is at work, and rows are counted in the step's batch: without the offset the second microbatch has other masks."""
    right, wrong = train(configuration(microbatches=2), 1), None
    training = build(configuration(microbatches=2))
    state = mm.State(training.programs, seed=5)
    plain_run = state.run
    state.run = lambda program, **feeds: plain_run(program, **{**feeds, **({"row_offset": 0} if "row_offset" in feeds else {})})
    wrong = training.run_step(state, 1, SyntheticBatches(30, 8, 8, seed=2).feeds(1))
    assert abs(wrong.loss - right[0][0].loss) > 1e-4


@pytest.mark.parametrize("microbatches", [2, 4, 8])
@pytest.mark.parametrize("mesh_shape", ["", "model:2"])
def test_microbatches_take_the_same_step_as_one_program(microbatches, mesh_shape):
    same(train(configuration()), train(configuration(mesh_shape, microbatches=microbatches)))


def test_microbatches_of_unequal_numbers_of_targets_take_the_same_step():
    targets = np.where(np.arange(64).reshape(8, 8) % 13 < 2, np.arange(64).reshape(8, 8) % 30, -1).astype(np.int32)
    targets[4:] = -1
    targets[5, 3] = 7
    one, two = (train(configuration(microbatches=k), feeds={"targets": targets}) for k in (1, 4))
    assert one[0][0].n_tokens == (targets >= 0).sum()
    same(one, two)


@pytest.mark.parametrize("storage", [{"optimizer": "d_model:data"}, {"optimizer": "d_model:data", "parameters": "d_model:data"}])
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("optimizer", ["adam", "adafactor"])
def test_split_slots_and_parameters_take_the_same_step(storage, microbatches, optimizer):
    section = {"name": optimizer, "clip_norm": 0.5, **({"min_dim_size_to_factor": 4} if optimizer == "adafactor" else {})}
    same(train(configuration(optimizer=section)), train(configuration("data:2;model:2", microbatches=microbatches, storage=storage, optimizer=section)))


def test_a_split_residual_stream_takes_the_same_step():
    same(train(configuration()), train(configuration("data:2;model:2", LAYOUT + ";length:model")))


def test_data_parallel_reduces_the_gradients_once():
    config = configuration("data:2", float_type="float32")
    training = build(config)
    records = training.step_program.collectives()
    payload = 4 * (training.step_program.n_parameters + 2)  # gradients, loss and count
    assert sum(r.payload_bytes for r in records) == payload
    pieces = build(configuration("data:2", microbatches=4, float_type="float32"))
    first, more, apply = (p.collectives() for p in pieces.step_programs)
    assert not first and not more and sum(r.payload_bytes for r in apply) == payload


def test_split_slots_cost_one_scatter_and_one_gather_of_each_variable_and_the_norm_scalars_only():
    program = build(configuration("data:2", storage={"optimizer": "d_model:data"})).step_program
    by_name = {}
    for r in program.collectives():
        by_name.setdefault(r.name, []).append(r.payload_bytes)
    assert sum(by_name["reduce_scatter"]) == sum(by_name["allgather"]) == 8 * program.n_parameters
    assert sum(by_name["allreduce"]) == 8 * 3  # loss, count and norm


def test_a_step_that_is_not_finite_leaves_every_variable_to_the_bit():
    for k in (1, 2):
        training = build(configuration(microbatches=k))
        state = mm.State(training.programs, seed=5)
        state.assign("embedding/table", np.full((32, 16), 1e200))
        before = {name: state.read(name) for name in state.saved_names}
        metrics = training.run_step(state, 1, SyntheticBatches(30, 8, 8, seed=2).feeds(1))
        assert not metrics.applied
        for name, value in before.items():
            assert state.read(name).tobytes() == value.tobytes(), name


def test_feeds_may_be_arrays_or_callables():
    batches = SyntheticBatches(30, 8, 8, seed=2)
    whole = slice(0, 8), slice(0, 8)
    config = configuration("data:2", microbatches=2)
    one = train(config, 1)
    two = train(config, 1, feeds={name: give(whole) for name, give in batches.feeds(1).items()})
    assert one[0] == two[0]


def test_evaluation_drops_nothing_and_is_the_mean_over_all_targets():
    training = build(configuration("data:2", microbatches=2), evaluation=True)
    state = mm.State(training.programs, seed=5)
    batches = SyntheticBatches(30, 8, 4, seed=2)
    both = training.evaluate(state, [batches.feeds(1), batches.feeds(2)])
    assert both == pytest.approx(np.mean([training.evaluate(state, [batches.feeds(i)]) for i in (1, 2)]))
    assert training.evaluate(state, [batches.feeds(1)]) == training.evaluate(state, [batches.feeds(1)])
    assert both < np.log(30) + 1.5


def test_the_batch_is_described():
    assert build(configuration("data:2", microbatches=2)).describe_batch() == \
        "batch 8 sequences x 8 = 64 tokens a step, in 2 microbatches of 4, 2 on each of 2 slices of the batch at a time"


def test_a_measured_step_knows_its_bytes():
    step = MeasuredStep(build(configuration("data:2;model:2", microbatches=2, storage={"optimizer": "d_model:data"})))
    assert step.run().applied and step.run().applied and step.step == 2
    assert step.n_ranks == 4 and step.peak_bytes > 0 and step.comm_bytes > 0 and step.comm_s() > 0 and step.maxima([1.0]) == [1.0]


def test_four_mpi_ranks_have_the_losses_of_four_simulated_ones_to_the_bit(capsys, monkeypatch):
    script = EXAMPLES / "train_lm.py"
    text = run_ranks(4, [script, "--steps", "2"], timeout=120).stdout
    monkeypatch.setattr(sys, "argv", [str(script), "--steps", "2"])
    example("train_lm").main()
    assert _figures(text) == _figures(capsys.readouterr().out)


def _figures(text):
    """Return what train_lm printed of losses: the parts of its lines that hold no time."""
    found = [line.split("  rate")[0] for line in text.splitlines() if line.startswith(("step", "last"))]
    assert len(found) == 2, text
    return found

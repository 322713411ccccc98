"""Generation: the same text on every mesh, draws with the right probabilities, prompts that do not fit."""

from __future__ import annotations

import numpy as np
import pytest

import mesh_mpi as mm
from mesh_mpi.checkpoint import load
from mesh_mpi.errors import ConfigError
from mesh_mpi.training.evaluation import evaluation_program
from mesh_mpi.training.generation import END, ENOUGH, FULL, Choice, generate
from mesh_mpi.training.loop import train
from mesh_mpi.transformer import LanguageModel
from training.running import LAYOUT, configuration

MESHES = ["", "model:2", "data:2;model:2", "data:4"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A short run."""
    folder = tmp_path_factory.mktemp("generation") / "run"
    train(configuration(folder, steps=8))
    return folder


def texts(run, mesh, *arguments, more=()):
    rules = ";".join(r for r in LAYOUT.split(";") if r.split(":")[1] in mesh)
    return generate(str(run), b"The", [f"mesh_shape={mesh}", f"layout={rules or repr('')}", *more], *arguments)


@pytest.mark.parametrize("choice", [Choice(0.0), Choice(1.0, 0, 5), Choice(0.7, 20, 6)])
def test_no_mesh_changes_a_text(run, choice):
    first, *others = (texts(run, mesh, 13, choice, 3, more=["float_type=float64"]) for mesh in MESHES)
    assert all(other == first for other in others)
    assert len({sample.text for sample in first}) == (3 if choice.temperature else 1)


def test_the_greedy_text_is_that_of_the_whole_forward_pass_again_and_again(run):
    config = configuration(run, "")
    lm = LanguageModel(config.model)
    inputs = mm.placeholder("inputs", [mm.Dimension("batch", 1), mm.Dimension("length", 16)], "int32")
    program = mm.compile({"logits": lm.logits(inputs)})
    state = mm.State([program])
    load(state, str(run), only="parameters")
    ids = [b + 2 for b in b"The"]
    for _ in range(13):
        row = np.zeros((1, 16), np.int32)
        row[0, 1:len(ids) + 1] = ids
        ids.append(1 + int(state.run(program, whole=True, inputs=row)["logits"][0, len(ids), 1:258].argmax()))
    expected = ids[:ids.index(1)] if 1 in ids else ids
    sample, = texts(run, "model:2", 50, Choice(0.0), 1)
    assert b"The" + sample.text == bytes(i - 2 for i in expected)


def test_a_text_ends_where_it_says(run):
    assert [s.stopped for s in texts(run, "", 4, Choice(0.0), 2)] == [ENOUGH] * 2
    assert texts(run, "", 4, Choice(0.0), 1)[0].n_tokens == 4
    sample, = texts(run, "", 13, Choice(0.0), 1)
    assert sample.stopped in (ENOUGH, END)
    sample, = texts(run, "", 14, Choice(0.0), 1)
    assert sample.stopped in (FULL, END) and sample.n_tokens <= 13


def test_samples_depend_on_the_seed_and_the_number_of_the_sample_alone(run):
    three, one, other = (texts(run, "", 10, Choice(seed=seed), n) for seed, n in ((5, 3), (5, 1), (6, 1)))
    assert three[0] == one[0] and other[0] != one[0]


def test_draws_have_the_probabilities_of_the_softmax():
    logits = np.log(np.array([0.9, 0.5, 0.25, 0.15, 0.1]))
    counts = np.bincount([Choice(seed=1).of(logits, 0, i) for i in range(8000)], minlength=5)
    assert counts[0] == 0  # padding
    assert np.abs(counts[1:] / 8000 - [0.5, 0.25, 0.15, 0.1]).max() < 0.015
    sharper = np.bincount([Choice(0.5, seed=1).of(logits, 0, i) for i in range(8000)], minlength=5)
    squares = np.array([0.5, 0.25, 0.15, 0.1])**2
    assert np.abs(sharper[1:] / 8000 - squares / squares.sum()).max() < 0.015
    assert set(Choice(top_k=2, seed=1).of(logits, 0, i) for i in range(200)) == {1, 2}
    assert Choice(0.0).of(np.array([9.0, 1.0, 3.0, 3.0]), 0, 0) == 2


def test_what_cannot_be_continued_is_refused_with_numbers(run, tmp_path):
    with pytest.raises(ConfigError, match=r"the prompt has 16 tokens and the model's length is 16, .* at most 15"):
        generate(str(run), b"x" * 16)
    assert generate(str(run), b"x" * 15)[0].n_tokens == 1
    with pytest.raises(ConfigError, match="the temperature is -1"):
        generate(str(run), b"x", choice=Choice(-1))
    with pytest.raises(ConfigError, match="0 samples of 5 tokens"):
        generate(str(run), b"x", n_tokens=5, n_samples=0)
    with pytest.raises(ConfigError, match="model.layers is the checkpoint's"):
        generate(str(run), b"x", ["model.layers=2"])


def test_a_checkpoint_loads_into_decoding_and_evaluation_alike(run):
    config = configuration(run)
    program = evaluation_program(config)
    assert all("cache" not in name for name in program.variables)

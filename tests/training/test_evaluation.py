"""Evaluation: what is counted, what the figures mean, the same on every mesh."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mesh_mpi.data.source import open_rows
from mesh_mpi.data.tokens import TokenRows
from mesh_mpi.data.vocabulary import ByteVocabulary
from mesh_mpi.errors import ConfigError
from mesh_mpi.training import evaluation
from mesh_mpi.training.batches import unigram_entropy_of_rows
from mesh_mpi.training.evaluation import Evaluation, TextCounts, count_text, evaluate_checkpoint
from mesh_mpi.training.loop import train
from training.running import LAYOUT, configuration, lines

def rows_of(*rows):
    """Return rows of text as token rows: "|" ends a document, "_" is padding."""
    ids = np.array([[{"|": 1, "_": 0}.get(c, ord(c) + 2) for c in row] for row in rows], np.uint16)
    return TokenRows("rows", ids, (ids != 0).astype(np.uint8), ByteVocabulary())


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A short run with held-out losses over all of data.valid."""
    folder = tmp_path_factory.mktemp("evaluation") / "run"
    train(configuration(folder, steps=2, train={"evaluate_every": 2, "evaluate_batches": 0}))
    return folder


@pytest.mark.parametrize("at_once", [1, 2, 1024])
def test_words_go_on_over_rows_and_end_with_documents(at_once, monkeypatch):
    monkeypatch.setattr(evaluation, "ROWS_AT_ONCE", at_once)
    rows = rows_of("one t", "wo|th", "ree f", "our  ", "|five", "__ |x")
    assert count_text(rows, 6) == TextCounts(28, 25, 6)
    assert count_text(rows, 1) == TextCounts(5, 5, 2) and count_text(rows, 0) == TextCounts(0, 0, 0)


def test_the_counts_of_a_whole_text_are_those_of_its_bytes():
    rows = open_rows("bundled:sotu", "valid", 64, 258)
    counts = count_text(rows, rows.n_rows)
    text = ByteVocabulary().decode(rows.rows(range(rows.n_rows))["targets"][rows.rows(range(rows.n_rows))["targets"] > 1])
    assert counts.n_bytes == len(text) and abs(counts.n_words - len(text.split())) <= 1 and counts.n_tokens > counts.n_bytes


def test_figures_are_those_of_their_formulas():
    found = Evaluation(120.0, 3, TextCounts(60, 50, 12))
    assert found.loss == 2 and found.perplexity(60) == pytest.approx(math.e**2) and found.bits_per_byte == pytest.approx(2.4 / math.log(2))
    figures = found.figures()
    assert figures["perplexity_word"] == pytest.approx(math.e**10) and figures["perplexity_byte"] == pytest.approx(2 ** figures["bits_per_byte"])
    assert Evaluation(1e6, 1, TextCounts(10, 10, 1)).perplexity(1) == math.inf


def test_the_loss_is_that_of_training_and_the_same_on_every_mesh_and_batch(run):
    loss = lines(run, "valid_loss")[2]["valid_loss"]
    for mesh, more in (("data:2;model:2", []), ("model:4", ["sequences_per_batch=4"]), ("data:4", ["train.microbatches=1"]), ("", ["sequences_per_batch=14"])):
        rules = ";".join(r for r in LAYOUT.split(";") if r.split(":")[1] in mesh)
        found = evaluate_checkpoint(str(run), [f"mesh_shape={mesh}", f"layout={rules or repr('')}", *more])
        assert found.loss == pytest.approx(loss, rel=1e-5) and found.counts.n_tokens == 30_508, mesh
    exact = evaluate_checkpoint(str(run), ["float_type=float64"])
    assert exact.loss == pytest.approx(loss, rel=1e-5)


def test_scaled_logits_are_those_of_a_softer_softmax(run):
    one, soft, none = (evaluate_checkpoint(str(run), [], None, scale, 2).loss for scale in (1.0, 0.9, 0.0))
    assert one != soft and none == pytest.approx(math.log(258), rel=1e-5)


def test_the_program_has_neither_gradients_nor_an_optimizer():
    program = evaluation.evaluation_program(configuration("unused"))
    assert {b.variable.storage_class for b in program.variables.values()} == {"parameters"} and not program.written
    assert not [i for i in program.instructions if "grad" in i.name or i.name.startswith("adam")]


def test_what_would_make_it_another_model_is_refused(run, tmp_path):
    with pytest.raises(ConfigError, match="model.d_ff is the checkpoint's and cannot be set"):
        evaluate_checkpoint(str(run), ["model.d_ff=64"])
    train(configuration(tmp_path, steps=1, data={"train": "bundled:sotu"}))
    with pytest.raises(ConfigError, match="has no data.valid. Give --data"):
        evaluate_checkpoint(str(tmp_path))
    assert evaluate_checkpoint(str(tmp_path), [], "bundled:sotu", at_most=1).n_rows == 4


def test_the_entropy_of_rows_counts_ends_and_no_padding():
    assert unigram_entropy_of_rows(rows_of("ab|_", "____")) == pytest.approx(math.log(3))

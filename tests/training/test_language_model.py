"""The language model: parameters of the published series, a reference in NumPy, what does not count."""

from __future__ import annotations

import numpy as np
import pytest

import mesh_mpi as mm
from mesh_mpi.config import load, parse
from mesh_mpi.errors import DimensionError
from mesh_mpi.graph.initializers import Initializer
from mesh_mpi.training.step import build
from mesh_mpi.transformer import LanguageModel

SMALL = {"d_model": 8, "d_ff": 16, "heads": 2, "d_kv": 4, "layers": 2, "vocab_size": 11, "vocab_multiple": 4, "length": 6}


def model_of(**keys):
    return parse({"model": {**SMALL, **keys}, "sequences_per_batch": 4}).model


@pytest.mark.parametrize(("name", "n"), [("models/lm_n1.yaml", 218_379_264), ("models/lm_n32.yaml", 4_899_222_528), ("runs/bench_lm.yaml", 23_213_056)])
def test_the_published_models_have_their_number_of_parameters(name, n):
    assert build(load(name)).step_program.n_parameters == n


@pytest.mark.parametrize("name", ["nhalf", "n1", "n2", "n4", "n8", "n16", "n32"])
def test_the_whole_series_compiles_for_its_mesh(name):
    config = load(f"models/lm_{name}.yaml")
    m, program = config.model, build(config).step_program
    per_layer = 4 * m.d_model * m.heads * m.d_kv + 2 * m.d_model * m.d_ff
    assert program.n_parameters == 6 * per_layer + 2 * m.vocab_size * m.d_model + (m.length + 13) * m.d_model
    assert program.mesh.size in (32, 128, 512)


def tensors(model, dtype="float64", ignore=None, training=True):
    batch, length = mm.Dimension("batch", 4), mm.Dimension("length", model.length)
    lm = LanguageModel(model, dtype, ignore)
    return lm, lm.loss(*(mm.placeholder(n, [batch, length], "int32") for n in ("inputs", "targets")), training=training)


def run(parts, seed=0, **feeds):
    program = mm.compile({"loss_sum": parts.loss_sum, "n_targets": parts.n_targets, "logits": parts.logits})
    state = mm.State(program, seed)
    return state.run(program, whole=True, **feeds), state


def reference(state, m, ids):
    """Return the logits of the formula: pre-norm residual layers with RMS norms, ReLU, causal attention."""
    def norm(x, name):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + m.norm_eps) * state.read(f"{name}/scale")

    x = state.read("embedding/table")[ids] + state.read("positions/table")[:ids.shape[1]]
    for i in range(m.layers):
        y = norm(x, f"layer_{i}/attention_norm")
        q, k, v = (np.einsum("bld,dhk->bhlk", y, state.read(f"layer_{i}/attention/{n}/weight")) for n in "qkv")
        scores = np.where(np.tril(np.ones((ids.shape[1],) * 2, bool)), q @ k.swapaxes(-1, -2) / np.sqrt(m.d_kv), -np.inf)
        p = np.exp(scores - scores.max(-1, keepdims=True))
        x = x + np.einsum("bhlk,hkd->bld", p / p.sum(-1, keepdims=True) @ v, state.read(f"layer_{i}/attention/o/weight"))
        y = norm(x, f"layer_{i}/feed_forward_norm")
        x = x + np.maximum(y @ state.read(f"layer_{i}/feed_forward/in/weight"), 0) @ state.read(f"layer_{i}/feed_forward/out/weight")
    return norm(x, "final_norm") @ state.read("embedding/table" if m.tied_embedding else "softmax/table").T


@pytest.mark.parametrize("tied", [True, False])
def test_logits_and_loss_are_those_of_the_formula(tied):
    m = model_of(tied_embedding=tied)
    rng = np.random.default_rng(0)
    inputs, targets = rng.integers(0, 11, (2, 4, 6)).astype(np.int32)
    targets[0, :3] = -1
    out, state = run(tensors(m)[1], inputs=inputs, targets=targets)
    logits = reference(state, m, inputs)
    np.testing.assert_allclose(out["logits"], logits, rtol=1e-10, atol=1e-12)
    valid = logits[..., :11]
    losses = np.log(np.exp(valid).sum(-1)) - np.take_along_axis(valid, np.maximum(targets, 0)[..., None], -1)[..., 0]
    assert out["n_targets"] == 21
    assert out["loss_sum"] == pytest.approx(losses[targets >= 0].sum(), rel=1e-12)


def test_targets_that_do_not_count():
    inputs = np.ones((4, 6), np.int32)
    targets = np.tile(np.array([0, 3, -1, 5, 0, 7], np.int32), (4, 1))
    counts = {}
    for ignore, denominator in ((None, "targets"), (0, "targets"), (0, "all")):
        out, _ = run(tensors(model_of(loss_denominator=denominator), ignore=ignore)[1], inputs=inputs, targets=targets)
        counts[ignore, denominator] = out["n_targets"]
    assert counts == {(None, "targets"): 20, (0, "targets"): 12, (0, "all"): 24}


def test_smoothing_and_z_loss_are_for_training_only():
    m = model_of(label_smoothing=0.1, z_loss=0.01)
    feeds = {"inputs": np.ones((4, 6), np.int32), "targets": np.full((4, 6), 2, np.int32)}
    plain = run(tensors(model_of())[1], **feeds)[0]["loss_sum"]
    assert run(tensors(m, training=False)[1], **feeds)[0]["loss_sum"] == plain
    assert run(tensors(m)[1], **feeds)[0]["loss_sum"] != plain


def test_initial_deviations():
    def deviation(v):
        assert isinstance(v.init, Initializer) and v.init.kind == "normal"
        return v.init.numbers["stddev"]

    lm = LanguageModel(model_of())
    assert deviation(lm.embedding.table) == deviation(lm.positions.table) == 8**-0.5 and lm.softmax is lm.embedding
    untied = LanguageModel(model_of(tied_embedding=False))
    assert deviation(untied.embedding.table) == deviation(untied.positions.table) == 1.0 and deviation(untied.softmax.table) == 8**-0.5
    attention = lm.layers[0].attention
    assert [deviation(getattr(attention, n).weight) for n in "qkvo"] == [8**-0.5] * 4  # heads * d_kv is 8 as well
    assert deviation(lm.layers[0].feed_forward.out.weight) == 16**-0.5


def test_faults_of_inputs_are_named():
    lm = LanguageModel(model_of())
    batch = mm.Dimension("batch", 4)
    with pytest.raises(DimensionError, match=r"the inputs are \[batch=4\]"):
        lm.logits(mm.placeholder("inputs", [batch], "int32"))
    with pytest.raises(DimensionError, match="length=7 positions are asked for and the table has max_length=6"):
        lm.logits(mm.placeholder("inputs", [batch, mm.Dimension("length", 7)], "int32"))


def test_sequences_packed_into_one_row_have_the_losses_that_they_have_alone():
    m, rng = model_of(), np.random.default_rng(1)
    ids = rng.integers(1, 11, (2, 7)).astype(np.int32)
    batch, length = mm.Dimension("batch", 1), mm.Dimension("length", 6)
    lm = LanguageModel(m, "float64", ignore=0)
    fed = [mm.placeholder(n, [batch, length], "int32") for n in ("inputs", "targets", "segments", "positions")]
    parts = lm.loss(fed[0], fed[1], segments=fed[2], positions=fed[3])

    def loss(inputs, targets, segments, positions):
        arrays = {n: np.array([a], np.int32) for n, a in zip(("inputs", "targets", "segments", "positions"), (inputs, targets, segments, positions))}
        out, _ = run(parts, **arrays)
        return out["loss_sum"], out["n_targets"]

    (a, na), (b, nb) = (loss([*x[:n], *[0] * (6 - n)], [*x[1:n + 1], *[0] * (6 - n)], [1] * n + [0] * (6 - n), range(6))
                        for x, n in ((ids[0], 3), (ids[1], 2)))
    both, n = loss([*ids[0, :3], *ids[1, :2], 0], [*ids[0, 1:4], *ids[1, 1:3], 0], [1, 1, 1, 2, 2, 0], [0, 1, 2, 0, 1, 0])
    assert (na, nb, n) == (3, 2, 5)
    assert both == pytest.approx(a + b, rel=1e-12)

"""Decoding: position by position through caches is the whole forward pass."""

from __future__ import annotations

import numpy as np
import pytest

import mesh_mpi as mm
from mesh_mpi.config import parse
from mesh_mpi.errors import DimensionError
from mesh_mpi.transformer import Decoder, LanguageModel

LENGTH, ROWS, VOCAB = 8, 4, 11
MESHES = [("", ""), ("model:2", "d_ff:model;heads:model;vocab:model"), ("data:2;model:2", "batch:data;d_ff:model;heads:model;vocab:model")]
TOLERANCES = {"float32": 1e-5, "float64": 1e-12}


def model_of(**keys):
    model = {"d_model": 8, "d_ff": 16, "heads": 2, "d_kv": 4, "layers": 2, "vocab_size": VOCAB, "vocab_multiple": 4, "length": LENGTH, **keys}
    return parse({"model": model, "sequences_per_batch": ROWS}).model


def programs(model, dtype, mesh_shape, layout):
    """Return the programs of the whole forward pass, of a prefill and of a step, which share their variables."""
    batch, length = mm.Dimension("batch", ROWS), mm.Dimension("length", LENGTH)
    lm = LanguageModel(model, dtype)
    decoder = Decoder(lm, batch)
    inputs, at = mm.placeholder("inputs", [batch, length], "int32"), mm.placeholder("at", [], "int64")
    whole = mm.compile({"logits": lm.logits(inputs)}, mesh_shape=mesh_shape, layout=layout, name="whole")
    prefill, step = decoder.prefill(inputs, at), decoder.step(mm.placeholder("ids", [batch], "int32"), at)
    return [whole, *(mm.compile({"logits": d.logits}, d.updates, mesh_shape, layout, name=name, like=whole)
                     for d, name in ((prefill, "prefill"), (step, "step")))]


def close(found, expected, tolerance):
    assert np.abs(found - expected).max() <= tolerance * np.abs(expected).max()


@pytest.mark.parametrize("keys", [{}, {"tied_embedding": False, "norm": "layer", "biases": True, "activation": "gelu,linear", "scale_logits": True}])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("mesh_shape", "layout"), MESHES)
def test_the_logits_of_every_position_are_those_of_the_whole_forward_pass(mesh_shape, layout, dtype, keys):
    whole, prefill, step = programs(model_of(**keys), dtype, mesh_shape, layout)
    state = mm.State([whole, prefill, step], poison=True)
    ids = np.random.default_rng(0).integers(0, VOCAB, (ROWS, LENGTH)).astype(np.int32)
    expected = state.run(whole, whole=True, inputs=ids)["logits"]
    for i in range(LENGTH):  # caches from the first position on, one by one
        close(state.run(step, whole=True, ids=ids[:, i], at=i)["logits"], expected[:, i], TOLERANCES[dtype])
    for n in (0, 4, LENGTH - 1):  # a beginning at once, with anything after it, then one by one
        found = state.run(prefill, whole=True, inputs=np.where(np.arange(LENGTH) <= n, ids, 1), at=n)["logits"]
        close(found, expected[:, n], TOLERANCES[dtype])
        for i in range(n + 1, LENGTH):
            close(state.run(step, whole=True, ids=ids[:, i], at=i)["logits"], expected[:, i], TOLERANCES[dtype])


def test_a_step_writes_its_caches_in_place_and_reads_parameters_only():
    _, prefill, step = programs(model_of(), "float32", "data:2;model:2", MESHES[2][1])
    writes = [i for i in step.instructions if i.name == "write_at"]
    assert len(writes) == 4 and all(step.plan.address(i.outputs[0].root)[0].endswith("_cache") for i in writes)
    assert {name for name, b in step.variables.items() if b.variable.storage_class == "cache"} == {
        f"layer_{i}/attention/{n}_cache" for i in range(2) for n in "kv"} == set(step.written)
    assert step.n_parameters == prefill.n_parameters
    payload = sum(r.payload_bytes for r in step.collectives())
    assert payload == (2 * 2 + 1) * (ROWS // 2) * 8 * 4  # two reductions a layer and one of the look-up, of [batch, d_model]


def test_the_sequence_may_be_split_too():
    whole, prefill, step = programs(model_of(), "float64", "model:2", "d_ff:model;heads:model;vocab:model;length:model")
    state = mm.State([whole, prefill, step])
    ids = np.random.default_rng(1).integers(0, VOCAB, (ROWS, LENGTH)).astype(np.int32)
    expected = state.run(whole, whole=True, inputs=ids)["logits"]
    close(state.run(prefill, whole=True, inputs=ids, at=3)["logits"], expected[:, 3], 1e-12)
    close(state.run(step, whole=True, ids=ids[:, 4], at=4)["logits"], expected[:, 4], 1e-12)


def test_faults_of_inputs_are_named():
    batch = mm.Dimension("batch", ROWS)
    decoder, at = Decoder(LanguageModel(model_of()), batch), mm.placeholder("at", [], "int64")
    with pytest.raises(DimensionError, match=r"the inputs are \[batch=4, length=9\]. Give \[batch=4, length=8\]"):
        decoder.prefill(mm.placeholder("inputs", [batch, mm.Dimension("length", 9)], "int32"), at)
    with pytest.raises(DimensionError, match=r"the ids are \[batch=3\]. Give \[batch=4\]"):
        decoder.step(mm.placeholder("ids", [mm.Dimension("batch", 3)], "int32"), at)

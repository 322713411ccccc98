"""Attention: formula, masks, segments, dropout, gradients, layouts, memory order."""

import itertools

import numpy as np
import pytest
from ops.checks import assert_close, check_gradients, every_layout, run, variables_of

import mesh_mpi as mm

B, H, K = mm.Dimension("batch", 4), mm.Dimension("heads", 4), mm.Dimension("d_kv", 3)
T, S = mm.Dimension("query_length", 6), mm.Dimension("memory_length", 6)
DIMS = ["batch", "heads", "query_length"]
COUNTERS = {"step": np.int64(3), "row_offset": np.int64(0)}


def sample(q_dims=(B, T, H, K), k_dims=(B, S, H, K), **options):
    """Return the output, its variables and their values."""
    v, values = variables_of(np.random.default_rng(8), q=q_dims, k=k_dims, v=k_dims)
    return mm.attention(v["q"], v["k"], v["v"], T, S, K, **options), v, values


def counters():
    """Return the placeholders that a mask needs."""
    return mm.placeholder("step", [], "int64"), mm.placeholder("row_offset", [], "int64")


def reference(values, allowed):
    """Attention in float64, written from its formula; ``allowed`` is [batch, query, memory]."""
    scores = np.einsum("bthk,bshk->bhts", values["q"], values["k"]) / np.sqrt(3)
    scores = np.where(allowed[:, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("bhts,bshk->bthk", weights / weights.sum(-1, keepdims=True), values["v"])


@pytest.mark.parametrize("causal", [True, False])
def test_attention_equals_its_formula(causal):
    y, _, values = sample(causal=causal)
    allowed = np.broadcast_to(np.tri(6, dtype=bool) if causal else True, (4, 6, 6))
    assert_close(run({"y": y}, values=values)[0]["y"], reference(values, allowed), 1e-12)


def test_segments_attend_within_themselves():
    segments = np.int32([[1, 1, 2, 2, 0, 0], [1, 1, 1, 1, 1, 1], [1, 2, 3, 0, 0, 0], [0, 0, 0, 0, 0, 0]])
    qs, ms = mm.placeholder("qs", [B, T], "int32"), mm.placeholder("ms", [B, S], "int32")
    y, v, values = sample(query_segments=qs, memory_segments=ms)
    allowed = (segments[:, :, None] == segments[:, None]) & np.tri(6, dtype=bool)
    feeds = {"qs": segments, "ms": segments}
    assert_close(run({"y": y}, feeds, values=values)[0]["y"], reference(values, allowed), 1e-12)
    outputs, feeds = check_gradients(y, list(v.values()), values, feeds)
    every_layout({"y": y, **outputs}, DIMS, feeds=feeds, values=values, n_least=8)


ORDERS = [((B, T, H, K), (B, S, H, K)), ((H, K, T, B), (K, S, B, H)), ((B, T, H, K), (B, S, K))]


@pytest.mark.parametrize("q_dims, k_dims", ORDERS)
@pytest.mark.parametrize("rate", [0.0, 0.3])
def test_gradients_equal_differences_and_no_layout_changes_them(q_dims, k_dims, rate):
    dropout = mm.DropoutArgs(rate, "weights", *counters()) if rate else None
    y, v, values = sample(q_dims, k_dims, dropout=dropout)
    outputs, feeds = check_gradients(y, list(v.values()), values, COUNTERS)
    every_layout({"y": y, **outputs}, DIMS, feeds=feeds, values=values, n_least=8)


def test_queries_may_be_split_and_gradients_of_the_memory_are_then_reduced():
    y, v, _ = sample()
    grads = mm.gradients(y, v.values(), [mm.placeholder("dy", y.shape, "float64")])
    program = mm.compile({"y": y, "dk": grads[1], "dv": grads[2]}, mesh_shape="a:2", layout="query_length:a")
    assert [(c.name, c.n_members) for c in program.collectives()] == [("allreduce", 2)] and not program.notes


def test_a_split_memory_is_gathered_and_said_so_or_refused():
    y, _, _ = sample()
    assert "gathered" in mm.compile({"y": y}, mesh_shape="a:2", layout="memory_length:a").listing()
    with pytest.raises(mm.MeshMpiError, match="memory_length of .* whole"):
        mm.compile({"y": y}, mesh_shape="a:2", layout="memory_length:a", strict_layout=True)


def test_rows_are_counted_in_the_batch_of_the_step():
    """Two halves of a batch, each with its row offset, drop what the whole batch drops."""
    half = mm.Dimension("batch", 2)
    whole, _, values = sample(dropout=mm.DropoutArgs(0.3, "weights", *counters()))
    part, _, _ = sample((half, T, H, K), (half, S, H, K), dropout=mm.DropoutArgs(0.3, "weights", *counters()))
    expected = run({"y": whole}, COUNTERS, values=values, seed=5)[0]["y"]
    for i in (0, 2):
        found, _ = run({"y": part}, {**COUNTERS, "row_offset": np.int64(i)}, values={n: x[i:i + 2] for n, x in values.items()}, seed=5)
        assert_close(found["y"], expected[i:i + 2], 1e-13)


def test_seed_step_and_name_each_change_the_mask():
    args = [("weights", 3, 5), ("weights", 4, 5), ("weights", 3, 6), ("other", 3, 5), ("weights", 3, 5)]
    results = []
    for name, step, seed in args:
        y, _, values = sample(dropout=mm.DropoutArgs(0.3, name, *counters()))
        results.append(run({"y": y}, {**COUNTERS, "step": np.int64(step)}, values=values, seed=seed)[0]["y"])
    same = [(i, j) for i, j in itertools.combinations(range(5), 2) if np.array_equal(results[i], results[j])]
    assert same == [(0, 4)]


def test_the_product_behind_attention_reads_its_result_as_one_matrix():
    d = mm.Dimension("d_model", 5)
    y, _, _ = sample((H, K, T, B), (H, K, S, B))
    program = mm.compile({"z": mm.einsum([y, mm.Variable("w", [H, K, d], dtype="float64")], [B, T, d])})
    product = program.instructions[-1]
    assert product.name == "matmul" and product.inputs[0].shape == (24, 12) and product.inputs[0].root is program.instructions[-2].outputs[0].root


def test_faults_are_named():
    q, k = mm.placeholder("q", [B, T, H, K]), mm.placeholder("k", [B, S, H, K])
    with pytest.raises(mm.MeshMpiError, match="no dimension 'memory_length'"):
        mm.attention(q, mm.placeholder("k", [B, T, H, K]), k, T, S, K)
    with pytest.raises(mm.MeshMpiError, match="segments of both sides"):
        mm.attention(q, k, k, T, S, K, query_segments=mm.placeholder("s", [B, T], "int32"))
    with pytest.raises(mm.MeshMpiError, match="leaves .*batch.*extra"):
        mm.attention(mm.placeholder("q", [B, mm.Dimension("extra", 2), T, H, K]), k, k, T, S, K)
    with pytest.raises(mm.MeshMpiError, match="dropout rate 1.5"):
        mm.attention(q, k, k, T, S, K, dropout=mm.DropoutArgs(1.5, "weights", *counters()))

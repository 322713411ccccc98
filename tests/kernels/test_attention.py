"""Attention and its gradient against a formula in float64."""

import numpy as np
import pytest

from mesh_mpi.kernels.cpu.random import Stream, keep_threshold

NAME_KEY = 0x1234_5678_9ABC_DEF0


def _mask(seed, step, row_offset, place, n_batch, n_memory, n_heads, rate):
    stream = Stream(NAME_KEY)
    stream.start(seed, step)
    mask = np.empty((n_batch, n_heads, n_memory))
    for b in range(n_batch):
        for h in range(n_heads):
            row, head = row_offset + place["row_start"] + b, place["head_start"] + h
            first = (row * place["heads_global"] + head) * place["memory_global"]
            mask[b, h] = stream.draws16(first, n_memory) >= keep_threshold(rate)
    return mask / (1 - rate)


def _reference(q, k, v, do, scale, causal, query_offset, segments, mask):
    """o, lse, dq, dk, dv in float64."""
    q, k, v, do = (x.astype(np.float64) for x in (q, k, v, do))
    scores = scale * np.einsum("bthk,bshk->bhts", q, k)
    n_queries, n_memory = scores.shape[2:]
    if causal:
        hidden = np.arange(n_memory) > query_offset + np.arange(n_queries)[:, None]
        scores[:, :, hidden] = -np.inf
    if segments is not None:
        scores = np.where((segments[0][:, :, None] == segments[1][:, None, :])[:, None], scores, -np.inf)
    with np.errstate(all="ignore"):
        m = np.maximum(scores.max(-1, keepdims=True), -1e300)
        p = np.exp(scores - m)
        s = p.sum(-1, keepdims=True)
        lse = (np.log(s) + m)[..., 0]
        p = np.where(s > 0, p / np.where(s > 0, s, 1), 0)
    weights = p if mask is None else p * mask[:, :, None, :]
    o = np.einsum("bhts,bshk->bthk", weights, v)
    dweights = np.einsum("bthk,bshk->bhts", do, v)
    dp = dweights if mask is None else dweights * mask[:, :, None, :]
    ds = p * (dp - (dp * p).sum(-1, keepdims=True))
    dq = scale * np.einsum("bhts,bshk->bthk", ds, k)
    dk = scale * np.einsum("bhts,bthk->bshk", ds, q)
    return o, np.where(s[..., 0] > 0, lse, -np.inf), dq, dk, np.einsum("bhts,bthk->bshk", weights, do)


CASES = {
    "plain": {},
    "causal": {"causal": True},
    "one query of a cache": {"causal": True, "T": 1, "query_offset": 18},
    "later queries": {"causal": True, "T": 9, "query_offset": 5},
    "queries before the memory": {"causal": True, "T": 9, "query_offset": -3},
    "many blocks": {"causal": True, "T": 301, "S": 301},
    "a long sequence": {"causal": True, "T": 601, "S": 601, "B": 1, "H": 2},
    "a long memory": {"causal": True, "T": 130, "S": 700, "query_offset": 570, "B": 1, "H": 2},
    "a long sequence with segments": {"causal": True, "segments": True, "T": 601, "S": 601, "B": 1, "H": 2},
    "two keys for all queries": {"S": 2},
    "more memory than queries": {"T": 37, "S": 83},
    "segments": {"segments": True},
    "causal segments": {"segments": True, "causal": True, "T": 150, "S": 150},
    "dropout": {"dropout": 0.3, "T": 140, "S": 140, "causal": True},
    "dropout and segments": {"dropout": 0.5, "segments": True, "causal": True},
}


@pytest.mark.parametrize("case", CASES)
def test_attention_and_its_gradient_follow_the_formula(kernel, close, rng, dtype, case):
    c = {"T": 19, "S": 19, "B": 2, "H": 3, "K": 13, "causal": False, "query_offset": 0, "dropout": 0.0, **CASES[case]}
    # [H, B, T, K] in memory with a longer pitch: the views are strided in every axis but the last.
    def views(length):
        return rng.standard_normal((c["H"], c["B"], length, c["K"] + 3)).astype(dtype)[..., : c["K"]].transpose(1, 2, 0, 3)

    q, o, do, dq = (views(c["T"]) for _ in range(4))
    k, v, dk, dv = (views(c["S"]) for _ in range(4))
    lse = np.full((c["T"], c["B"], c["H"]), np.nan, dtype).transpose(1, 2, 0)
    params = {"scale": 0.37, "causal": c["causal"], "query_offset": c["query_offset"], "dropout": c["dropout"]}
    params["has_segments"] = bool(c.get("segments"))
    extra, segments, mask = (), None, None
    if c.get("segments"):
        segments = tuple(np.sort(rng.integers(0, 4, (c["B"], n)).astype(np.int32), axis=1) for n in (c["T"], c["S"]))
        segments[0][0, -1] = 9  # attends to nothing
        extra += segments
    if c["dropout"]:
        place = {"heads_global": 7, "memory_global": c["S"], "head_start": 2, "row_start": 4}
        params |= {"name_key": NAME_KEY, **place}
        extra += (np.uint64(2**63 + 5), np.int64(11), np.int64(6))
        extra = tuple(np.asarray(x) for x in extra)
        mask = _mask(2**63 + 5, 11, 6, place, c["B"], c["S"], c["H"], c["dropout"])
    kernel("attention", (o, lse), (q, k, v, *extra), **params)
    expected = _reference(q, k, v, do, 0.37, c["causal"], c["query_offset"], segments, mask)
    close(o, expected[0])
    close(lse, expected[1])
    kernel("attention_grad", (dq, dk, dv), (q, k, v, o, lse, do, *extra), **params)
    for found, want in zip((dq, dk, dv), expected[2:], strict=True):
        close(found, want, 200)


def test_a_query_that_attends_to_nothing_gives_zeros(kernel, rng, dtype):
    q, k, v, do = (rng.standard_normal((1, 4, 1, 8)).astype(dtype) for _ in range(4))
    o, lse = np.full_like(q, np.nan), np.full((1, 1, 4), np.nan, dtype)
    params = {"scale": 1.0, "causal": True, "query_offset": -2, "has_segments": False, "dropout": 0.0}
    kernel("attention", (o, lse), (q, k, v), **params)
    assert not o[0, :2].any() and np.isneginf(lse[0, 0, :2]).all() and np.isfinite(lse[0, 0, 2:]).all()
    dq, dk, dv = (np.full_like(q, np.nan) for _ in range(3))
    kernel("attention_grad", (dq, dk, dv), (q, k, v, o, lse, do), **params)
    assert not dq[0, :2].any() and not dk[0, 2:].any() and np.isfinite(dv).all()


def test_large_scores_do_not_overflow(kernel, close, rng, dtype):
    q, k, v, do = (rng.standard_normal((1, 40, 2, 8)).astype(dtype) for _ in range(4))
    o, lse = np.empty_like(q), np.empty((1, 2, 40), dtype)
    params = {"scale": 40.0, "causal": True, "query_offset": 0, "has_segments": False, "dropout": 0.0}
    kernel("attention", (o, lse), (q, k, v), **params)
    expected = _reference(q, k, v, do, 40.0, True, 0, None, None)
    close(o, expected[0], 4000)
    dq, dk, dv = (np.empty_like(q) for _ in range(3))
    kernel("attention_grad", (dq, dk, dv), (q, k, v, o, lse, do), **params)
    close(dv, expected[4], 4000)

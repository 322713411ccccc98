"""Samples of attention, and of dropout, whose masks are drawn here from NumPy's own generator."""

from __future__ import annotations

import hashlib

import numpy as np
from oracles.draw import constant, floats, integers, whole
from oracles.harness import Sample

import mesh_mpi as mm
from mesh_mpi import Dimension

BATCH, HEADS, QUERY, MEMORY, D_KV = (Dimension("batch", 2), Dimension("heads", 4), Dimension("query_length", 4), Dimension("memory_length", 4),
                                     Dimension("d_kv", 2))
ROWS, COLUMNS, LENGTH = Dimension("rows", 4), Dimension("columns", 6), Dimension("length", 3)
SEED = 7  # the harness runs every state with this seed


def draws(name: str, step: int, n: int) -> np.ndarray:
    """Return the 16-bit numbers 0..n-1 of a mask: Philox4x64-10, key (seed, digest of the name), counter (block, step, 0, 0)."""
    key = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
    words = []
    for block in range(-(-n // 16)):
        generator = np.random.Philox(key=np.array([SEED, key], np.uint64), counter=np.array([block, step, 0, 0], np.uint64))
        # NumPy steps its counter before it draws: go one back
        state = generator.state
        state["state"]["counter"] = np.array([(block - 1) % 2**64, step - (block == 0), 0, 0], np.uint64) if block or step else \
            np.full(4, 2**64 - 1, np.uint64)
        generator.state = state
        words.append(generator.random_raw(4))
    return np.concatenate(words).astype("<u8").view("<u2")[:n]


def kept(name: str, step: int, indices: np.ndarray, rate: float) -> np.ndarray:
    """Return the mask at global element indices."""
    return draws(name, step, int(indices.max()) + 1)[indices] >= round(rate * 65536)


def _attention(a, causal, segments=False, mask=None):
    """Softmax attention with everything spelt out; arrays are [batch, heads, length, d_kv]."""
    scores = np.einsum("bhtk,bhsk->bhts", a["q"], a["k"]) / np.sqrt(a["q"].shape[-1])
    seen = np.ones(scores.shape, bool)
    if causal:
        seen &= np.arange(scores.shape[3]) <= np.arange(scores.shape[2])[:, None]
    if segments:
        seen &= a["qs"][:, None, :, None] == a["ms"][:, None, None, :]
    shifted = np.where(seen, scores, -np.inf)
    m = shifted.max(-1, keepdims=True)
    weights = np.exp(shifted - np.where(np.isfinite(m), m, 0.0))
    total = weights.sum(-1, keepdims=True)
    weights = np.where(total > 0, weights / np.where(total > 0, total, 1.0), 0.0)
    if mask is not None:
        weights = weights * mask
    return {"o": np.einsum("bhts,bhsk->bhtk", weights, a["v"])}


def _inputs(memory=(BATCH, HEADS, MEMORY, D_KV)):
    return {"q": floats(BATCH, HEADS, QUERY, D_KV), "k": floats(*memory), "v": floats(*memory)}


def _call(t, **settings):
    return {"o": mm.attention(t["q"], t["k"], t["v"], "query_length", "memory_length", "d_kv", **settings)}


def _dropped_attention(a):
    row = np.arange(2)[:, None, None] + int(a["row_offset"])
    indices = (row * 4 + np.arange(4)[:, None]) * 4 + np.arange(4)
    mask = kept("weights", int(a["step"]), indices, 0.25)[:, :, None, :] / 0.75
    return _attention(a, False, mask=mask)


def _dropped(name, rate, row_dim=None, broadcast=()):
    """Dropout over [rows, length, columns]; elements are counted in that order, rows first, dimensions of ``broadcast`` as one."""
    def reference(a):
        index = np.zeros((4, 3, 6), np.int64)
        for i, (dim, size) in enumerate((("rows", 4), ("length", 3), ("columns", 6))):
            if dim not in broadcast:
                along = np.arange(size) + (int(a["row_offset"]) if dim == row_dim else 0)
                index = index * size + along.reshape([-1 if j == i else 1 for j in range(3)])
        return {"y": a["x"] * kept("mask", int(a["step"]), index, rate) / (1.0 - rate)}
    return Sample(f"dropout {name}", {"x": floats(ROWS, LENGTH, COLUMNS), **_counters(5, 8 if row_dim else 0)},
                  lambda t: {"y": mm.dropout(t["x"], rate, "mask", t["step"], t["row_offset"], row_dim, broadcast)}, reference)


def _counters(step, row_offset):
    return {"step": integers(draw=constant(step), dtype="int64"), "row_offset": integers(draw=constant(row_offset), dtype="int64")}


SAMPLES = [
    Sample("attention, causal", _inputs(), _call, lambda a: _attention(a, True)),
    Sample("attention to everything", _inputs(), lambda t: _call(t, causal=False), lambda a: _attention(a, False)),
    Sample("attention with segments", {**_inputs(), "qs": integers(BATCH, QUERY, draw=whole(0, 2)), "ms": integers(BATCH, MEMORY, draw=whole(0, 2))},
           lambda t: _call(t, causal=True, query_segments=t["qs"], memory_segments=t["ms"]), lambda a: _attention(a, True, True)),
    Sample("attention with one head of memory for all", {"q": floats(BATCH, HEADS, QUERY, D_KV), "k": floats(BATCH, MEMORY, D_KV), "v": floats(BATCH, MEMORY, D_KV)},
           lambda t: _call(t, causal=False), lambda a: _attention({"q": a["q"], **{n: np.repeat(a[n][:, None], 4, 1) for n in "kv"}}, False)),
    Sample("attention with dropout of its weights", {**_inputs(), **_counters(3, 6)},
           lambda t: _call(t, causal=False, dropout=mm.DropoutArgs(0.25, "weights", t["step"], t["row_offset"])), _dropped_attention),
    _dropped("of every element", 0.25), _dropped("by rows, one mask for all lengths", 0.5, "rows", ("length",)),
    _dropped("at another rate", 0.1, "rows"),
]

"""Attention by blocks of query rows, and its gradient, which computes the blocks again.

Suffixes: B batch, T query length, S memory length, H heads, K per-head size; within a block t query rows and s memory
columns. Blocks above the causal diagonal are never computed. In the gradient the row constants ride in the products:
[scale q, -lse] [k, 1]^T is the scores less lse, and [do, -D] [v, 1]^T is dP - D, so that one exponential and one
multiplication are all the passes over scores that are left.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np

from ..contracts.attention import query_rows
from .blocks import Arrays, Call, constant, ones, reduction, run, scratch_arrays, spans, ufunc
from .dropout import fill_keep
from .random import Draw, Stream, keep_threshold

# -inf, but safe in a product with 0 or 1: no score comes near it.
_NEVER = -1e30


class Block(NamedTuple):
    """Query rows [t0, t1) and the memory columns [0, s1) that any of them sees; those from s0 on not all do."""

    t0: int
    t1: int
    s0: int
    s1: int


def _blocks(n_queries: int, n_memory: int, rows: int, causal: bool, query_offset: int) -> list[Block]:
    blocks = []
    for t0, t1 in spans(n_queries, rows):
        if causal:
            s1 = max(0, min(n_memory, query_offset + t1))
            s0 = max(0, min(s1, query_offset + t0 + 1))
        else:
            s0 = s1 = n_memory
        blocks.append(Block(t0, t1, s0, s1))
    return blocks


@lru_cache(maxsize=32)
def _triangle(n_rows: int, n_columns: int, first: int, dtype: np.dtype) -> np.ndarray:
    """[t, s] added to scores: 0 where column s is at most first + t, -inf beyond."""
    hidden = np.arange(n_columns) > first + np.arange(n_rows)[:, None]
    bias = np.where(hidden, -np.inf, 0.0).astype(dtype)
    bias.flags.writeable = False
    return bias


class _Masks:
    """Which scores count, and which memory positions are dropped, for all blocks of one call."""

    def __init__(self, name: str, ins: Arrays, n_first: int, buffers: dict[str, np.ndarray], params: dict) -> None:
        self.dtype = ins[0].dtype
        self.buffers = buffers
        self.causal, self.offset = params["causal"], params["query_offset"]
        self.segments = tuple(ins[n_first : n_first + 2]) if params["has_segments"] else ()
        # Only then may a row attend to nothing.
        self.guarded = bool(self.segments) or (self.causal and self.offset < 0)
        self.rate = params["dropout"]
        if self.rate:
            self.seed, self.step, self.row_offset = ins[n_first + len(self.segments) : n_first + len(self.segments) + 3]
            self.stream, self.threshold = Stream(params["name_key"]), keep_threshold(self.rate)
            self.scale = constant(1 / (1 - self.rate), self.dtype)
            self.place = params
            self.shift = 0

    def start(self) -> None:
        """Place the random stream for this call."""
        self.stream.start(int(self.seed), int(self.step))
        self.shift = int(self.row_offset) * self.place["heads_global"] * self.place["memory_global"]

    def prepare(self, b: int, block: Block) -> list[Call]:
        """Calls that make the bias of a block, the same for all heads."""
        if not self.segments or block.s1 == 0:
            return []
        rows = block.t1 - block.t0
        bias = self.buffers["bias"].reshape(-1)[: rows * block.s1].reshape(rows, block.s1)
        differs = self.buffers["differs"].reshape(-1)[: rows * block.s1].reshape(rows, block.s1)
        queries, memory = self.segments
        calls: list[Call] = [
            ufunc(np.not_equal, queries[b, block.t0 : block.t1, None], memory[b, None, : block.s1], out=differs),
            partial(bias.fill, 0),
            partial(np.copyto, bias, constant(-np.inf, self.dtype), "same_kind", differs),
        ]
        if block.s0 < block.s1:
            part = bias[:, block.s0 :]
            calls.append(ufunc(np.add, part, self._hidden(block), out=part))
        return calls

    def _hidden(self, block: Block) -> np.ndarray:
        first = self.offset + block.t0 - block.s0
        return _triangle(block.t1 - block.t0, block.s1 - block.s0, first, self.dtype)

    def apply(self, scores: np.ndarray, block: Block) -> list[Call]:
        """Calls that hide the scores of a block that do not count."""
        if self.segments:
            bias = self.buffers["bias"].reshape(-1)[: scores.size].reshape(scores.shape)
            return [ufunc(np.add, scores, bias, out=scores)]
        if block.s0 < block.s1:
            part = scores[:, block.s0 :]
            return [ufunc(np.add, part, self._hidden(block), out=part)]
        return []

    def kept(self, b: int, h: int) -> list[Call]:
        """Calls that make ``mask``: 1 / (1 - rate) at memory positions that are kept, 0 at the others."""
        keep, mask, p = self.buffers["keep"], self.buffers["mask"], self.place
        element = ((p["row_start"] + b) * p["heads_global"] + p["head_start"] + h) * p["memory_global"]
        draws = [Draw(at, element + at, 1, end - at, end - at) for at, end in spans(keep.size, 8192)]

        def draw() -> None:
            for one in draws:
                fill_keep(self.stream, one, self.shift, self.threshold, keep[None, one.at : one.at + one.length])

        return [draw, ufunc(np.multiply, keep, self.scale, out=mask)]


def _params(
    causal: bool = False,
    query_offset: int = 0,
    has_segments: bool = False,
    dropout: float = 0.0,
    name_key: int = 0,
    heads_global: int = 1,
    memory_global: int = 1,
    head_start: int = 0,
    row_start: int = 0,
) -> dict:
    """The parameters with their defaults; anything else is refused here."""
    return dict(locals())


def attention(
    outs: Arrays, ins: Arrays, scratch: np.ndarray | None, *, scale: float, **params: object
) -> Callable[[], None]:
    """outs o_BTHK, lse_BHT; ins q_BTHK, k_BSHK, v_BSHK, [segments_q_BT, segments_k_BS], [seed, step, row_offset]."""
    params = _params(**params)  # type: ignore[arg-type]
    (o_BTHK, lse_BHT), (q_BTHK, k_BSHK, v_BSHK) = outs, ins[:3]
    buffers = scratch_arrays("attention", outs, ins, scratch, params)
    masks = _Masks("attention", ins, 3, buffers, params)
    n_batch, n_queries, n_heads, _ = q_BTHK.shape
    n_memory = k_BSHK.shape[1]
    rows = query_rows(n_queries, n_memory, q_BTHK.itemsize)
    blocks = _blocks(n_queries, n_memory, rows, masks.causal, masks.offset)
    calls: list[Call] = [masks.start] if masks.rate else []
    for b in range(n_batch):
        # With segments a block's bias serves all heads; with dropout a head's values serve all blocks.
        pairs = [(block, h) for block in blocks for h in range(n_heads)]
        if masks.rate and not masks.segments:
            pairs = [(block, h) for h in range(n_heads) for block in blocks]
        last_block, last_head = None, None
        for block, h in pairs:
            if block is not last_block:
                calls += masks.prepare(b, block)
            v_SK = v_BSHK[b, :, h]
            if masks.rate:
                if h != last_head:
                    calls += masks.kept(b, h)
                    calls.append(ufunc(np.multiply, v_SK, buffers["mask"][:, None], out=buffers["value"]))
                v_SK = buffers["value"]
            last_block, last_head = block, h
            here = slice(block.t0, block.t1)
            views = (q_BTHK[b, here, h], k_BSHK[b, :, h], v_SK, o_BTHK[b, here, h], lse_BHT[b, h, here])
            calls += _forward(views, block, scale, masks, buffers)
    return run(calls)


def _forward(
    views: tuple[np.ndarray, ...], block: Block, scale: float, masks: _Masks, buffers: dict[str, np.ndarray]
) -> list[Call]:
    """One block of query rows of one head."""
    q_tK, k_SK, v_SK, o_tK, lse_t = views
    n, width = block.t1 - block.t0, block.s1
    if width == 0:
        return [partial(o_tK.fill, 0), partial(lse_t.fill, -np.inf)]
    p_ts = buffers["scores"].reshape(-1)[: n * width].reshape(n, width)
    query, m, s = buffers["query"][:n], buffers["m"][:n], buffers["s"][:n]
    dtype = p_ts.dtype
    calls = [
        ufunc(np.multiply, q_tK, constant(scale, dtype), out=query),
        partial(np.matmul, query, k_SK[:width].T, p_ts),
        *masks.apply(p_ts, block),
        reduction(np.maximum, p_ts, 1, m),
    ]
    if masks.guarded:
        calls.append(ufunc(np.maximum, m, constant(_NEVER, dtype), out=m))
    calls += [
        ufunc(np.subtract, p_ts, m[:, None], out=p_ts),
        ufunc(np.exp, p_ts, out=p_ts),
        partial(np.matmul, p_ts, ones(width, dtype), s),
        partial(np.matmul, p_ts, v_SK[:width], query),
    ]
    if masks.guarded:
        # A row without memory has sums 0: its output is 0 and its lse -inf.
        return [*calls, partial(_normalise_guarded, query, m, s, o_tK, lse_t)]
    return [
        *calls,
        ufunc(np.true_divide, query, s[:, None], out=o_tK),
        ufunc(np.log, s, out=s),
        ufunc(np.add, s, m, out=lse_t),
    ]


def _normalise_guarded(value: np.ndarray, m: np.ndarray, s: np.ndarray, o: np.ndarray, lse: np.ndarray) -> None:
    empty = s == 0
    s[empty] = 1
    np.true_divide(value, s[:, None], o)
    np.log(s, s)
    np.add(s, m, lse)
    lse[empty] = -np.inf


def attention_grad(
    outs: Arrays, ins: Arrays, scratch: np.ndarray | None, *, scale: float, **params: object
) -> Callable[[], None]:
    """outs dq_BTHK, dk_BSHK, dv_BSHK; ins q, k, v, o, lse, do, [segments_q, segments_k], [seed, step, row_offset]."""
    params = _params(**params)  # type: ignore[arg-type]
    q_BTHK, k_BSHK = ins[:2]
    buffers = scratch_arrays("attention_grad", outs, ins, scratch, params)
    masks = _Masks("attention_grad", ins, 6, buffers, params)
    n_batch, n_queries, n_heads, _ = q_BTHK.shape
    n_memory = k_BSHK.shape[1]
    rows = query_rows(n_queries, n_memory, q_BTHK.itemsize)
    # The last block sees the most memory: it goes first and sets dk and dv, to which the others add.
    blocks = _blocks(n_queries, n_memory, rows, masks.causal, masks.offset)[::-1]
    calls: list[Call] = [masks.start] if masks.rate else []
    for b in range(n_batch):
        for h in range(n_heads):
            calls += _backward_head(outs, ins, b, h, blocks, scale, masks, buffers)
    return run(calls)


def _backward_head(
    outs: Arrays,
    ins: Arrays,
    b: int,
    h: int,
    blocks: list[Block],
    scale: float,
    masks: _Masks,
    buffers: dict[str, np.ndarray],
) -> list[Call]:
    """All blocks of one head."""
    q_BTHK, k_BSHK, v_BSHK, o_BTHK, lse_BHT, do_BTHK = ins[:6]
    n_memory, width = k_BSHK.shape[1], q_BTHK.shape[3]
    key, value = buffers["key"][:, : width + 1], buffers["value"][:, : width + 1]
    calls: list[Call] = [
        partial(np.copyto, key[:, :width], k_BSHK[b, :, h]),
        partial(key[:, width].fill, 1),
        partial(value[:, width].fill, 1),
    ]
    v_SK = v_BSHK[b, :, h]
    if masks.rate:
        calls += masks.kept(b, h)
        calls.append(ufunc(np.multiply, v_SK, buffers["mask"][:, None], out=value[:, :width]))
    else:
        calls.append(partial(np.copyto, value[:, :width], v_SK))
    dk_SK, dv_SK = outs[1][b, :, h], outs[2][b, :, h]
    filled = 0
    for block in blocks:
        here = slice(block.t0, block.t1)
        views = (q_BTHK[b, here, h], o_BTHK[b, here, h], lse_BHT[b, h, here], do_BTHK[b, here, h])
        calls += masks.prepare(b, block)
        calls += _backward(views, outs[0][b, here, h], dk_SK, dv_SK, block, scale, masks, buffers, filled)
        filled = max(filled, block.s1)
    if filled < n_memory:
        calls += [partial(dk_SK[filled:].fill, 0), partial(dv_SK[filled:].fill, 0)]
    if masks.rate:
        calls.append(ufunc(np.multiply, dv_SK, buffers["mask"][:, None], out=dv_SK))
    return calls


def _backward(
    views: tuple[np.ndarray, ...],
    dq_tK: np.ndarray,
    dk_SK: np.ndarray,
    dv_SK: np.ndarray,
    block: Block,
    scale: float,
    masks: _Masks,
    buffers: dict[str, np.ndarray],
    filled: int,
) -> list[Call]:
    """One block of query rows; memory rows up to ``filled`` of dk and dv hold sums already."""
    q_tK, o_tK, lse_t, do_tK = views
    n, n_memory, width = block.t1 - block.t0, block.s1, q_tK.shape[1]
    if n_memory == 0:
        return [partial(dq_tK.fill, 0)]
    p_ts, dp_ts = (buffers[k].reshape(-1)[: n * n_memory].reshape(n, n_memory) for k in ("weights", "dscores"))
    query, dout = buffers["query"][:n, : width + 1], buffers["dout"][:n, : width + 1]
    key, value = buffers["key"][:n_memory, : width + 1], buffers["value"][:n_memory, : width + 1]
    calls = [
        ufunc(np.multiply, q_tK, constant(scale, p_ts.dtype), out=query[:, :width]),
        ufunc(np.negative, lse_t, out=query[:, width]),
        partial(np.copyto, dout[:, :width], do_tK),
        partial(np.vecdot, do_tK, o_tK, buffers["d"][:n]),
        ufunc(np.negative, buffers["d"][:n], out=dout[:, width]),
    ]
    if masks.guarded:
        # Rows without memory have lse -inf; minus that would make weights of them.
        calls.append(partial(_hide_empty, lse_t, query[:, width]))
    calls += [
        partial(np.matmul, query, key.T, p_ts),
        *masks.apply(p_ts, block),
        ufunc(np.exp, p_ts, out=p_ts),
        partial(np.matmul, dout, value.T, dp_ts),
        ufunc(np.multiply, dp_ts, p_ts, out=dp_ts),
        partial(np.matmul, dp_ts, key[:, :width], buffers["d_query"][:n]),
        ufunc(np.multiply, buffers["d_query"][:n], constant(scale, p_ts.dtype), out=dq_tK),
    ]
    for weights, rows, target in ((p_ts, dout, dv_SK), (dp_ts, query, dk_SK)):
        part = buffers["part"][:n_memory]
        calls.append(partial(np.matmul, weights.T, rows[:, :width], part))
        both = min(filled, n_memory)
        if both:
            calls.append(ufunc(np.add, target[:both], part[:both], out=target[:both]))
        if both < n_memory:
            calls.append(partial(np.copyto, target[both:n_memory], part[both:]))
    return calls


def _hide_empty(lse: np.ndarray, column: np.ndarray) -> None:
    np.copyto(column, _NEVER, where=np.isneginf(lse))


KERNELS = {"attention": attention, "attention_grad": attention_grad}

"""Attention by blocks of query rows, and its gradient by blocks of memory rows, which computes the scores again.

Suffixes: B batch, T query length, S memory length, H heads, K per-head size; within a block t query rows and s memory
rows. Blocks above the causal diagonal are never computed. The gradient works on transposed scores [s, t]: there lse
and D are added along rows that are contiguous, dk and dv of a block are one product each, and only dq is a sum.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np

from ..contracts.attention import product_rows, score_rows
from .blocks import Arrays, Call, constant, ones, reduction, run, scratch_arrays, spans, ufunc
from .dropout import MAX_GAP, fill_keep
from .random import Stream, keep_threshold, plan_draws

# -inf, but safe to subtract from -inf: no score comes near it.
_NEVER = -1e30
# A bias of up to this many numbers is added to a whole block, in one sweep; a larger one where it is not zero.
_WIDE_BIAS = 32768
# Draws made at once for the masks of dropout.
_DRAWS = 16000


class Block(NamedTuple):
    """Scores of query rows [t0, t1) and memory rows [s0, s1) that are computed at once."""

    t0: int
    t1: int
    s0: int
    s1: int


def _forward_blocks(n_queries: int, n_memory: int, rows: int, causal: bool, offset: int) -> list[Block]:
    """Blocks of query rows with the memory that any of them sees."""
    return [
        Block(t0, t1, 0, max(0, min(n_memory, offset + t1)) if causal else n_memory)
        for t0, t1 in spans(n_queries, rows)
    ]


def _backward_blocks(n_queries: int, n_memory: int, rows: int, causal: bool, offset: int) -> list[Block]:
    """Blocks of memory rows with the queries that see any of them."""
    return [
        Block(max(0, min(n_queries, s0 - offset)) if causal else 0, n_queries, s0, s1)
        for s0, s1 in spans(n_memory, rows)
    ]


@lru_cache(maxsize=64)
def _hiding_bias(n_queries: int, n_memory: int, first: int, transposed: bool, dtype: np.dtype) -> np.ndarray:
    """[t, s], or [s, t] if transposed: 0 where memory row s is at most first + t, -inf beyond."""
    hidden = np.arange(n_memory) > first + np.arange(n_queries)[:, None]
    bias = np.where(np.ascontiguousarray(hidden.T) if transposed else hidden, -np.inf, 0.0).astype(dtype)
    bias.flags.writeable = False
    return bias


class _Masks:
    """Which scores count, and which memory rows are dropped, for all blocks of one call."""

    def __init__(self, ins: Arrays, n_first: int, buffers: dict[str, np.ndarray], params: dict, transposed: bool):
        self.dtype, self.buffers, self.transposed = ins[0].dtype, buffers, transposed
        self.causal, self.offset = params["causal"], params["query_offset"]
        self.segments = tuple(ins[n_first : n_first + 2]) if params["has_segments"] else ()
        # Only then may a row attend to nothing.
        self.guarded = bool(self.segments) or (self.causal and self.offset < 0)
        self.rate = params["dropout"]
        if self.rate:
            self.seed, self.step, self.row_offset = ins[n_first + len(self.segments) :][:3]
            self.stream, self.threshold = Stream(params["name_key"]), keep_threshold(self.rate)
            self.place, self.shift = params, 0

    def start(self) -> None:
        """Place the random stream for this call."""
        self.stream.start(int(self.seed), int(self.step))
        self.shift = int(self.row_offset) * self.place["heads_global"] * self.place["memory_global"]

    def prepare(self, b: int, block: Block) -> list[Call]:
        """Calls that make the bias of a block, the same for all heads."""
        if not self.segments or block.s0 == block.s1 or block.t0 == block.t1:
            return []
        queries, memory = self.segments[0][b, block.t0 : block.t1, None], self.segments[1][b, None, block.s0 : block.s1]
        shape = (block.t1 - block.t0, block.s1 - block.s0)
        if self.transposed:
            queries, memory, shape = queries.T, memory.T, shape[::-1]
        bias, differs = (self.buffers[k].reshape(-1)[: shape[0] * shape[1]].reshape(shape) for k in ("bias", "differs"))
        return [
            ufunc(np.not_equal, queries, memory, out=differs),
            partial(bias.fill, 0),
            partial(np.copyto, bias, constant(-np.inf, self.dtype), "same_kind", differs),
            *self._hide_future(bias, block),
        ]

    def apply(self, scores: np.ndarray, block: Block) -> list[Call]:
        """Calls that hide the scores of a block that do not count."""
        if self.segments:
            bias = self.buffers["bias"].reshape(-1)[: scores.size].reshape(scores.shape)
            return [ufunc(np.add, scores, bias, out=scores)]
        return self._hide_future(scores, block)

    def _hide_future(self, scores: np.ndarray, block: Block) -> list[Call]:
        """Calls that put -inf where the memory lies beyond the query."""
        t0, t1, s0, s1 = block
        if not self.causal or s1 - 1 <= self.offset + t0:
            return []
        if scores.size > _WIDE_BIAS:
            # Rows below, or columns left of, the diagonal see everything.
            t1 = max(t0, min(t1, s1 - 1 - self.offset))
            s0 = max(s0, min(s1, self.offset + t0 + 1))
            part = (slice(s0 - block.s0, None), slice(0, t1 - t0))
            scores = scores[part if self.transposed else part[::-1]]
        bias = _hiding_bias(t1 - t0, s1 - s0, self.offset + t0 - s0, self.transposed, self.dtype)
        return [ufunc(np.add, scores, bias, out=scores)]

    def draw(self, b: int) -> list[Call]:
        """Calls that make ``mask`` [H, S]: 1 / (1 - rate) at memory rows that are kept, 0 at the others."""
        keep, mask, p = self.buffers["keep"], self.buffers["mask"], self.place
        element = ((p["row_start"] + b) * p["heads_global"] + p["head_start"]) * p["memory_global"]
        draws = plan_draws(keep.shape, (p["memory_global"], 1), element, _DRAWS, MAX_GAP)
        flat = keep.reshape(-1)
        targets = [flat[d.at : d.at + d.rows * d.length].reshape(d.rows, d.length) for d in draws]

        def call() -> None:
            for one, target in zip(draws, targets, strict=True):
                fill_keep(self.stream, one, self.shift, self.threshold, target)

        return [call, ufunc(np.multiply, keep, constant(1 / (1 - self.rate), self.dtype), out=mask)]


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
    masks = _Masks(ins, 3, buffers, params, transposed=False)
    n_batch, n_queries, n_heads, _ = q_BTHK.shape
    n_memory = k_BSHK.shape[1]
    rows = score_rows(n_queries, n_memory, q_BTHK.itemsize, masks.causal)
    blocks = _forward_blocks(n_queries, n_memory, rows, masks.causal, masks.offset)
    # With segments a block's bias serves all heads; with dropout alone a head's values serve all blocks.
    pairs = [(block, h) for block in blocks for h in range(n_heads)]
    if masks.rate and not masks.segments:
        pairs = [(block, h) for h in range(n_heads) for block in blocks]
    calls: list[Call] = [masks.start] if masks.rate else []
    for b in range(n_batch):
        calls += masks.draw(b) if masks.rate else []
        last_block, last_head = None, None
        for block, h in pairs:
            if block is not last_block:
                calls += masks.prepare(b, block)
            v_SK = v_BSHK[b, :, h]
            if masks.rate:
                if h != last_head:
                    calls.append(ufunc(np.multiply, v_SK, buffers["mask"][h, :, None], out=buffers["value"]))
                v_SK = buffers["value"]
            last_block, last_head = block, h
            here = slice(block.t0, block.t1)
            views = (q_BTHK[b, here, h], k_BSHK[b, :, h], v_SK, o_BTHK[b, here, h])
            sums = (lse_BHT[b, h, here], buffers["s"][h, here])
            calls += _forward(views, sums, block, scale, masks, buffers)
        # lse holds the rows' maxima so far.
        calls += [
            ufunc(np.log, buffers["s"], out=buffers["s"]),
            ufunc(np.add, lse_BHT[b], buffers["s"], out=lse_BHT[b]),
        ]
    return run(calls)


def _forward(
    views: tuple[np.ndarray, ...],
    sums: tuple[np.ndarray, np.ndarray],
    block: Block,
    scale: float,
    masks: _Masks,
    buffers: dict[str, np.ndarray],
) -> list[Call]:
    """One block of query rows of one head; leaves the maxima and the sums of its weights in ``sums``."""
    q_tK, k_SK, v_SK, o_tK = views
    m_t, s_t = sums
    n, width, dtype = block.t1 - block.t0, block.s1, q_tK.dtype
    if width == 0:
        return [partial(o_tK.fill, 0), partial(m_t.fill, -np.inf), partial(s_t.fill, 1)]
    p_ts = buffers["scores"].reshape(-1)[: n * width].reshape(n, width)
    calls = [
        partial(np.matmul, q_tK, k_SK[:width].T, p_ts),
        ufunc(np.multiply, p_ts, constant(scale, dtype), out=p_ts),
        *masks.apply(p_ts, block),
        reduction(np.maximum, p_ts, 1, m_t),
    ]
    if masks.guarded:
        calls.append(ufunc(np.maximum, m_t, constant(_NEVER, dtype), out=m_t))
    calls += [
        ufunc(np.subtract, p_ts, m_t[:, None], out=p_ts),
        ufunc(np.exp, p_ts, out=p_ts),
        partial(np.matmul, p_ts, ones(width, dtype), s_t),
    ]
    if masks.guarded:
        calls.append(partial(_empty_rows, m_t, s_t))
    # The smaller of the weights and the output is divided by the sums; the output's short rows cost as much as
    # weights several times as wide.
    if width <= 6 * q_tK.shape[1]:
        calls.append(ufunc(np.true_divide, p_ts, s_t[:, None], out=p_ts))
        return [*calls, partial(np.matmul, p_ts, v_SK[:width], o_tK)]
    output = buffers["output"][:n]
    return [
        *calls,
        partial(np.matmul, p_ts, v_SK[:width], output),
        ufunc(np.true_divide, output, s_t[:, None], out=o_tK),
    ]


def _empty_rows(m: np.ndarray, s: np.ndarray) -> None:
    """Rows that see no memory: their sums are 0, and their weights; make their lse -inf and nothing NaN."""
    empty = s == 0
    s[empty] = 1
    m[empty] = -np.inf


def attention_grad(
    outs: Arrays, ins: Arrays, scratch: np.ndarray | None, *, scale: float, **params: object
) -> Callable[[], None]:
    """outs dq_BTHK, dk_BSHK, dv_BSHK; ins q, k, v, o, lse, do, [segments_q, segments_k], [seed, step, row_offset]."""
    params = _params(**params)  # type: ignore[arg-type]
    q_BTHK, k_BSHK = ins[:2]
    buffers = scratch_arrays("attention_grad", outs, ins, scratch, params)
    masks = _Masks(ins, 6, buffers, params, transposed=True)
    n_batch, n_queries, n_heads, _ = q_BTHK.shape
    n_memory = k_BSHK.shape[1]
    rows = score_rows(n_memory, n_queries, q_BTHK.itemsize, masks.causal)
    # Ascending, so that the first block meets every query that sees memory at all: it sets dq, the others add.
    blocks = _backward_blocks(n_queries, n_memory, rows, masks.causal, masks.offset)
    calls: list[Call] = [masks.start] if masks.rate else []
    for b in range(n_batch):
        calls += masks.draw(b) if masks.rate else []
        calls += _row_sums(ins, b, masks, buffers)
        if not blocks or blocks[0].t0 > 0:
            calls.append(partial(outs[0][b, : blocks[0].t0 if blocks else None].fill, 0))
        for block in blocks:
            calls += masks.prepare(b, block)
            for h in range(n_heads):
                calls += _backward(outs, ins, b, h, block, scale, masks, buffers)
    return run(calls)


def _row_sums(ins: Arrays, b: int, masks: _Masks, buffers: dict[str, np.ndarray]) -> list[Call]:
    """Calls that make d [H, T] = sums over K of do * o, for all heads at once, and lse that is safe to subtract."""
    o_THK, lse_HT, do_THK = ins[3][b], ins[4][b], ins[5][b]
    n_queries, n_heads, width = do_THK.shape
    calls: list[Call] = []
    for t0, t1 in spans(n_queries, product_rows(n_queries, n_heads, width, do_THK.itemsize)):
        products = buffers["products"][: t1 - t0]
        calls += [
            ufunc(np.multiply, do_THK[t0:t1], o_THK[t0:t1], out=products),
            partial(np.matmul, products, ones(width, do_THK.dtype), buffers["d_by_row"][t0:t1]),
        ]
    calls.append(partial(np.copyto, buffers["d"], buffers["d_by_row"].T))
    if masks.guarded:
        calls.append(partial(_safe_lse, lse_HT, buffers["lse"]))
    else:
        calls.append(partial(np.copyto, buffers["lse"], lse_HT))
    return calls


def _safe_lse(lse: np.ndarray, out: np.ndarray) -> None:
    """Rows that see no memory have lse -inf; less that, their scores would become weights."""
    np.copyto(out, lse)
    np.copyto(out, -_NEVER, where=np.isneginf(lse))


def _backward(
    outs: Arrays,
    ins: Arrays,
    b: int,
    h: int,
    block: Block,
    scale: float,
    masks: _Masks,
    buffers: dict[str, np.ndarray],
) -> list[Call]:
    """One block of memory rows of one head."""
    t, s = slice(block.t0, block.t1), slice(block.s0, block.s1)
    q_tK, k_sK, v_sK, do_tK = ins[0][b, t, h], ins[1][b, s, h], ins[2][b, s, h], ins[5][b, t, h]
    dq_tK, dk_sK, dv_sK = outs[0][b, t, h], outs[1][b, s, h], outs[2][b, s, h]
    shape = (block.s1 - block.s0, block.t1 - block.t0)
    if shape[1] == 0:
        return [partial(dk_sK.fill, 0), partial(dv_sK.fill, 0)]
    n, dtype = shape[0] * shape[1], q_tK.dtype
    p_st, dp_st = (buffers[name].reshape(-1)[:n].reshape(shape) for name in ("weights", "dscores"))
    calls = [
        partial(np.matmul, k_sK, q_tK.T, p_st),
        ufunc(np.multiply, p_st, constant(scale, dtype), out=p_st),
        *masks.apply(p_st, block),
        ufunc(np.subtract, p_st, buffers["lse"][h, t], out=p_st),
        ufunc(np.exp, p_st, out=p_st),
        partial(np.matmul, p_st, do_tK, dv_sK),
        partial(np.matmul, v_sK, do_tK.T, dp_st),
    ]
    if masks.rate:
        mask = buffers["mask"][h, s, None]
        calls.append(ufunc(np.multiply, dv_sK, mask, out=dv_sK))
        calls.append(ufunc(np.multiply, dp_st, mask, out=dp_st))
    calls += [
        ufunc(np.subtract, dp_st, buffers["d"][h, t], out=dp_st),
        ufunc(np.multiply, dp_st, p_st, out=dp_st),
        ufunc(np.multiply, dp_st, constant(scale, dtype), out=dp_st),
        partial(np.matmul, dp_st, q_tK, dk_sK),
    ]
    if block.s0 == 0:
        return [*calls, partial(np.matmul, dp_st.T, k_sK, dq_tK)]
    part = buffers["part"][: shape[1]]
    return [*calls, partial(np.matmul, dp_st.T, k_sK, part), ufunc(np.add, dq_tK, part, out=dq_tK)]


KERNELS = {"attention": attention, "attention_grad": attention_grad}

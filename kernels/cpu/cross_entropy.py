"""Cross-entropy of rows of logits, whole or with the vocabulary split over several slices.

Suffixes: R rows, V columns of this slice. Blocks of rows make the passes over the logits; what is one number a row is
done for many rows at once, afterwards. With off = label_smoothing / vocab and on = 1 - label_smoothing + off,

    loss = lse - on x_t - off sum_{v != t} x_v + z_loss lse^2 = lse - (on - off) x_t - off sum_v x_v + z_loss lse^2
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from ..contracts.rows import softmax_rows
from .blocks import Arrays, Call, constant, ones, reduction, run, scratch_arrays, spans, ufunc
from .softmax import exponentials, log_plus, row_sums

# Rows whose targets are looked up at once: NumPy's indexing makes a copy of as many numbers.
LOOKUP_ROWS = 1024


def cross_entropy(
    outs: Arrays,
    ins: Arrays,
    scratch: np.ndarray | None,
    *,
    vocab: int,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    ignore: int | None = None,
) -> Callable[[], None]:
    """outs loss_R, lse_R; ins logits_RV, targets_R."""
    loss_R, lse_R = outs
    logits_RV, targets_R = ins
    buffers = scratch_arrays("cross_entropy", outs, ins, scratch, {})
    x_RV = logits_RV[:, : _n_valid(logits_RV, 0, vocab)]
    m_R, s_R, total_R = buffers["m"], buffers["s"], buffers["total"]
    calls: list[Call] = []
    for x, work, r0, r1 in _blocks(x_RV, buffers["work"]):
        calls += exponentials(x, work, m_R[r0:r1], s_R[r0:r1], ones(x.shape[1], x.dtype))
        if label_smoothing:
            calls.append(row_sums(x, total_R[r0:r1], ones(x.shape[1], x.dtype)))
    calls += _gather(x_RV, targets_R, 0, buffers)
    calls += _losses(
        (loss_R, lse_R), m_R, s_R, buffers["at"], total_R, targets_R, buffers, vocab, label_smoothing, z_loss, ignore
    )
    return run(calls)


def _n_valid(logits_RV: np.ndarray, offset: int, vocab: int) -> int:
    """Columns of this slice that are no padding."""
    return max(0, min(logits_RV.shape[1], vocab - offset))


def _blocks(x_RV: np.ndarray, work: np.ndarray):
    """(rows of x, work array as large, first row, last row + 1) of each block."""
    n_rows, width = x_RV.shape
    rows = softmax_rows(n_rows, width, x_RV.itemsize)
    rows = min(rows, work.size // max(1, width))
    for r0, r1 in spans(n_rows, rows):
        yield x_RV[r0:r1], work.reshape(-1)[: (r1 - r0) * width].reshape(r1 - r0, width), r0, r1


def _locate(targets_R: np.ndarray, offset: int, n_valid: int, buffers: dict[str, np.ndarray]) -> list[Call]:
    """index = column of the target in this slice, clipped into it; inside = whether it was there."""
    index, inside, flag = buffers["index"], buffers["inside"], buffers["flag"]
    return [
        ufunc(np.subtract, targets_R, constant(offset, np.int64), out=index),
        ufunc(np.greater_equal, index, constant(0, np.int64), out=inside),
        ufunc(np.less, index, constant(n_valid, np.int64), out=flag),
        ufunc(np.logical_and, inside, flag, out=inside),
        ufunc(np.maximum, index, constant(0, np.int64), out=index),
        ufunc(np.minimum, index, constant(max(0, n_valid - 1), np.int64), out=index),
    ]


def _gather(x_RV: np.ndarray, targets_R: np.ndarray, offset: int, buffers: dict[str, np.ndarray]) -> list[Call]:
    """at = logit of the target, 0 where it is not in this slice."""
    at, index, inside = buffers["at"], buffers["index"], buffers["inside"]
    if x_RV.shape[1] == 0:
        return [partial(at.fill, 0)]
    calls = _locate(targets_R, offset, x_RV.shape[1], buffers)
    for r0, r1 in spans(len(x_RV), LOOKUP_ROWS):
        calls.append(partial(_take, x_RV[r0:r1], np.arange(r1 - r0), index[r0:r1], inside[r0:r1], at[r0:r1]))
    return calls


def _take(x: np.ndarray, rows: np.ndarray, index: np.ndarray, inside: np.ndarray, at: np.ndarray) -> None:
    at.fill(0)
    np.copyto(at, x[rows, index], where=inside)


def _ignored(targets_R: np.ndarray, ignore: int | None, buffers: dict[str, np.ndarray]) -> list[Call]:
    """ignored = rows whose target is negative or ``ignore``."""
    ignored, flag = buffers["ignored"], buffers["flag"]
    calls = [ufunc(np.less, targets_R, constant(0, targets_R.dtype), out=ignored)]
    if ignore is not None:
        calls.append(ufunc(np.equal, targets_R, constant(ignore, targets_R.dtype), out=flag))
        calls.append(ufunc(np.logical_or, ignored, flag, out=ignored))
    return calls


def _losses(
    outs: tuple[np.ndarray, np.ndarray],
    m_R: np.ndarray,
    s_R: np.ndarray,
    at_R: np.ndarray,
    total_R: np.ndarray,
    targets_R: np.ndarray,
    buffers: dict[str, np.ndarray],
    vocab: int,
    label_smoothing: float,
    z_loss: float,
    ignore: int | None,
) -> list[Call]:
    """lse = m + log(s) and the loss, from numbers of which each row has one."""
    loss_R, lse_R = outs
    dtype, work = loss_R.dtype, buffers["term"]
    calls = [
        partial(log_plus, s_R, m_R, lse_R, work),
        ufunc(np.multiply, at_R, constant(1 - label_smoothing, dtype), out=work),
        ufunc(np.subtract, lse_R, work, out=loss_R),
    ]
    if label_smoothing:
        calls.append(ufunc(np.multiply, total_R, constant(label_smoothing / vocab, dtype), out=work))
        calls.append(ufunc(np.subtract, loss_R, work, out=loss_R))
    if z_loss:
        calls.append(ufunc(np.multiply, lse_R, lse_R, out=work))
        calls.append(ufunc(np.multiply, work, constant(z_loss, dtype), out=work))
        calls.append(ufunc(np.add, loss_R, work, out=loss_R))
    calls += _ignored(targets_R, ignore, buffers)
    return [*calls, partial(np.copyto, loss_R, constant(0, dtype), "same_kind", buffers["ignored"])]


def cross_entropy_grad(
    outs: Arrays,
    ins: Arrays,
    scratch: np.ndarray | None,
    *,
    vocab: int,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    ignore: int | None = None,
    offset: int = 0,
) -> Callable[[], None]:
    """outs dlogits_RV; ins logits_RV, targets_R, lse_R, dloss_R."""
    dx_RV = outs[0]
    logits_RV, targets_R, lse_R, dloss_R = ins
    buffers = scratch_arrays("cross_entropy_grad", outs, ins, scratch, {})
    n_valid, dtype = _n_valid(logits_RV, offset, vocab), logits_RV.dtype
    calls: list[Call] = []
    if n_valid < dx_RV.shape[1]:
        calls.append(partial(dx_RV[:, n_valid:].fill, 0))
    if n_valid == 0:
        return run(calls)
    # One number a row: the factor of the softmax, and what every column and the target's lose.
    soft_R, off_R, target_R, ignored_R = buffers["s"], buffers["total"], buffers["at"], buffers["ignored"]
    calls += [
        *_ignored(targets_R, ignore, buffers),
        partial(np.copyto, off_R, dloss_R),
        partial(np.copyto, off_R, constant(0, dtype), "same_kind", ignored_R),
        ufunc(np.multiply, lse_R, constant(2 * z_loss, dtype), out=soft_R),
        ufunc(np.add, soft_R, constant(1, dtype), out=soft_R),
        ufunc(np.multiply, soft_R, off_R, out=soft_R),
        *_locate(targets_R, offset, n_valid, buffers),
        ufunc(np.multiply, off_R, constant(1 - label_smoothing, dtype), out=target_R),
        ufunc(np.multiply, target_R, buffers["inside"], out=target_R),
        ufunc(np.multiply, off_R, constant(label_smoothing / vocab, dtype), out=off_R),
    ]
    for r0, r1 in spans(len(dx_RV), softmax_rows(len(dx_RV), n_valid, dtype.itemsize)):
        x, dx = logits_RV[r0:r1, :n_valid], dx_RV[r0:r1, :n_valid]
        calls += [
            ufunc(np.subtract, x, lse_R[r0:r1, None], out=dx),
            ufunc(np.exp, dx, out=dx),
            ufunc(np.multiply, dx, soft_R[r0:r1, None], out=dx),
        ]
        if label_smoothing:
            calls.append(ufunc(np.subtract, dx, off_R[r0:r1, None], out=dx))
    for r0, r1 in spans(len(dx_RV), LOOKUP_ROWS):
        rows = np.arange(r1 - r0)
        calls.append(partial(_subtract_at, dx_RV[r0:r1], rows, buffers["index"][r0:r1], target_R[r0:r1]))
        calls.append(partial(_clear_rows, dx_RV[r0:r1], ignored_R[r0:r1]))
    return run(calls)


def _subtract_at(dx: np.ndarray, rows: np.ndarray, index: np.ndarray, amount: np.ndarray) -> None:
    dx[rows, index] -= amount


def _clear_rows(dx: np.ndarray, ignored: np.ndarray) -> None:
    """Zeros in ignored rows: a factor 0 alone would leave the NaN that an unused row may hold."""
    if ignored.any():
        dx[ignored] = 0


def cross_entropy_max(
    outs: Arrays, ins: Arrays, scratch: np.ndarray | None, *, offset: int, vocab: int
) -> Callable[[], None]:
    """outs m_R; ins logits_RV."""
    m_R, logits_RV = outs[0], ins[0]
    n_valid = _n_valid(logits_RV, offset, vocab)
    if n_valid == 0:
        return partial(m_R.fill, -np.inf)
    return reduction(np.maximum, logits_RV[:, :n_valid], 1, m_R)  # type: ignore[return-value]


def cross_entropy_sums(
    outs: Arrays, ins: Arrays, scratch: np.ndarray | None, *, offset: int, vocab: int
) -> Callable[[], None]:
    """outs s_3R; ins logits_RV, targets_R, m_R."""
    s_3R = outs[0]
    logits_RV, targets_R, m_R = ins
    buffers = scratch_arrays("cross_entropy_sums", outs, ins, scratch, {})
    x_RV = logits_RV[:, : _n_valid(logits_RV, offset, vocab)]
    if x_RV.shape[1] == 0:
        return partial(s_3R.fill, 0)
    lowest = constant(np.finfo(x_RV.dtype).min, x_RV.dtype)
    calls: list[Call] = [ufunc(np.maximum, m_R, lowest, out=buffers["m"])]
    for x, work, r0, r1 in _blocks(x_RV, buffers["work"]):
        calls += [
            ufunc(np.subtract, x, buffers["m"][r0:r1, None], out=work),
            ufunc(np.exp, work, out=work),
            row_sums(work, s_3R[0, r0:r1], ones(x.shape[1], x.dtype)),
            row_sums(x, s_3R[2, r0:r1], ones(x.shape[1], x.dtype)),
        ]
    calls += _gather(x_RV, targets_R, offset, buffers)
    return run([*calls, partial(np.copyto, s_3R[1], buffers["at"])])


def cross_entropy_finish(
    outs: Arrays,
    ins: Arrays,
    scratch: np.ndarray | None,
    *,
    vocab: int,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    ignore: int | None = None,
) -> Callable[[], None]:
    """outs loss_R, lse_R; ins m_R, s_3R, targets_R."""
    m_R, s_3R, targets_R = ins
    buffers = scratch_arrays("cross_entropy_finish", outs, ins, scratch, {})
    rest = (targets_R, buffers, vocab, label_smoothing, z_loss, ignore)
    return run(_losses((outs[0], outs[1]), m_R, s_3R[0], s_3R[1], s_3R[2], *rest))


KERNELS = {
    "cross_entropy": cross_entropy,
    "cross_entropy_grad": cross_entropy_grad,
    "cross_entropy_max": cross_entropy_max,
    "cross_entropy_sums": cross_entropy_sums,
    "cross_entropy_finish": cross_entropy_finish,
}

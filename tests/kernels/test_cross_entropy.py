"""Cross-entropy, whole and split, against a formula in float64."""

import numpy as np
import pytest

VOCAB, COLUMNS, ROWS = 61, 64, 1501
OPTIONS = [
    {"label_smoothing": 0.0, "z_loss": 0.0, "ignore": None},
    {"label_smoothing": 0.1, "z_loss": 0.0, "ignore": 0},
    {"label_smoothing": 0.1, "z_loss": 1e-2, "ignore": None},
]


def _reference(logits, targets, dloss, vocab, label_smoothing, z_loss, ignore):
    """loss, lse, dlogits in float64."""
    x = logits.astype(np.float64)[:, :vocab]
    lse = np.log(np.exp(x - x.max(1, keepdims=True)).sum(1)) + x.max(1)
    counted = targets >= 0
    if ignore is not None:
        counted &= targets != ignore
    off = label_smoothing / vocab
    q = np.full(x.shape, off)
    q[np.arange(len(x)), np.where(counted, targets, 0)] = 1 - label_smoothing + off
    loss = np.where(counted, lse - (q * x).sum(1) + z_loss * lse**2, 0)
    dx = np.exp(x - lse[:, None]) * (1 + 2 * z_loss * lse[:, None]) - q
    grad = np.zeros(logits.shape)
    grad[:, :vocab] = np.where(counted[:, None], dx * dloss[:, None], 0)
    return loss, lse, grad


def _data(rng, dtype, target_dtype=np.int32):
    logits = (3 * rng.standard_normal((ROWS, COLUMNS))).astype(dtype)
    logits[:, VOCAB:] = 1e4  # padding takes no part
    targets = rng.integers(0, VOCAB, ROWS).astype(target_dtype)
    targets[::7], targets[3] = -1, 0
    return logits, targets, rng.standard_normal(ROWS).astype(dtype)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("target_dtype", [np.int32, np.int64])
def test_cross_entropy_and_its_gradient(kernel, close, rng, dtype, options, target_dtype):
    logits, targets, dloss = _data(rng, dtype, target_dtype)
    want_loss, want_lse, want_grad = _reference(logits, targets, dloss, VOCAB, **options)
    loss, lse, grad = np.empty(ROWS, dtype), np.empty(ROWS, dtype), np.empty_like(logits)
    kernel("cross_entropy", (loss, lse), (logits, targets), vocab=VOCAB, **options)
    close(loss, want_loss)
    close(lse, want_lse)
    assert not loss[::7].any()
    kernel("cross_entropy_grad", (grad,), (logits, targets, lse, dloss), vocab=VOCAB, offset=0, **options)
    close(grad, want_grad)
    assert not grad[::7].any() and not grad[:, VOCAB:].any()


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("width", [32, 16, 1])
def test_a_split_vocabulary_gives_the_same(kernel, close, rng, dtype, options, width):
    logits, targets, dloss = _data(rng, dtype)
    want_loss, want_lse, want_grad = _reference(logits, targets, dloss, VOCAB, **options)
    slices = [(o, logits[:, o : o + width]) for o in range(0, COLUMNS, width)]
    maxima, sums = [], []
    for offset, part in slices:
        m = np.empty(ROWS, dtype)
        kernel("cross_entropy_max", (m,), (part,), offset=offset, vocab=VOCAB)
        maxima.append(m)
    m = np.max(maxima, axis=0)
    for offset, part in slices:
        s = np.empty((3, ROWS), dtype)
        kernel("cross_entropy_sums", (s,), (part, targets, m), offset=offset, vocab=VOCAB)
        sums.append(s)
    loss, lse = np.empty(ROWS, dtype), np.empty(ROWS, dtype)
    total = np.sum(sums, axis=0)
    kernel("cross_entropy_finish", (loss, lse), (m, total, targets), vocab=VOCAB, **options)
    close(loss, want_loss)
    close(lse, want_lse)
    for offset, part in slices:
        grad = np.full(part.shape, np.nan, dtype)
        kernel("cross_entropy_grad", (grad,), (part, targets, lse, dloss), vocab=VOCAB, offset=offset, **options)
        assert np.abs(grad - want_grad[:, offset : offset + width]).max() <= 64 * np.finfo(dtype).eps * np.abs(want_grad).max()


def test_a_wide_vocabulary_in_place(kernel, close, rng, dtype):
    logits = (5 * rng.standard_normal((13, 8192))).astype(dtype)
    targets, dloss = rng.integers(0, 8000, 13), np.ones(13, dtype)
    options = {"label_smoothing": 0.1, "z_loss": 1e-4, "ignore": None}
    want = _reference(logits, targets, dloss, 8000, **options)
    loss, lse, grad = np.empty(13, dtype), np.empty(13, dtype), np.empty_like(logits)
    kernel("cross_entropy", (loss, lse), (logits, targets), vocab=8000, **options)
    close(loss, want[0])
    close(lse, want[1])
    kernel("cross_entropy_grad", (grad,), (logits, targets, lse, dloss), vocab=8000, offset=0, **options)
    close(grad, want[2])


def test_nan_in_an_ignored_row_stays_out(kernel, rng, dtype):
    logits, targets, dloss = _data(rng, dtype)
    logits[::7] = np.nan
    loss, lse, grad = np.empty(ROWS, dtype), np.empty(ROWS, dtype), np.empty_like(logits)
    with np.errstate(invalid="ignore"):
        kernel("cross_entropy", (loss, lse), (logits, targets), vocab=VOCAB)
        kernel("cross_entropy_grad", (grad,), (logits, targets, lse, dloss), vocab=VOCAB)
    assert np.isfinite(loss).all() and np.isfinite(grad).all() and not grad[::7].any()

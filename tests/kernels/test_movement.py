"""Copies, windows and lookups: exact, whatever the strides."""

import numpy as np
import pytest


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0), (2, 1, 0), (0, 2, 1)])
def test_copy_takes_any_strides(kernel, rng, dtype, order):
    x = rng.standard_normal((131, 70, 67)).astype(dtype).transpose(order)
    y = np.empty(x.shape, dtype)
    kernel("copy", (y,), (x,))
    assert np.array_equal(y, x)
    back = np.empty(np.array(x.shape)[np.argsort(order)], dtype).transpose(order)
    kernel("copy", (back,), (x,))
    assert np.array_equal(back, x)


def test_copy_casts_broadcasts_and_leaves_itself_alone(kernel, rng):
    x = rng.integers(-100, 100, (1, 301)).astype(np.int64)
    y = np.empty((77, 301), np.float32)
    kernel("copy", (y,), (np.broadcast_to(x, y.shape),))
    assert np.array_equal(y, np.broadcast_to(x, y.shape).astype(np.float32))
    kernel("copy", (y,), (y,))
    z = np.empty(y.shape, np.int32)
    kernel("copy", (z,), (y + np.float32(0.7),))
    assert np.array_equal(z, (y + np.float32(0.7)).astype(np.int32))


def test_fill_and_iota(kernel, dtype):
    y = np.empty((5, 2, 7), dtype).transpose(2, 0, 1)
    kernel("fill", (y,), (), value=2.5)
    assert (y == 2.5).all()
    kernel("iota", (y,), (), axis=1, start=40)
    assert np.array_equal(y, np.broadcast_to(np.arange(40, 45)[None, :, None], y.shape))


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_slice_at_reads_its_index_when_called(kernel, rng, dtype, axis):
    x = rng.standard_normal((9, 9, 9)).astype(dtype)
    shape = [9, 9, 9]
    shape[axis] = 4
    y = np.empty(shape, dtype)
    index = np.array(3, np.int64)
    kernel("slice_at", (y,), (x, index), axis=axis)
    assert np.array_equal(y, np.take(x, range(3, 7), axis))
    index[...] = 6
    with pytest.raises(IndexError, match="window of 4 at 6"):
        kernel("slice_at", (y,), (x, index), axis=axis)


@pytest.mark.parametrize("index", [0, 3, 5, 8, 20])
def test_write_at_over_slices_equals_one_write(kernel, rng, dtype, index):
    whole = rng.standard_normal((5, 24, 3)).astype(dtype)
    value = rng.standard_normal((5, 4, 3)).astype(dtype)
    expected = whole.copy()
    expected[:, index : index + 4] = value
    for start in range(0, 24, 6):
        part = whole[:, start : start + 6].copy()
        apart = np.empty_like(part)
        params = {"axis": 1, "start": start, "extent": 6}
        kernel("write_at", (apart,), (part, value, np.array(index)), **params)
        kernel("write_at", (part,), (part, value, np.array(index)), **params)
        assert np.array_equal(part, expected[:, start : start + 6]) and np.array_equal(apart, part)


@pytest.mark.parametrize("ids_dtype", [np.int32, np.int64])
def test_embedding_over_slices_sums_to_the_whole(kernel, rng, dtype, ids_dtype):
    table = rng.standard_normal((60, 37)).astype(dtype)
    ids = rng.integers(0, 60, 2500).astype(ids_dtype)
    total = np.zeros((2500, 37), dtype)
    for offset in range(0, 60, 20):
        y = np.full((2500, 40), np.nan, dtype)[:, :37] if offset else np.full((2500, 37), np.nan, dtype)
        part = table[offset : offset + 20] if offset < 40 else np.asfortranarray(table[40:])
        kernel("embedding", (y,), (part, ids), offset=offset)
        total += y
    assert np.array_equal(total, table[ids])


def test_embedding_grad_is_the_adjoint_and_skips_what_is_elsewhere(kernel, close, rng, dtype):
    ids = rng.integers(-3, 50, 1300).astype(np.int32)
    dy = rng.standard_normal((1300, 34)).astype(dtype)[:, ::2]
    expected = np.zeros((20, 17))
    inside = (ids >= 10) & (ids < 30)
    np.add.at(expected, ids[inside] - 10, dy[inside].astype(np.float64))
    table = np.empty((20, 17), dtype)
    kernel("embedding_grad", (table,), (ids, dy), offset=10)
    close(table, expected)
    before = rng.standard_normal((20, 17)).astype(dtype)
    kernel("scatter_add", (table,), (before, ids, dy), offset=10)
    close(table, expected + before)
    kernel("scatter_add", (before,), (before, ids, dy), offset=10)
    assert np.array_equal(before, table)

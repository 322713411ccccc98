"""Random numbers by position: NumPy's Philox to the bit, and slices that equal the whole's."""

import statistics

import numpy as np
import pytest

from mesh_mpi.kernels.cpu.random import Stream, open_interval

KEY, SEED, STEP = 0xDEADBEEF_12345678, 2**64 - 3, 7


def _reference_words(block, n_blocks, seed=SEED, step=STEP, key=KEY):
    """NumPy's own words; NumPy counts up before it generates."""
    counter = (block + (step << 64) - 1) % (1 << 256)
    return np.random.Philox(key=seed + (key << 64), counter=counter).random_raw(4 * n_blocks)


def _philox_block(counter, key):
    """Ten rounds of Philox4x64, written from its definition."""
    mask = 2**64 - 1
    c, k = list(counter), list(key)
    for _ in range(10):
        p0, p1 = 0xD2E7470EE14C6C93 * c[0], 0xCA5A826395121157 * c[2]
        c = [(p1 >> 64) ^ c[1] ^ k[0], p1 & mask, (p0 >> 64) ^ c[3] ^ k[1], p0 & mask]
        k = [(k[0] + 0x9E3779B97F4A7C15) & mask, (k[1] + 0xBB67AE8584CAA73B) & mask]
    return c


def test_words_are_philox_4x64_10_of_the_position():
    stream = Stream(KEY)
    stream.start(SEED, STEP)
    for block in (0, 1, 5, 4, 10**6, 2**63, 3):
        words = stream.words(block, 2)
        assert np.array_equal(words, _reference_words(block, 2))
        assert words.tolist() == _philox_block((block, STEP, 0, 0), (SEED, KEY)) + _philox_block(
            (block + 1, STEP, 0, 0), (SEED, KEY)
        )


def test_these_words_never_change():
    stream = Stream(0)
    stream.start(0, 0)
    assert [hex(w) for w in stream.words(0, 1).tolist()] == [hex(w) for w in _philox_block((0, 0, 0, 0), (0, 0))]
    # The published vector for counter 0 and key 0.
    assert hex(stream.words(0, 1)[0]) == "0x16554d9eca36314c"


def test_draws_of_16_bits_are_lanes_low_first():
    stream = Stream(KEY)
    stream.start(SEED, STEP)
    words = _reference_words(0, 8)
    expected = [(int(words[e // 4]) >> (16 * (e % 4))) & 0xFFFF for e in range(128)]
    for first, n in ((0, 128), (1, 5), (17, 30), (15, 2), (127, 1)):
        assert stream.draws16(first, n).tolist() == expected[first : first + n]


def test_uniform_draws_are_one_word_each():
    stream = Stream(KEY)
    stream.start(SEED, 0)
    words = _reference_words(0, 100, step=0)
    expected = ((words >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    for first, n in ((0, 400), (1, 7), (3, 1), (4, 4), (9, 390), (2, 3)):
        out = np.empty(n)
        stream.doubles(first, out)
        open_interval(out)
        assert np.array_equal(out, expected[first : first + n])


def _dropout(kernel, x, global_shape, start, row_offset=0, rate=0.25, row_axis=0):
    y = np.full_like(x, np.nan)
    scalars = np.array(SEED, np.uint64), np.array(STEP, np.int64), np.array(row_offset, np.int64)
    params = {"name_key": KEY, "rate": rate, "global_shape": global_shape, "start": start, "row_axis": row_axis}
    kernel("dropout", (y,), (x, *scalars), **params)
    return y


def test_dropout_follows_its_definition(kernel, dtype):
    x = np.ones((5, 9, 33), dtype)
    y = _dropout(kernel, x, (5, 9, 33), (0, 0, 0))
    lanes = _reference_words(0, 100).view("<u2")[: x.size].reshape(x.shape)
    assert np.array_equal(y, np.where(lanes >= 16384, dtype.type(1 / 0.75), 0).astype(dtype))


@pytest.mark.parametrize("split", [(2, 1, 1), (1, 3, 1), (1, 1, 4), (2, 3, 4)])
@pytest.mark.parametrize("shape", [(4, 6, 20), (4, 6, 20000), (4, 300, 128)])
def test_a_slice_of_dropout_is_the_slice_of_the_whole(kernel, rng, split, shape):
    x = rng.standard_normal(shape).astype(np.float32)
    whole = _dropout(kernel, x, shape, (0, 0, 0))
    assert abs((whole == 0).mean() - 0.25) < 0.05
    part = [n // s for n, s in zip(shape, split, strict=True)]
    for c in np.ndindex(*split):
        start = tuple(i * n for i, n in zip(c, part, strict=True))
        box = tuple(slice(s, s + n) for s, n in zip(start, part, strict=True))
        assert np.array_equal(_dropout(kernel, x[box], shape, start), whole[box])


@pytest.mark.parametrize("strided", [False, True])
def test_dropout_broadcasts_over_length_and_knows_its_rows(kernel, rng, dtype, strided):
    x = rng.standard_normal((6, 70, 40)).astype(dtype)
    whole = _dropout(kernel, x, (6, 1, 40), (0, 0, 0))
    kept = whole != 0
    assert (kept == kept[:, :1]).all()
    for row in range(0, 6, 2):
        part = x[row : row + 2]
        if strided:
            part = np.ascontiguousarray(part.transpose(2, 0, 1)).transpose(1, 2, 0)
        # A microbatch is a batch of its own with an offset; its global row count must not matter.
        assert np.array_equal(_dropout(kernel, part, (2, 1, 40), (0, 0, 0), row_offset=row), whole[row : row + 2])
    half = _dropout(kernel, x[:, :, 20:], (6, 1, 40), (0, 0, 20))
    assert np.array_equal(half, whole[:, :, 20:])


def test_dropout_in_place_and_without_a_row_axis(kernel, rng):
    x = np.ones((50, 60), np.float32)
    y = _dropout(kernel, x, (1, 60), (0, 0), row_axis=None)
    assert (y == y[:1]).all() and (y == 0).any()
    from mesh_mpi.kernels import contract
    from mesh_mpi.kernels.cpu import KERNELS

    params = {"name_key": KEY, "rate": 0.25, "global_shape": (1, 60), "start": (0, 0), "row_axis": None}
    scalars = np.array(SEED, np.uint64), np.array(STEP), np.array(0)
    size = contract.KERNELS["dropout"].scratch_bytes([x.shape], [x.shape, (), (), ()], "float32", params)
    KERNELS["dropout"]((x,), (x, *scalars), np.empty(size, np.uint8), **params)()
    assert np.array_equal(x, y)


INITS = [
    {"kind": "normal", "mean": 0.5, "stddev": 0.02},
    {"kind": "truncated_normal", "mean": 0.0, "stddev": 0.04},
    {"kind": "uniform", "low": -0.1, "high": 0.3},
]


def _initialize(kernel, shape, global_shape, start, init, dtype=np.float32, order=None):
    w = np.full(shape, np.nan, dtype)
    if order == "F":
        w = np.asfortranarray(w)
    params = {"init": init, "name_key": KEY, "global_shape": global_shape, "start": start}
    kernel("initialize", (w,), (np.array(SEED, np.uint64),), **params)
    return w


@pytest.mark.parametrize("init", INITS)
@pytest.mark.parametrize("shape", [(7, 5), (24, 1200), (9, 8, 70)])
def test_a_slice_of_initial_values_is_the_slice_of_the_whole(kernel, init, shape):
    whole = _initialize(kernel, shape, shape, (0,) * len(shape), init)
    assert np.isfinite(whole).all()
    for axis, size in enumerate(shape):
        for low, high in ((0, size // 3), (size // 3, size)):
            start = [0] * len(shape)
            start[axis] = low
            part = list(shape)
            part[axis] = high - low
            box = tuple(slice(s, s + n) for s, n in zip(start, part, strict=True))
            for order in (None, "F"):
                found = _initialize(kernel, part, shape, tuple(start), init, order=order)
                assert np.array_equal(found, whole[box])


def test_normal_values_are_the_quantiles_of_the_words(kernel, dtype):
    w = _initialize(kernel, (3000,), (3000,), (0,), {"kind": "normal", "mean": 0.0, "stddev": 1.0}, np.float64)
    u = ((_reference_words(0, 750, step=0) >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    expected = np.array([statistics.NormalDist().inv_cdf(p) for p in u])
    assert np.abs(w - expected).max() < 1e-14
    narrow = _initialize(kernel, (3000,), (3000,), (0,), {"kind": "normal", "mean": 0.0, "stddev": 1.0}, dtype)
    assert np.array_equal(narrow, w.astype(dtype))


def test_the_far_tail_of_the_quantile_is_accurate():
    from mesh_mpi.kernels.cpu.quantile import normal_quantile

    u = np.concatenate([10.0 ** -np.arange(1, 17.0), 1 - 10.0 ** -np.arange(1, 16.0), [0.5, 0.075, 0.925, 2.0**-54]])
    expected = np.array([statistics.NormalDist().inv_cdf(p) for p in u])
    normal_quantile(u, {name: np.empty(u.size) for name in ("drawn", "r", "num", "den")})
    assert np.allclose(u, expected, rtol=1e-14, atol=1e-16)


def test_initial_values_have_the_moments_they_should(kernel):
    n = 200_000
    normal = _initialize(kernel, (n,), (n,), (0,), INITS[0], np.float64)
    assert abs(normal.mean() - 0.5) < 2e-4 and abs(normal.std() / 0.02 - 1) < 0.01
    truncated = _initialize(kernel, (n,), (n,), (0,), INITS[1], np.float64)
    assert np.abs(truncated).max() <= 0.08 and abs(truncated.std() / (0.04 * 0.8796) - 1) < 0.01
    uniform = _initialize(kernel, (n,), (n,), (0,), INITS[2], np.float64)
    assert -0.1 <= uniform.min() and uniform.max() < 0.3 and abs(uniform.mean() - 0.1) < 1e-3


@pytest.mark.parametrize("init, value", [("zeros", 0), ("ones", 1), ("constant", 0.25)])
def test_constant_initial_values(kernel, dtype, init, value):
    w = _initialize(kernel, (3, 5), (6, 5), (3, 0), {"kind": init, "value": value}, dtype)
    assert (w == value).all()

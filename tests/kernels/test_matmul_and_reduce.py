"""Products and reductions against float64."""

import numpy as np
import pytest


def _layout(rng, shape, dtype, kind):
    """An array of ``shape`` in one of the layouts that BLAS takes."""
    *lead, rows, columns = shape
    if kind == "contiguous":
        return rng.standard_normal(shape).astype(dtype)
    if kind == "transposed":
        return rng.standard_normal((*lead, columns, rows)).astype(dtype).swapaxes(-1, -2)
    if kind == "pitched":
        return rng.standard_normal((*lead, rows, columns + 5)).astype(dtype)[..., :columns]
    if kind == "shared":
        return np.broadcast_to(rng.standard_normal((rows, columns)).astype(dtype), shape)
    # heads inside: [rows, lead, columns] in memory
    return np.moveaxis(rng.standard_normal((rows, *lead, columns)).astype(dtype), 0, -2)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("a_kind", ["contiguous", "transposed", "pitched", "heads inside"])
@pytest.mark.parametrize("b_kind", ["contiguous", "transposed", "pitched", "shared"])
@pytest.mark.parametrize("lead", [(), (3,)])
def test_matmul_takes_every_layout_without_a_copy(kernel, close, rng, dtype, lead, a_kind, b_kind, accumulate):
    a = _layout(rng, (*lead, 151, 67), dtype, a_kind)
    b = _layout(rng, (*lead, 67, 257), dtype, b_kind)
    c = _layout(rng, (*lead, 151, 257), dtype, "pitched" if a_kind == "pitched" else "contiguous")
    expected = a.astype(np.float64) @ b.astype(np.float64)
    if accumulate:
        c[...] = 0
        kernel("matmul", (c,), (a, b), accumulate=True)
        close(c, expected, 100)
    else:
        kernel("matmul", (c,), (a, b))
        close(c, expected, 100)


def test_matmul_adds_to_what_is_there(kernel, close, rng, dtype):
    from mesh_mpi.kernels import contract
    from mesh_mpi.kernels.cpu import KERNELS

    a, b, c = (rng.standard_normal(s).astype(dtype) for s in ((300, 40), (40, 2000), (300, 2000)))
    expected = c + a.astype(np.float64) @ b
    size = contract.KERNELS["matmul"].scratch_bytes([c.shape], [a.shape, b.shape], dtype, {"accumulate": True})
    KERNELS["matmul"]((c,), (a, b), np.empty(size, np.uint8), accumulate=True)()
    close(c, expected, 100)


def test_matmul_refuses_what_blas_does_not_take(rng):
    from mesh_mpi.kernels.cpu import KERNELS

    x, c = np.zeros((8, 8), np.float32), np.zeros((4, 4), np.float32)
    with pytest.raises(ValueError, match="a has shape .* which BLAS does not take"):
        KERNELS["matmul"]((c,), (x[::2, ::2], x[:4, :4]), None)


@pytest.mark.parametrize("fn", ["sum", "max", "min", "sum_squares"])
@pytest.mark.parametrize("axes", [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2), ()])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_reductions_follow_the_formula(kernel, close, rng, dtype, fn, axes, order):
    x = rng.standard_normal((41, 67, 53)).astype(dtype).transpose(order)
    wide = x.astype(np.float64)
    expected = {
        "sum": wide.sum(axes), "max": wide.max(axes), "min": wide.min(axes), "sum_squares": (wide * wide).sum(axes),
    }[fn]  # fmt: skip
    y = np.full(np.shape(expected), np.nan, dtype)
    kernel("reduce", (y,), (x,), axes=axes, fn=fn)
    close(y, expected, 30)


def test_column_sums_of_many_rows_keep_their_digits(kernel, close, rng):
    x = (1 + rng.standard_normal((20000, 16))).astype(np.float32)
    y = np.empty(16, np.float32)
    kernel("reduce", (y,), (x,), axes=(0,), fn="sum")
    close(y, x.astype(np.float64).sum(0), 4)
    kernel("reduce", (y,), (x,), axes=(0,), fn="sum_squares")
    close(y, (x.astype(np.float64) ** 2).sum(0), 8)


def test_the_norm_of_a_large_array_keeps_its_digits(kernel, close, rng):
    x = rng.standard_normal((1500, 1001)).astype(np.float32)
    y = np.empty((), np.float32)
    kernel("reduce", (y,), (x,), axes=(0, 1), fn="sum_squares")
    close(y, (x.astype(np.float64) ** 2).sum(), 4)
    kernel("reduce", (y,), (x[:, :997],), axes=(0, 1), fn="sum_squares")
    close(y, (x[:, :997].astype(np.float64) ** 2).sum(), 4)


def test_an_empty_sum_is_zero(kernel):
    y = np.full(3, np.nan, np.float32)
    kernel("reduce", (y,), (np.zeros((0, 3), np.float32),), axes=(0,), fn="sum")
    assert not y.any()

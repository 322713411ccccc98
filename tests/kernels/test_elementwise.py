"""Every function of ``elementwise`` against a formula in float64, whatever the strides and the aliasing."""

import math

import numpy as np
import pytest

from mesh_mpi.kernels import contract
from mesh_mpi.kernels.contracts.elementwise import FUNCTIONS


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def gelu(x):
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def slope(f):
    """f' by central differences, in float64."""
    return lambda x: (f(x + 1e-6) - f(x - 1e-6)) / 2e-6


def selu(x):
    return 1.0507009873554805 * np.where(x > 0, x, 1.6732632423543772 * np.expm1(np.minimum(x, 0)))


REFERENCE = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "neg": np.negative, "abs": np.abs,
    "sign": np.sign, "exp": np.exp, "log": lambda x: np.log(np.abs(x)), "sqrt": lambda x: np.sqrt(np.abs(x)),
    "rsqrt": lambda x: 1 / np.sqrt(np.abs(x)), "square": np.square, "reciprocal": lambda x: 1 / x, "sin": np.sin,
    "cos": np.cos, "tanh": np.tanh, "sigmoid": sigmoid, "relu": lambda x: np.maximum(x, 0), "gelu": gelu,
    "silu": lambda x: x * sigmoid(x), "softplus": lambda x: np.log1p(np.exp(x)),
    "elu": lambda x: np.where(x > 0, x, np.expm1(np.minimum(x, 0))),
    "leaky_relu": lambda x: np.where(x > 0, x, 0.2 * x), "selu": selu,
    "pow": lambda x, y: np.power(np.abs(x), y), "maximum": np.maximum, "minimum": np.minimum,
    "floordiv": np.floor_divide, "mod": np.mod, "cast": lambda x: x, "copy": lambda x: x,
    "relu_grad": lambda y, dy: np.where(y > 0, dy, 0), "gelu_grad": lambda x, dy: dy * slope(gelu)(x),
    "silu_grad": lambda x, dy: dy * slope(lambda u: u * sigmoid(u))(x), "sigmoid_grad": lambda y, dy: dy * y * (1 - y),
    "tanh_grad": lambda y, dy: dy * (1 - y * y), "softplus_grad": lambda x, dy: dy * sigmoid(x),
    "elu_grad": lambda x, dy: dy * np.where(x > 0, 1, np.exp(np.minimum(x, 0))),
    "selu_grad": lambda x, dy: dy * slope(selu)(x), "leaky_relu_grad": lambda x, dy: dy * np.where(x > 0, 1, 0.2),
}  # fmt: skip
LOGICAL = {
    "less": np.less, "less_equal": np.less_equal, "greater": np.greater, "greater_equal": np.greater_equal,
    "equal": np.equal, "not_equal": np.not_equal, "logical_and": np.logical_and, "logical_or": np.logical_or,
    "logical_not": np.logical_not, "isfinite": np.isfinite,
}  # fmt: skip
UNARY = {f for f in FUNCTIONS if f in REFERENCE and REFERENCE[f] is not None} & {
    "neg", "abs", "sign", "exp", "log", "sqrt", "rsqrt", "square", "reciprocal", "sin", "cos", "tanh", "sigmoid", "relu",
    "gelu", "silu", "softplus", "elu", "leaky_relu", "selu", "cast", "copy", "logical_not", "isfinite",
}  # fmt: skip


def _params(steps, ins, outs, temps=()):
    return {
        "steps": steps, "temp_dtypes": temps,
        "in_dtypes": tuple(x.dtype.name for x in ins), "out_dtypes": tuple(x.dtype.name for x in outs),
    }  # fmt: skip


def _one(fn, n_in):
    return ((fn, tuple(("i", i) for i in range(n_in)), ("o", 0)),)


def _operands(fn, rng, shape, dtype):
    n_in = 1 if fn in UNARY else 2
    ins = [rng.standard_normal(shape).astype(dtype) for _ in range(n_in)]
    if fn in ("log", "sqrt", "rsqrt", "pow"):
        ins[0] = np.abs(ins[0]) + dtype.type(0.01)
    if fn in ("reciprocal", "div", "floordiv", "mod"):
        ins[-1] = np.sign(ins[-1]) * (np.abs(ins[-1]) + dtype.type(0.1))
    return ins


def test_every_function_has_a_reference():
    assert set(FUNCTIONS) == set(REFERENCE) | set(LOGICAL) | {"where"}


@pytest.mark.parametrize("fn", REFERENCE)
def test_a_function_follows_its_formula(kernel, close, rng, dtype, fn):
    ins = _operands(fn, rng, (3, 197, 331), dtype)
    y = np.empty_like(ins[0])
    kernel("elementwise", (y,), ins, **_params(_one(fn, len(ins)), ins, (y,)))
    tolerance = 1e9 if "grad" in fn and dtype == np.float64 else 64  # the reference slope is a difference
    close(y, REFERENCE[fn](*(x.astype(np.float64) for x in ins)), min(tolerance, 1e-8 / np.finfo(dtype).eps + 64))


@pytest.mark.parametrize("fn", REFERENCE)
def test_an_output_may_be_any_operand_of_its_step(kernel, rng, dtype, fn):
    ins = _operands(fn, rng, (41, 57), dtype)
    apart = np.empty_like(ins[0])
    kernel("elementwise", (apart,), ins, **_params(_one(fn, len(ins)), ins, (apart,)))
    for i in range(len(ins)):
        copies = [x.copy() for x in ins]
        with np.errstate(all="ignore"):  # the fixture runs it three times, each on the last one's result
            kernel("elementwise", (copies[i],), copies, **_params(_one(fn, len(ins)), ins, (apart,)))
        assert np.array_equal(copies[i], apart)


@pytest.mark.parametrize("fn", LOGICAL)
def test_a_comparison_gives_booleans(kernel, rng, dtype, fn):
    ins = [rng.integers(-2, 3, (33, 65)).astype(dtype) for _ in range(1 if fn in ("logical_not", "isfinite") else 2)]
    ins[0][0, :3] = np.inf, -np.inf, np.nan
    y = np.empty(ins[0].shape, bool)
    kernel("elementwise", (y,), ins, **_params(_one(fn, len(ins)), ins, (y,)))
    assert np.array_equal(y, LOGICAL[fn](*ins))


def test_where_selects_and_does_not_multiply(kernel, rng, dtype):
    a, b = (rng.standard_normal((17, 301)).astype(dtype) for _ in range(2))
    c = rng.integers(0, 2, a.shape).astype(bool)
    a[~c], b[c] = np.nan, np.inf
    steps = (("where", (("i", 0), ("i", 1), ("i", 2)), ("o", 0)),)
    for out in (np.empty_like(a), a.copy(), b.copy()):
        ins = (c, out if np.array_equal(out, a, True) else a, out if np.array_equal(out, b) else b)
        kernel("elementwise", (out,), ins, **_params(steps, ins, (out,)))
        assert np.array_equal(out, np.where(c, a, b))
    numbers = (("where", (("i", 0), ("c", 1.5), ("c", -2)), ("o", 0)),)
    kernel("elementwise", (out,), (c,), **_params(numbers, (c,), (out,)))
    assert np.array_equal(out, np.where(c, dtype.type(1.5), dtype.type(-2)))
    kernel("elementwise", (out,), (c.astype(np.int32),), **_params(numbers, (c.astype(np.int32),), (out,)))
    assert np.array_equal(out, np.where(c, dtype.type(1.5), dtype.type(-2)))


def test_strided_and_broadcast_operands_are_taken_as_they_are(kernel, close, rng, dtype):
    shape = (7, 33, 129)
    x = rng.standard_normal((33, 7, 2 * 129)).astype(dtype).transpose(1, 0, 2)[:, :, ::2]
    row = np.broadcast_to(rng.standard_normal(129).astype(dtype), shape)
    column = np.broadcast_to(rng.standard_normal((7, 1, 1)).astype(dtype), shape)
    y = np.empty((129, 7, 33), dtype).transpose(1, 2, 0)
    z = np.empty(shape, dtype)
    steps = (
        ("mul", (("i", 0), ("i", 1)), ("t", 0)),
        ("add", (("t", 0), ("i", 2)), ("t", 1)),
        ("relu", (("t", 1),), ("o", 0)),
        ("sub", (("o", 0), ("c", 0.5)), ("o", 1)),
    )
    ins = (x, row, column)
    kernel("elementwise", (y, z), ins, **_params(steps, ins, (y, z), (dtype.name, dtype.name)))
    expected = np.maximum(x.astype(np.float64) * row + column, 0)
    close(y, expected)
    close(z, expected - 0.5)


def test_casts_and_integers_keep_their_dtypes(kernel, rng):
    x = rng.integers(-50, 50, (9, 1111)).astype(np.int32)
    steps = (
        ("mod", (("i", 0), ("c", 7)), ("t", 0)),
        ("cast", (("t", 0),), ("o", 0)),
        ("greater", (("i", 0), ("c", 0.5)), ("o", 1)),
    )
    y, z = np.empty(x.shape, np.float32), np.empty(x.shape, bool)
    kernel("elementwise", (y, z), (x,), **_params(steps, (x,), (y, z), ("int32",)))
    assert np.array_equal(y, (x % 7).astype(np.float32)) and np.array_equal(z, x > 0.5)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1, 5), (0, 3), (1, 70001)])
def test_any_shape_will_do(kernel, rng, shape):
    x = np.asarray(rng.standard_normal(shape), np.float32)
    y = np.empty_like(x)
    kernel("elementwise", (y,), (x,), **_params(_one("square", 1), (x,), (y,)))
    assert np.array_equal(y, x * x)


def test_extremes_are_quiet_and_right(kernel, dtype):
    x = np.array([-np.inf, -1e30, -50, 0, 50, 1e30, np.inf, np.nan], dtype)
    y = np.empty_like(x)
    kernel("elementwise", (y,), (x,), **_params(_one("sigmoid", 1), (x,), (y,)))
    assert np.array_equal(y[[3, 5, 6]], [0.5, 1, 1]) and abs(y[2] / 1.928749847963918e-22 - 1) < 1e-5 and np.isnan(y[7])
    assert (y[:2] < 1e-37).all()


def test_a_block_stays_within_the_cache():
    one = contract.KERNELS["elementwise"]
    params = {"steps": _one("gelu_grad", 2), "temp_dtypes": ("float32",), "in_dtypes": ("float32",) * 2,
              "out_dtypes": ("float32",)}  # fmt: skip
    assert one.scratch_bytes([(1 << 22,)], [(1 << 22,)] * 2, "float32", params) <= 512 * 1024

"""The functions of ``elementwise``: single ufuncs, and composites made of a few passes over a block.

A composite gets its operands, its target and ``work(i, dtype)``, an array of the block's shape. It may write its
target only in a pass after which no operand is read, so that the target may be any of the operands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import pi, sqrt

import numpy as np

from .blocks import Call, constant, full, ufunc

Work = Callable[[int, np.dtype], np.ndarray]
Operands = Sequence[np.ndarray]

SIMPLE: dict[str, np.ufunc] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.true_divide, "neg": np.negative,
    "abs": np.absolute, "sign": np.sign, "exp": np.exp, "log": np.log, "sqrt": np.sqrt, "square": np.square,
    "reciprocal": np.reciprocal, "sin": np.sin, "cos": np.cos, "tanh": np.tanh, "pow": np.power,
    "maximum": np.maximum, "minimum": np.minimum, "floordiv": np.floor_divide, "mod": np.remainder,
    "less": np.less, "less_equal": np.less_equal, "greater": np.greater, "greater_equal": np.greater_equal,
    "equal": np.equal, "not_equal": np.not_equal, "logical_and": np.logical_and, "logical_or": np.logical_or,
    "logical_not": np.logical_not, "isfinite": np.isfinite,
}  # fmt: skip

_GELU_SLOPE = sqrt(2 / pi)
_GELU_CUBE = 0.044715
_SELU_SCALE = 1.0507009873554804934193349852946
_SELU_ALPHA = 1.6732632423543772848170429916717
_LEAK = 0.2
_INTEGER = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}


def _c(value: float, like: np.ndarray) -> np.ndarray:
    return constant(value, like.dtype)


def _all(value: float, like: np.ndarray) -> np.ndarray:
    """An array of ``value`` as large as the block: see ``blocks.full``."""
    size = 1 << max(0, like.size - 1).bit_length()
    return full(size, value, like.dtype)[: like.size].reshape(like.shape)


def _sigmoid_into(x: np.ndarray, y: np.ndarray) -> list[Call]:
    """1 / (1 + exp(-x)); the exponent is bounded so that exp does not overflow, which would set off a warning."""
    bound = 88.0 if y.dtype.itemsize == 4 else 709.0
    return [
        ufunc(np.negative, x, out=y),
        ufunc(np.minimum, y, _all(bound, y), out=y),
        ufunc(np.exp, y, out=y),
        ufunc(np.add, y, _c(1, y), out=y),
        ufunc(np.true_divide, _c(1, y), y, out=y),
    ]


def _relu(s: Operands, y: np.ndarray, work: Work) -> list[Call]:
    return [ufunc(np.maximum, s[0], _all(0, y), out=y)]


def _rsqrt(s: Operands, y: np.ndarray, work: Work) -> list[Call]:
    return [ufunc(np.sqrt, s[0], out=y), ufunc(np.true_divide, _c(1, y), y, out=y)]


def _sigmoid(s: Operands, y: np.ndarray, work: Work) -> list[Call]:
    return _sigmoid_into(s[0], y)


def _softplus(s: Operands, y: np.ndarray, work: Work) -> list[Call]:
    """max(x, 0) + log1p(exp(-|x|))"""
    w = work(0, y.dtype)
    return [
        ufunc(np.absolute, s[0], out=w),
        ufunc(np.negative, w, out=w),
        ufunc(np.exp, w, out=w),
        ufunc(np.log1p, w, out=w),
        ufunc(np.maximum, s[0], _all(0, y), out=y),
        ufunc(np.add, y, w, out=y),
    ]


def _silu(s: Operands, y: np.ndarray, work: Work) -> list[Call]:
    w = work(0, y.dtype)
    return [*_sigmoid_into(s[0], w), ufunc(np.multiply, s[0], w, out=y)]


def _tanh_of_cubic(x: np.ndarray, square: np.ndarray, w: np.ndarray) -> list[Call]:
    """tanh(sqrt(2/pi) (x + 0.044715 x^3)) into ``w``, of which ``square`` holds x^2 (and may be ``w``)."""
    return [
        ufunc(np.multiply, square, _c(_GELU_SLOPE * _GELU_CUBE, w), out=w),
        ufunc(np.add, w, _c(_GELU_SLOPE, w), out=w),
        ufunc(np.multiply, w, x, out=w),
        ufunc(np.tanh, w, out=w),
    ]


def _gelu(s: Operands, y: np.ndarray, work: Work) -> list[Call]:
    x, w = s[0], work(0, y.dtype)
    return [
        ufunc(np.multiply, x, x, out=w),
        *_tanh_of_cubic(x, w, w),
        ufunc(np.add, w, _c(1, y), out=w),
        ufunc(np.multiply, w, x, out=w),
        ufunc(np.multiply, w, _c(0.5, y), out=y),
    ]


def _gelu_grad(s: Operands, dx: np.ndarray, work: Work) -> list[Call]:
    """dy (1 + t) (1/2 + x u' (1 - t) / 2) with t = tanh(u(x))"""
    x, dy = s
    t, slope, rest = work(0, dx.dtype), work(1, dx.dtype), work(2, dx.dtype)
    return [
        ufunc(np.multiply, x, x, out=t),
        ufunc(np.multiply, t, _c(1.5 * _GELU_SLOPE * _GELU_CUBE, dx), out=slope),
        ufunc(np.add, slope, _c(0.5 * _GELU_SLOPE, dx), out=slope),
        ufunc(np.multiply, slope, x, out=slope),
        *_tanh_of_cubic(x, t, t),
        ufunc(np.subtract, _c(1, dx), t, out=rest),
        ufunc(np.multiply, slope, rest, out=slope),
        ufunc(np.add, slope, _c(0.5, dx), out=slope),
        ufunc(np.add, t, _c(1, dx), out=t),
        ufunc(np.multiply, t, slope, out=t),
        ufunc(np.multiply, t, dy, out=dx),
    ]


def _relu_grad(s: Operands, dx: np.ndarray, work: Work) -> list[Call]:
    positive = work(0, np.dtype(bool))
    return [ufunc(np.greater, s[0], _c(0, s[0]), out=positive), ufunc(np.multiply, s[1], positive, out=dx)]


def _leaky_relu(s: Operands, y: np.ndarray, work: Work) -> list[Call]:
    w = work(0, y.dtype)
    return [ufunc(np.multiply, s[0], _c(_LEAK, y), out=w), ufunc(np.maximum, s[0], w, out=y)]


def _leaky_relu_grad(s: Operands, dx: np.ndarray, work: Work) -> list[Call]:
    positive, slope = work(0, np.dtype(bool)), work(1, dx.dtype)
    return [
        ufunc(np.greater, s[0], _c(0, s[0]), out=positive),
        ufunc(np.multiply, positive, _c(1 - _LEAK, dx), out=slope),
        ufunc(np.add, slope, _c(_LEAK, dx), out=slope),
        ufunc(np.multiply, s[1], slope, out=dx),
    ]


def _sigmoid_grad(s: Operands, dx: np.ndarray, work: Work) -> list[Call]:
    w = work(0, dx.dtype)
    return [
        ufunc(np.subtract, _c(1, dx), s[0], out=w),
        ufunc(np.multiply, w, s[0], out=w),
        ufunc(np.multiply, w, s[1], out=dx),
    ]


def _tanh_grad(s: Operands, dx: np.ndarray, work: Work) -> list[Call]:
    w = work(0, dx.dtype)
    return [
        ufunc(np.multiply, s[0], s[0], out=w),
        ufunc(np.subtract, _c(1, dx), w, out=w),
        ufunc(np.multiply, w, s[1], out=dx),
    ]


def _softplus_grad(s: Operands, dx: np.ndarray, work: Work) -> list[Call]:
    w = work(0, dx.dtype)
    return [*_sigmoid_into(s[0], w), ufunc(np.multiply, w, s[1], out=dx)]


def _silu_grad(s: Operands, dx: np.ndarray, work: Work) -> list[Call]:
    """dy s (1 + x (1 - s)) with s = sigmoid(x)"""
    x, dy = s
    sigmoid, w = work(0, dx.dtype), work(1, dx.dtype)
    return [
        *_sigmoid_into(x, sigmoid),
        ufunc(np.subtract, _c(1, dx), sigmoid, out=w),
        ufunc(np.multiply, w, x, out=w),
        ufunc(np.add, w, _c(1, dx), out=w),
        ufunc(np.multiply, w, sigmoid, out=w),
        ufunc(np.multiply, w, dy, out=dx),
    ]


def _elu_scaled(s: Operands, y: np.ndarray, work: Work, scale: float, alpha: float) -> list[Call]:
    """scale (max(x, 0) + alpha (exp(min(x, 0)) - 1))"""
    low, high = work(0, y.dtype), work(1, y.dtype)
    calls = [
        ufunc(np.minimum, s[0], _all(0, y), out=low),
        ufunc(np.expm1, low, out=low),
        ufunc(np.maximum, s[0], _all(0, y), out=high),
    ]
    if (scale, alpha) != (1.0, 1.0):
        calls.append(ufunc(np.multiply, low, _c(alpha * scale, y), out=low))
        calls.append(ufunc(np.multiply, high, _c(scale, y), out=high))
    return [*calls, ufunc(np.add, low, high, out=y)]


def _elu(s: Operands, y: np.ndarray, work: Work) -> list[Call]:
    return _elu_scaled(s, y, work, 1.0, 1.0)


def _selu(s: Operands, y: np.ndarray, work: Work) -> list[Call]:
    return _elu_scaled(s, y, work, _SELU_SCALE, _SELU_ALPHA)


def _elu_grad(s: Operands, dx: np.ndarray, work: Work) -> list[Call]:
    w = work(0, dx.dtype)
    return [
        ufunc(np.minimum, s[0], _all(0, dx), out=w),
        ufunc(np.exp, w, out=w),
        ufunc(np.multiply, w, s[1], out=dx),
    ]


def _selu_grad(s: Operands, dx: np.ndarray, work: Work) -> list[Call]:
    """dy scale (alpha exp(min(x, 0)), or 1 where x > 0)"""
    w, positive, excess = work(0, dx.dtype), work(1, np.dtype(bool)), work(2, dx.dtype)
    return [
        ufunc(np.minimum, s[0], _all(0, dx), out=w),
        ufunc(np.exp, w, out=w),
        ufunc(np.multiply, w, _c(_SELU_SCALE * _SELU_ALPHA, dx), out=w),
        ufunc(np.greater, s[0], _c(0, s[0]), out=positive),
        ufunc(np.multiply, positive, _c(_SELU_SCALE * (1 - _SELU_ALPHA), dx), out=excess),
        ufunc(np.add, w, excess, out=w),
        ufunc(np.multiply, w, s[1], out=dx),
    ]


def _where(s: Operands, y: np.ndarray, work: Work) -> list[Call]:
    """b ^ ((a ^ b) & mask) on the bits: a real select, and three times as fast as a masked copy."""
    condition, a, b = s
    if not (a.dtype == b.dtype == y.dtype):
        raise TypeError(f"elementwise: where found {a.dtype}, {b.dtype} -> {y.dtype}. Cast them to one dtype first.")
    integer = np.dtype(_INTEGER[y.dtype.itemsize])
    mask, differing = work(0, integer), work(1, integer)
    calls = []
    if condition.dtype != bool:
        truth = work(1, np.dtype(bool))
        calls.append(ufunc(np.not_equal, condition, _c(0, condition), out=truth))
        condition = truth
    a, b = a.view(integer), b.view(integer)
    return [
        *calls,
        ufunc(np.negative, condition.view(np.int8), out=mask),
        ufunc(np.bitwise_xor, a, b, out=differing),
        ufunc(np.bitwise_and, differing, mask, out=differing),
        ufunc(np.bitwise_xor, b, differing, out=y.view(integer)),
    ]


COMPOSITE: dict[str, Callable[[Operands, np.ndarray, Work], list[Call]]] = {
    "relu": _relu, "rsqrt": _rsqrt, "sigmoid": _sigmoid, "softplus": _softplus, "silu": _silu, "gelu": _gelu,
    "elu": _elu, "selu": _selu, "leaky_relu": _leaky_relu, "relu_grad": _relu_grad, "gelu_grad": _gelu_grad,
    "silu_grad": _silu_grad, "sigmoid_grad": _sigmoid_grad, "tanh_grad": _tanh_grad,
    "softplus_grad": _softplus_grad, "elu_grad": _elu_grad, "selu_grad": _selu_grad,
    "leaky_relu_grad": _leaky_relu_grad, "where": _where,
}  # fmt: skip

"""Samples of the pointwise operations: each alone, with a number, and with an operand that lacks a dimension."""

from __future__ import annotations

import math

import numpy as np
from oracles.draw import COLUMNS, ROWS, apart, booleans, floats, integers, normal, positive
from oracles.harness import Sample

import mesh_mpi as mm

SELU_SCALE, SELU_ALPHA = 1.0507009873554805, 1.6732632423543772
erf_free_gelu = lambda x: 0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))  # noqa: E731

UNARY = {
    "exp": (np.exp, normal), "log": (np.log, positive), "sqrt": (np.sqrt, positive), "rsqrt": (lambda x: x**-0.5, positive),
    "square": (lambda x: x * x, normal), "reciprocal": (lambda x: 1.0 / x, apart), "sin": (np.sin, normal), "cos": (np.cos, normal),
    "tanh": (np.tanh, normal), "sigmoid": (lambda x: 1.0 / (1.0 + np.exp(-x)), normal), "relu": (lambda x: np.where(x > 0, x, 0.0), apart),
    "gelu": (erf_free_gelu, normal), "silu": (lambda x: x / (1.0 + np.exp(-x)), normal), "softplus": (lambda x: np.log1p(np.exp(x)), normal),
    "elu": (lambda x: np.where(x > 0, x, np.exp(np.minimum(x, 0)) - 1.0), apart),
    "selu": (lambda x: SELU_SCALE * np.where(x > 0, x, SELU_ALPHA * (np.exp(np.minimum(x, 0)) - 1.0)), apart),
    "leaky_relu": (lambda x: np.where(x > 0, x, 0.2 * x), apart), "abs": (np.abs, apart), "neg": (np.negative, normal),
}
BINARY = {
    "add": (np.add, normal), "sub": (np.subtract, normal), "mul": (np.multiply, normal), "div": (np.divide, apart), "pow": (np.power, positive),
    "maximum": (np.maximum, apart), "minimum": (np.minimum, apart),
}
WITHOUT_GRADIENT = {"sign": np.sign, "isfinite": np.isfinite}
COMPARISONS = {"less": np.less, "less_equal": np.less_equal, "greater": np.greater, "greater_equal": np.greater_equal,
               "equal": np.equal, "not_equal": np.not_equal}


def _unary(name, f, draw) -> Sample:
    return Sample(name, {"x": floats(ROWS, COLUMNS, draw=draw)}, lambda t: {"y": getattr(mm, name)(t["x"])}, lambda a: {"y": f(a["x"])})


def _binary(name, f, draw) -> list[Sample]:
    both, short = {"x": floats(ROWS, COLUMNS, draw=draw), "y": floats(COLUMNS, ROWS, draw=draw)}, floats(COLUMNS, draw=draw)
    op = getattr(mm, name)
    number = 1.5 if name in ("maximum", "minimum", "pow") else 3.0
    return [
        Sample(f"{name} of equal shapes in another order", both, lambda t: {"z": op(t["x"], t["y"])}, lambda a: {"z": f(a["x"], a["y"].T)}),
        Sample(f"{name} with fewer dimensions on the right", {"x": floats(ROWS, COLUMNS, draw=draw), "y": short},
               lambda t: {"z": op(t["x"], t["y"])}, lambda a: {"z": f(a["x"], a["y"])}),
        Sample(f"{name} with fewer dimensions on the left", {"x": short, "y": floats(ROWS, COLUMNS, draw=draw)},
               lambda t: {"z": op(t["x"], t["y"])}, lambda a: {"z": f(a["x"], a["y"])}),
        Sample(f"{name} with a number", {"x": floats(ROWS, COLUMNS, draw=positive)},
               lambda t: {"r": op(t["x"], number), "l": op(number, t["x"])}, lambda a: {"r": f(a["x"], number), "l": f(number, a["x"])}),
    ]


def _no_gradient(name, f) -> Sample:
    return Sample(name, {"x": floats(ROWS, COLUMNS, draw=apart)}, lambda t: {"y": getattr(mm, name)(t["x"])}, lambda a: {"y": f(a["x"])}, ("x",))


def _integer(name, f) -> Sample:
    """Floor semantics for both signs, on whole numbers and on floats."""
    divisor = integers(ROWS, COLUMNS, draw=lambda rng, shape: rng.choice([-3, -2, 2, 3], shape))
    op = getattr(mm, name)
    return Sample(name, {"x": integers(ROWS, COLUMNS, draw=lambda rng, shape: rng.integers(-7, 8, shape)), "y": divisor},
                  lambda t: {"z": op(t["x"], t["y"])}, lambda a: {"z": f(a["x"], a["y"])})


def _comparison(name, f) -> Sample:
    return Sample(name, {"x": integers(ROWS, COLUMNS), "y": integers(COLUMNS)},
                  lambda t: {"z": getattr(mm, name)(t["x"], t["y"])}, lambda a: {"z": f(a["x"], a["y"])})


def _where(t):
    return {"both": mm.where(t["c"], t["x"], t["y"]), "zero": mm.where(t["c"], t["x"], 0.0), "row": mm.where(t["r"], t["x"], t["y"]),
            "safe": mm.where(t["c"], t["x"], float("inf"))}


def _where_reference(a):
    return {"both": np.where(a["c"], a["x"], a["y"]), "zero": np.where(a["c"], a["x"], 0.0), "row": np.where(a["r"][:, None], a["x"], a["y"]),
            "safe": np.where(a["c"], a["x"], np.inf)}


SAMPLES = [
    *(_unary(name, *case) for name, case in UNARY.items()),
    *(sample for name, case in BINARY.items() for sample in _binary(name, *case)),
    *(_no_gradient(name, f) for name, f in WITHOUT_GRADIENT.items()),
    *(_comparison(name, f) for name, f in COMPARISONS.items()),
    _integer("floordiv", np.floor_divide), _integer("mod", np.mod),
    Sample("logical_and, logical_or, logical_not", {"x": booleans(ROWS, COLUMNS), "y": booleans(COLUMNS)},
           lambda t: {"and": mm.logical_and(t["x"], t["y"]), "or": mm.logical_or(t["x"], t["y"]), "not": mm.logical_not(t["x"])},
           lambda a: {"and": a["x"] & a["y"], "or": a["x"] | a["y"], "not": ~a["x"]}),
    Sample("where", {"c": booleans(ROWS, COLUMNS), "r": booleans(ROWS), "x": floats(ROWS, COLUMNS), "y": floats(ROWS, COLUMNS)},
           lambda t: {k: v for k, v in _where(t).items() if k != "safe"}, lambda a: {k: v for k, v in _where_reference(a).items() if k != "safe"}),
    Sample("where against an infinity", {"c": booleans(ROWS, COLUMNS), "r": booleans(ROWS), "x": floats(ROWS, COLUMNS), "y": floats(ROWS, COLUMNS)},
           lambda t: {"safe": _where(t)["safe"] * 2.0}, lambda a: {"safe": _where_reference(a)["safe"] * 2.0}, ("x", "y")),
    Sample("cast", {"x": floats(ROWS, COLUMNS, draw=apart), "n": integers(ROWS, COLUMNS)},
           lambda t: {"up": mm.cast(t["x"], "float64"), "int": mm.cast(t["x"] * 10.0, "int32"), "float": mm.cast(t["n"], "float64")},
           lambda a: {"up": a["x"], "int": np.trunc(a["x"] * 10.0).astype(np.int32), "float": a["n"].astype(np.float64)}),
    Sample("stop_gradient", {"x": floats(ROWS, COLUMNS), "y": floats(ROWS, COLUMNS)}, lambda t: {"z": mm.stop_gradient(t["x"]) * t["y"]},
           lambda a: {"z": a["x"] * a["y"]}, ("x",)),
    Sample("a chain of pointwise functions with a value used twice", {"x": floats(ROWS, COLUMNS), "s": floats(COLUMNS, draw=positive)},
           lambda t: (lambda u: {"y": mm.tanh(u) * u + mm.square(u) / t["s"]})(t["x"] * t["s"]),
           lambda a: (lambda u: {"y": np.tanh(u) * u + u * u / a["s"]})(a["x"] * a["s"])),
]

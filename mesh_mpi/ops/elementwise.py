"""Pointwise functions, operators, selection, casts.

Invariant: operands contain one another's dimensions, so the result has the dimensions of one of
them; outer forms are asked for with ``broadcast`` or ``einsum``.

Subgradients at corners: relu' (0) = 0, abs'(0) = 0, maximum and minimum give a tie to both operands,
as the reference system does (documented because every choice is defensible).
"""

from __future__ import annotations

import math
from collections.abc import Callable

from ..errors import DimensionError, DtypeError
from ..graph.operation import NO_GRADIENT, OperationDef, Space, build, register
from ..graph.tensor import OPERATORS, Tensor

BOOLEAN = ("less", "less_equal", "greater", "greater_equal", "equal", "not_equal", "logical_and", "logical_or", "logical_not", "isfinite")
LINEAR = ("neg", "cast")  # functions that a partial sum may pass through


class Pointwise(OperationDef):
    """A function applied element by element; ``attributes["scalars"]`` holds the operands that are numbers."""

    def __init__(self, kind: str, gradient: Callable | str):
        self.kind = kind
        self.vjp = NO_GRADIENT if gradient is NO_GRADIENT else self._vjp
        self._gradient = gradient

    def infer(self, inputs, attributes):
        """Return the shape of the operand that has all dimensions."""
        full = max(inputs, key=lambda t: len(t.shape)).shape
        for t in inputs:
            missing = [d for d in t.shape if d.name not in full]
            if missing:
                raise DimensionError(f"{self.kind}: neither of {inputs[0].shape} and {t.shape if t is not inputs[0] else full} holds all dimensions of the "
                                     "other. Broadcast one first (mm.broadcast), or use mm.einsum for an outer product.")
        dtypes = {t.dtype for t in inputs[1 if self.kind == "where" else 0:]}
        if len(dtypes) > 1:
            raise DtypeError(f"{self.kind}: operands have element types {' and '.join(sorted(dtypes))}. Cast one of them (mm.cast).")
        dtype = attributes.get("dtype") or ("bool" if self.kind in BOOLEAN else inputs[-1].dtype)
        return [(full, dtype)]

    def _vjp(self, op, douts):
        return [None if g is None else _fit(g, x) for g, x in zip(self._gradient(op, douts[0]), op.inputs)]

    def space(self, op):
        """Return the dimensions of the result: all others are among them."""
        return Space(op.outputs[0].shape)

    def passes_partial(self, op, i):
        """A partial sum passes negation, up-casts, products with whole operands, quotients by them, and selection against zero."""
        if op.definition.kind == "cast":
            return op.inputs[0].dtype == "float32" and op.outputs[0].dtype == "float64"
        if op.definition.kind == "where":
            return i > 0 and len(op.inputs) == 2 and op.attributes["scalars"] in (((1, 0),), ((2, 0),))
        return self.kind in ("neg", "mul") or (self.kind == "div" and i == 0 and all(p != 0 for p, _ in op.attributes["scalars"]))

    def lower(self, op, inputs, b):
        """One kernel on the slices."""
        operands = list(inputs)
        for position, number in op.attributes["scalars"]:
            operands.insert(position, number)
        partial = [a for x in inputs for a in x.placement.partial]  # no axis twice: each operand is partial where the others are replicated
        out = op.outputs[0]
        return [b.elementwise("copy" if self.kind == "cast" else self.kind, operands, out.shape, out.dtype,
                              b.placement(op, out.shape).with_partial(partial))]


def _fit(gradient: Tensor, x: Tensor) -> Tensor:
    """Sum a gradient over the dimensions along which ``x`` was broadcast."""
    extra = [d for d in gradient.shape if d.name not in x.shape]
    return OPERATORS["reduce_sum"](gradient, extra) if extra else gradient


def pointwise(kind: str, *operands) -> Tensor:
    """Build the pointwise operation of a kind, of tensors and numbers in the kind's order of operands.

    Shape   the operands' dimensions lie within the largest's, which is the result's.
    Comm    none.
    Grad    that of the kind.
    Raises  DimensionError for outer forms, DtypeError for mixed element types or an operand that is no number.
    """
    scalars = tuple((i, x) for i, x in enumerate(operands) if not isinstance(x, Tensor))
    tensors = [x for x in operands if isinstance(x, Tensor)]
    if not tensors:
        raise DtypeError(f"{kind}: {', '.join(map(repr, operands))} holds no tensor. Give at least one; numbers alone are Python's business.")
    for _, x in scalars:
        if not isinstance(x, (int, float)):
            raise DtypeError(f"{kind}: operand {x!r} is neither a tensor nor a number.")
        if isinstance(x, float) and not tensors[-1].dtype.startswith("float"):
            raise DtypeError(f"{kind}: {tensors[-1]!r} is of {tensors[-1].dtype} and {x!r} is a fraction. Cast the tensor first (mm.cast), or give a whole number.")
    if kind == "add" and not scalars and set(operands[0].shape) == set(operands[1].shape) and operands[0].dtype == operands[1].dtype:
        return build("add_n", operands)[0]  # so that equal partial sums are added before they are reduced
    if kind == "mul" and len(scalars) == 1:  # gradients begin with ones: a number times a constant is a constant
        x = next(t for t in operands if isinstance(t, Tensor))
        if x.operation.definition.kind == "full" and x.dtype.startswith("float"):
            return build("full", [], shape=x.shape, value=x.operation.attributes["value"] * scalars[0][1], dtype=x.dtype)[0]
    return build(kind, [x for x in operands if isinstance(x, Tensor)], scalars=scalars)[0]


def _operands(op) -> list:
    operands = list(op.inputs)
    for position, number in op.attributes["scalars"]:
        operands.insert(position, number)
    return operands


def _pick(op, gradients) -> list:
    """Keep the gradients of the operands that are tensors."""
    return [g for i, g in enumerate(gradients) if all(i != p for p, _ in op.attributes["scalars"])]


def _binary(rule):
    """Make a gradient of (a, b, dy) -> [thunk, thunk] work on mixtures of tensors and numbers."""
    def gradient(op, dy):
        a, b = _operands(op)
        thunks = rule(a, b, dy)
        return [t() for t in _pick(op, thunks)]
    return gradient


def _unary(rule):
    return lambda op, dy: [rule(op.inputs[0], op.outputs[0], dy)]


def _grad_kernel(kind, of_output=False):
    return _unary(lambda x, y, dy: pointwise(kind, y if of_output else x, dy))


def _where_gradient(op, dy):
    c = op.inputs[0]
    return _pick(op, [None, where(c, dy, 0.0), where(c, 0.0, dy)])


def _log(base):
    if isinstance(base, Tensor):
        return pointwise("log", base)
    return math.log(base) if base > 0 else math.nan


def _mask(kind):
    """Gradient of maximum and minimum: to whichever operand is taken, to both in a tie."""
    def gradient(op, dy):
        y = op.outputs[0]
        return _pick(op, [None if not isinstance(x, Tensor) else where(pointwise("equal", y, x), dy, 0.0) for x in _operands(op)])
    return gradient


_GRADIENTS: dict[str, Callable | str] = {
    "add": _binary(lambda a, b, dy: [lambda: dy, lambda: dy]),
    "sub": _binary(lambda a, b, dy: [lambda: dy, lambda: -dy]),
    "mul": _binary(lambda a, b, dy: [lambda: dy * b, lambda: dy * a]),
    "div": _binary(lambda a, b, dy: [lambda: dy / b, lambda: -(dy * (a / (b * b)))]),
    "pow": _binary(lambda a, b, dy: [lambda: dy * (b * pointwise("pow", a, b - 1)),
                                     lambda: dy * (pointwise("pow", a, b) * _log(a))]),
    "maximum": _mask("maximum"), "minimum": _mask("minimum"), "where": _where_gradient,
    "neg": _unary(lambda x, y, dy: -dy), "exp": _unary(lambda x, y, dy: dy * y), "log": _unary(lambda x, y, dy: dy / x),
    "sqrt": _unary(lambda x, y, dy: dy / (y * 2.0)), "rsqrt": _unary(lambda x, y, dy: dy * (y * y * y * -0.5)),
    "square": _unary(lambda x, y, dy: dy * (x * 2.0)), "reciprocal": _unary(lambda x, y, dy: -(dy * (y * y))),
    "sin": _unary(lambda x, y, dy: dy * pointwise("cos", x)), "cos": _unary(lambda x, y, dy: -(dy * pointwise("sin", x))),
    "abs": _unary(lambda x, y, dy: dy * pointwise("sign", x)),
    "relu": _grad_kernel("relu_grad", of_output=True), "sigmoid": _grad_kernel("sigmoid_grad", of_output=True),
    "tanh": _grad_kernel("tanh_grad", of_output=True), "gelu": _grad_kernel("gelu_grad"), "silu": _grad_kernel("silu_grad"),
    "softplus": _grad_kernel("softplus_grad"), "elu": _grad_kernel("elu_grad"), "selu": _grad_kernel("selu_grad"),
    "leaky_relu": _grad_kernel("leaky_relu_grad"),
    "cast": lambda op, dy: [cast(dy, op.inputs[0].dtype) if op.inputs[0].dtype.startswith("float") and dy.dtype.startswith("float") else None],
    "stop_gradient": NO_GRADIENT, "sign": NO_GRADIENT, "floordiv": NO_GRADIENT, "mod": NO_GRADIENT,
}
for _kind in (*BOOLEAN, *(f"{n}_grad" for n in ("relu", "gelu", "silu", "sigmoid", "tanh", "softplus", "elu", "selu", "leaky_relu"))):
    _GRADIENTS[_kind] = NO_GRADIENT  # second derivatives are not taken
for _kind, _rule in _GRADIENTS.items():
    if _kind != "stop_gradient":
        register(Pointwise(_kind, _rule))


class _StopGradient(Pointwise):
    """The identity, through which no gradient passes; it emits nothing."""

    def __init__(self):
        super().__init__("stop_gradient", NO_GRADIENT)

    def passes_partial(self, op, i):
        """A partial sum passes."""
        return True

    def lower(self, op, inputs, b):
        """Hand the slice on."""
        return [inputs[0]]


register(_StopGradient())


def stop_gradient(x: Tensor) -> Tensor:
    """Return ``x`` itself, as a constant for ``gradients``.

    Shape   x [...] -> [...].
    Comm    none.
    Grad    none passes.
    Raises  nothing.
    """
    return build("stop_gradient", [x], scalars=())[0]


def cast(x: Tensor, dtype: str) -> Tensor:
    """Convert ``x`` to another element type; ``x`` itself if it has that type.

    Shape   x [...] -> [...].
    Comm    none; a partial sum is resolved before a narrowing cast.
    Grad    cast back, between floating types; none otherwise.
    Raises  DtypeError for an unknown type.
    """
    if x.dtype == dtype:
        return x
    from ..graph.variable import DTYPES
    if dtype not in DTYPES:
        raise DtypeError(f"cast: element type {dtype!r} is not one of {', '.join(DTYPES)}.")
    return build("cast", [x], scalars=(), dtype=dtype)[0]


def where(condition: Tensor, a: Tensor | float, b: Tensor | float) -> Tensor:
    """Select ``a`` where ``condition`` holds and ``b`` elsewhere; a real select, so infinities in the other branch do no harm.

    Shape   all operands' dimensions lie within the largest's.
    Comm    none.
    Grad    the output's gradient selected against zero.
    Raises  DimensionError for outer forms, DtypeError for mixed types.
    """
    return pointwise("where", condition, a, b)


def _function(kind: str, arity: int, formula: str):
    if arity == 1:
        def function(x):
            return pointwise(kind, x)
    else:
        def function(a, b):
            return pointwise(kind, a, b)
    gradient = "none" if _GRADIENTS[kind] is NO_GRADIENT else "pointwise"
    function.__name__ = function.__qualname__ = kind
    function.__doc__ = f"""Return {formula}, element by element.

    Shape   the operands' dimensions lie within the largest's, which is the result's.
    Comm    none.
    Grad    {gradient}.
    Raises  DimensionError for outer forms, DtypeError for mixed element types.
    """
    return function


FUNCTIONS = {kind: _function(kind, arity, formula) for kind, arity, formula in (
    ("exp", 1, "e**x"), ("log", 1, "ln x"), ("sqrt", 1, "x**0.5"), ("rsqrt", 1, "x**-0.5"), ("square", 1, "x*x"),
    ("reciprocal", 1, "1/x"), ("sin", 1, "sin x"), ("cos", 1, "cos x"), ("tanh", 1, "tanh x"), ("sigmoid", 1, "1/(1+e**-x)"),
    ("relu", 1, "max(x, 0)"), ("gelu", 1, "x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x**3)))"), ("silu", 1, "x sigmoid(x)"),
    ("softplus", 1, "ln(1+e**x)"), ("elu", 1, "x if x > 0 else e**x - 1"), ("selu", 1, "1.0507 elu(x, 1.67326)"),
    ("leaky_relu", 1, "x if x > 0 else 0.2 x"), ("abs", 1, "|x|"), ("sign", 1, "the sign of x"), ("neg", 1, "-x"),
    ("isfinite", 1, "whether x is finite"), ("logical_not", 1, "not x"), ("add", 2, "a + b"), ("sub", 2, "a - b"), ("mul", 2, "a * b"),
    ("div", 2, "a / b"), ("pow", 2, "a**b"), ("maximum", 2, "the larger of a and b"), ("minimum", 2, "the smaller of a and b"),
    ("floordiv", 2, "floor(a / b)"), ("mod", 2, "a - b floor(a / b)"), ("less", 2, "a < b"), ("less_equal", 2, "a <= b"),
    ("greater", 2, "a > b"), ("greater_equal", 2, "a >= b"), ("equal", 2, "a == b"), ("not_equal", 2, "a != b"),
    ("logical_and", 2, "a and b"), ("logical_or", 2, "a or b"))}

OPERATORS.update({kind: FUNCTIONS[kind] for kind in (
    "add", "sub", "mul", "div", "pow", "floordiv", "mod", "neg", "less", "less_equal", "greater", "greater_equal")})

"""Updates of variables: Adam and stochastic gradient descent, one fused in-place operation a variable.

Invariant: at ``apply`` = 0 every variable and slot keeps its value to the bit. Made inside ``mm.rules_of("optimizer")``
these operations lie where the slots are stored, and the compiler moves weights and gradients there.
"""

from __future__ import annotations

from ..errors import DimensionError, DtypeError
from ..graph.operation import NO_GRADIENT, OperationDef, Space, build, register
from ..graph.tensor import Tensor


class _Update(OperationDef):
    """Inputs w, g, the slots, then scalars; outputs the new w and slots."""

    vjp = NO_GRADIENT  # nobody differentiates through an update

    def __init__(self, kind: str, output_names: tuple[str, ...]):
        self.kind, self.output_names = kind, output_names

    def infer(self, inputs, attributes):
        """The variable's shape for each output."""
        return [(inputs[0].shape, inputs[0].dtype)] * attributes["n_outputs"]

    def space(self, op):
        """Return the variable's dimensions."""
        return Space(op.inputs[0].shape)

    def lower(self, op, inputs, b):
        """One kernel on the slices, which all lie alike; in the order of the variable, so that it can be in place."""
        names = op.inputs[0].shape.names
        full = [x.ordered(names) if len(x.dims) == len(names) else x for x in inputs]
        outs = [b.new(op.inputs[0].shape.dims, full[0].placement, full[0].value.dtype) for _ in op.outputs]
        b.emit(self.kind, outs, full, **op.attributes["params"])
        return outs


register(_Update("adam", ("w", "m", "v")))
register(_Update("sgd", ("w", "v")))


def check_update(kind: str, w: Tensor, full: dict[str, Tensor], scalars: dict[str, tuple[Tensor, str]]) -> None:
    """Raise unless every full operand is like ``w`` and every scalar a scalar of the element type given with it."""
    for name, t in full.items():
        if set(t.shape) != set(w.shape) or t.dtype != w.dtype:
            raise DimensionError(f"{kind}: {name} is {t!r} of {t.dtype} and w is {w!r} of {w.dtype}. Both have the same dimensions and element type.")
    for name, (t, dtype) in scalars.items():
        if not isinstance(t, Tensor) or len(t.shape) or t.dtype != dtype:
            raise DtypeError(f"{kind}: {name} is {t!r}{' of ' + t.dtype if isinstance(t, Tensor) else ''}. Give a scalar tensor of {dtype} (mm.cast).")


def adam_update(w: Tensor, g: Tensor, m: Tensor, v: Tensor, lr: Tensor, step: Tensor, scale: Tensor, apply: Tensor, beta1: float = 0.9,
                beta2: float = 0.999, eps: float = 1e-8, weight_decay: float = 0.0, bias_correction: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """Return the new w, m and v of Adam with decoupled weight decay; ``step`` counts from 1, g is multiplied by ``scale`` first.

    m = beta1 m + (1 - beta1) g; v = beta2 v + (1 - beta2) g^2; w -= lr (mhat / (sqrt(vhat) + eps) + weight_decay w),
    with mhat = m / (1 - beta1^step) and vhat = v / (1 - beta2^step), or m and v themselves without ``bias_correction``.

    Shape   w, g, m, v [...]; lr, step (int64), scale, apply (int32) scalars -> three of [...].
    Comm    none; a gradient that is a partial sum is reduced (scattered, where the slots are split) before it.
    Grad    none.
    Raises  DimensionError if g or a slot is not like w; DtypeError if a scalar has another element type.
    """
    check_update("adam_update", w, {"g": g, "m": m, "v": v}, {"lr": (lr, w.dtype), "step": (step, "int64"), "scale": (scale, w.dtype), "apply": (apply, "int32")})
    params = {"beta1": float(beta1), "beta2": float(beta2), "eps": float(eps), "weight_decay": float(weight_decay), "bias_correction": bool(bias_correction)}
    return build("adam", [w, g, m, v, lr, step, scale, apply], n_outputs=3, params=params)


def sgd_update(w: Tensor, g: Tensor, v: Tensor | None, lr: Tensor, scale: Tensor, apply: Tensor, momentum: float = 0.0, nesterov: bool = False,
               weight_decay: float = 0.0) -> tuple[Tensor, Tensor | None]:
    """Return the new w and v of stochastic gradient descent; ``v`` is None, and stays so, if ``momentum`` is 0.

    g = scale g + weight_decay w; v = momentum v + g; w -= lr v, or lr (g + momentum v) with ``nesterov``.

    Shape   w, g, v [...]; lr, scale, apply (int32) scalars -> two of [...].
    Comm    none; a gradient that is a partial sum is reduced (scattered, where the slots are split) before it.
    Grad    none.
    Raises  DimensionError if g or v is not like w, or v is missing or superfluous; DtypeError if a scalar has another element type.
    """
    if (v is not None) != (momentum != 0):
        raise DimensionError(f"sgd_update: momentum is {momentum} and v is {v!r}. Give v exactly where momentum is not 0.")
    slots = {} if v is None else {"v": v}
    check_update("sgd_update", w, {"g": g, **slots}, {"lr": (lr, w.dtype), "scale": (scale, w.dtype), "apply": (apply, "int32")})
    params = {"momentum": float(momentum), "nesterov": bool(nesterov), "weight_decay": float(weight_decay)}
    new = build("sgd", [w, g, *slots.values(), lr, scale, apply], n_outputs=1 + len(slots), params=params)
    return (new[0], new[1] if slots else None)

"""Updates of variables: Adam and stochastic gradient descent, one fused in-place operation a variable; Adafactor in a few passes.

Invariant: at ``apply`` = 0 every variable and slot keeps its value to the bit. Made inside ``mm.rules_of("optimizer")``
these operations lie where the slots are stored, and the compiler moves weights and gradients there.
"""

from __future__ import annotations

from ..dims import Dimension, Shape, require
from ..errors import DimensionError, DtypeError
from ..graph.operation import NO_GRADIENT, OperationDef, Space, build, register
from ..graph.tensor import Tensor
from .elementwise import FUNCTIONS, where
from .reduce import reduce_mean, reduce_sum_squares


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
register(_Update("adafactor_moment", ("v",)))


class _AdafactorSums(OperationDef):
    """Sums of scale^2 g^2 + eps1 over one dimension and over another, from one pass; inputs g, scale."""

    kind = "adafactor_sums"
    output_names = ("vr_sum", "vc_sum")
    vjp = NO_GRADIENT  # nobody differentiates through an update

    def infer(self, inputs, attributes):
        """The gradient's shape less each of the two dimensions."""
        g = inputs[0]
        return [(g.shape.without([attributes[d]]), g.dtype) for d in ("d0", "d1")]

    def space(self, op):
        """Return the gradient's dimensions."""
        return Space(op.inputs[0].shape)

    def lower(self, op, inputs, b):
        """One kernel along the rows of memory; partial over the axes that split the summed dimension."""
        (g, scale), a = inputs, op.attributes
        source = g.ordered(g.memory_order())
        outs = []
        for tensor, summed in zip(op.outputs, (a["d0"], a["d1"])):
            placement = b.placement(op, tensor.shape).with_partial(g.placement.axes_of(summed))
            outs.append(b.new([d for d in source.dims if d.name != summed], placement, g.value.dtype))
        first, second = source.index[a["d0"]], source.index[a["d1"]]
        in_memory = first < second
        b.emit(self.kind, outs if in_memory else outs[::-1], [source, scale], axis0=min(first, second), axis1=max(first, second), eps1=a["eps1"])
        return outs


register(_AdafactorSums())


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


def factored_dims(shape: Shape, min_size: int = 128, stacked=()) -> tuple[Dimension, Dimension] | None:
    """Return the two largest *global* dimensions (d0, d1) over which Adafactor factors, or None if one is smaller than ``min_size``.

    Among equals the one listed first is the larger; ``stacked`` names dimensions that take no part.
    """
    stacked = tuple(d.name if isinstance(d, Dimension) else d for d in stacked)
    largest = sorted((d for d in shape if d.name not in stacked), key=lambda d: -d.size)[:2]
    return (largest[0], largest[1]) if len(largest) == 2 and largest[1].size >= min_size else None


def adafactor_sums(g: Tensor, d0, d1, scale: Tensor, eps1: float = 1e-30) -> tuple[Tensor, Tensor]:
    """Return the sums of scale^2 g^2 + eps1 over ``d0`` and over ``d1``, from one pass over ``g``.

    Shape   g [..., d0, d1], scale [] -> [..., d1] and [..., d0].
    Comm    partial(sum) over the axes that split the summed dimension; one reduction where it is used.
    Grad    none.
    Raises  DimensionError if ``g`` lacks a dimension; DtypeError if the scale is no scalar of g's type.
    """
    d0, d1 = require(g.shape, d0, "adafactor_sums"), require(g.shape, d1, "adafactor_sums")
    check_update("adafactor_sums", g, {}, {"scale": (scale, g.dtype)})
    return build("adafactor_sums", [g, scale], d0=d0.name, d1=d1.name, eps1=float(eps1))


def adafactor_moment(v: Tensor, g: Tensor, scale: Tensor, decay: Tensor, apply: Tensor, eps1: float = 1e-30) -> Tensor:
    """Return decay v + (1 - decay) (scale^2 g^2 + eps1): the second moment of Adafactor without factors.

    Shape   v, g [...]; scale, decay, apply (int32) scalars -> [...].
    Comm    none.
    Grad    none.
    Raises  DimensionError if g is not like v; DtypeError if a scalar has another element type.
    """
    check_update("adafactor_moment", v, {"g": g}, {"scale": (scale, v.dtype), "decay": (decay, v.dtype), "apply": (apply, "int32")})
    return build("adafactor_moment", [v, g, scale, decay, apply], n_outputs=1, params={"eps1": float(eps1)})[0]


def adafactor_update(w: Tensor, g: Tensor, slots: dict[str, Tensor], lr: Tensor, decay: Tensor, scale: Tensor, apply: Tensor,
                     dims: tuple[Dimension, Dimension] | None = None, clipping_threshold: float | None = 1.0, parameter_scale: bool = True,
                     beta1: float = 0.0, weight_decay: float = 0.0, eps1: float = 1e-30, eps2: float = 1e-3) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the new w and slots of Adafactor; ``g`` is multiplied by ``scale`` first.

    With U = g^2 + eps1: over ``dims`` (d0, d1), vr = decay vr + (1 - decay) mean_d0 U, vc likewise over d1, and
    x = g / sqrt(vr / mean_d1 vr) / sqrt(vc); without, v = decay v + (1 - decay) U and x = g / sqrt(v). Then
    x /= max(1, rms(x) / clipping_threshold); update = lr max(rms(w), eps2) x, the middle factor with ``parameter_scale``;
    with ``beta1``, m = beta1 m + (1 - beta1) update is the update; w -= update + lr weight_decay w.
    Every mean is over global sizes. ``slots`` holds "vr" and "vc", or "v", and "m" with ``beta1``.

    Shape   w, g [...]; vr [... less d0], vc [... less d1]; v, m [...]; lr, decay, scale, apply (int32) scalars.
    Comm    means over a split dimension reduce a vector, each root mean square a scalar.
    Grad    none.
    Raises  DimensionError if an operand has other dimensions or a slot is missing; DtypeError if a scalar has another element type.
    """
    names = (("v",) if dims is None else ("vr", "vc")) + (("m",) if beta1 else ())
    if set(slots) != set(names):
        raise DimensionError(f"adafactor_update: slots {sorted(slots)} were given for {w!r}, and {sorted(names)} are needed.")
    full = {"g": g, **{k: t for k, t in slots.items() if k in ("v", "m")}}
    check_update("adafactor_update", w, full, {**{k: (t, w.dtype) for k, t in (("lr", lr), ("decay", decay), ("scale", scale))}, "apply": (apply, "int32")})
    go = apply > 0
    x, new = _adafactor_direction(w, g, slots, dims, decay, scale, apply, go, eps1)
    rate = lr
    if parameter_scale:
        rate = rate * FUNCTIONS["maximum"](_rms(w), eps2)
    if clipping_threshold is not None:
        rate = rate / FUNCTIONS["maximum"](_rms(x) * (1.0 / clipping_threshold), 1.0)
    update = x * rate
    if beta1:
        update = slots["m"] * beta1 + update * (1.0 - beta1)
        new["m"] = where(go, update, slots["m"])
    if weight_decay:
        update = update + w * (lr * weight_decay)
    return where(go, w - update, w), new


def _rms(x: Tensor) -> Tensor:
    return FUNCTIONS["sqrt"](reduce_sum_squares(x) * (1.0 / x.shape.size))


def _adafactor_direction(w: Tensor, g: Tensor, slots, dims, decay: Tensor, scale: Tensor, apply: Tensor, go: Tensor, eps1: float):
    """Return the gradient divided by the root of its second moment, and the new second moments."""
    rsqrt = FUNCTIONS["rsqrt"]
    if dims is None:
        v = adafactor_moment(slots["v"], g, scale, decay, apply, eps1)
        return g * scale * rsqrt(v), {"v": v}
    new, share = {}, 1.0 - decay
    for name, total, summed in zip(("vr", "vc"), adafactor_sums(g, *dims, scale, eps1), dims):
        old = slots[name]
        check_update("adafactor_update", total, {name: old}, {})
        new[name] = where(go, old * decay + total * (share * (1.0 / w.shape.size_of(summed.name))), old)
    rows = rsqrt(new["vr"] / reduce_mean(new["vr"], dims[1].name)) * scale
    return g * rows * rsqrt(new["vc"]), new

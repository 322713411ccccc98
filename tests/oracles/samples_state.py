"""Samples of what changes variables: optimizers' updates, writes and slices at a run-time index."""

from __future__ import annotations

import numpy as np
from oracles.draw import A, B, C, constant, floats, integers, positive
from oracles.harness import Sample

import mesh_mpi as mm
from mesh_mpi import Dimension

SCALARS = {"lr": floats(draw=constant(0.1)), "scale": floats(draw=constant(0.5))}
D0, D1 = Dimension("d0", 8), Dimension("d1", 4)


def scalar(value, dtype):
    """A whole-number scalar input."""
    return integers(draw=constant(value), dtype=dtype)


def _slots(*names, draw=positive):
    return {n: floats(A, B, draw=draw, is_variable=True) for n in names}


def _adam(apply: int, correct: bool, decay: float) -> Sample:
    def build(t):
        return dict(zip(("w2", "m2", "v2"), mm.adam_update(*(t[n] for n in ("w", "g", "m", "v", "lr", "step", "scale", "apply")),
                                                          beta1=0.9, beta2=0.99, eps=1e-6, weight_decay=decay, bias_correction=correct)))

    def reference(a):
        g = a["g"] * 0.5
        m, v = 0.9 * a["m"] + 0.1 * g, 0.99 * a["v"] + 0.01 * g * g
        mhat, vhat = (m / (1 - 0.9**3), v / (1 - 0.99**3)) if correct else (m, v)
        w = a["w"] - 0.1 * (mhat / (np.sqrt(vhat) + 1e-6) + decay * a["w"])
        return {"w2": w, "m2": m, "v2": v} if apply else {"w2": a["w"], "m2": a["m"], "v2": a["v"]}
    inputs = {**_slots("w", "m", "v"), "g": floats(A, B), **SCALARS, "step": scalar(3, "int64"), "apply": scalar(apply, "int32")}
    return Sample(f"adam, apply {apply}, correction {correct}", inputs, build, reference, ("w", "m", "v", "g", "lr", "scale"),
                  {"w": "w2", "m": "m2", "v": "v2"})


def _sgd(momentum: float, nesterov: bool) -> Sample:
    def build(t):
        w, v = mm.sgd_update(t["w"], t["g"], t.get("v"), t["lr"], t["scale"], t["apply"], momentum, nesterov, weight_decay=0.01)
        return {"w2": w} if v is None else {"w2": w, "v2": v}

    def reference(a):
        g = a["g"] * 0.5 + 0.01 * a["w"]
        if not momentum:
            return {"w2": a["w"] - 0.1 * g}
        v = momentum * a["v"] + g
        return {"w2": a["w"] - 0.1 * (g + momentum * v if nesterov else v), "v2": v}
    slots = ("w", "v") if momentum else ("w",)
    return Sample(f"sgd, momentum {momentum}, nesterov {nesterov}", {**_slots(*slots), "g": floats(A, B), **SCALARS, "apply": scalar(1, "int32")},
                  build, reference, (*slots, "g", "lr", "scale"), {n: f"{n}2" for n in slots})


def _adafactor(factored: bool) -> Sample:
    shapes = {"vr": (D1,), "vc": (D0,)} if factored else {"v": (D0, D1)}

    def build(t):
        w, new = mm.adafactor_update(t["w"], t["g"], {n: t[n] for n in shapes}, t["lr"], t["decay"], t["scale"], t["apply"],
                                     (D0, D1) if factored else None)
        return {"w2": w, **{f"{n}2": x for n, x in new.items()}}

    def reference(a):
        g, b = a["g"] * 0.5, 0.8
        u = g * g + 1e-30
        if factored:
            vr, vc = b * a["vr"] + (1 - b) * u.mean(0), b * a["vc"] + (1 - b) * u.mean(1)
            x, new = g / np.sqrt(vr / vr.mean()) / np.sqrt(vc)[:, None], {"vr2": vr, "vc2": vc}
        else:
            v = b * a["v"] + (1 - b) * u
            x, new = g / np.sqrt(v), {"v2": v}
        x = x / max(1.0, np.sqrt((x * x).mean()))
        return {"w2": a["w"] - 0.1 * max(np.sqrt((a["w"] ** 2).mean()), 1e-3) * x, **new}
    inputs = {"w": floats(D0, D1, is_variable=True), **{n: floats(*dims, draw=positive, is_variable=True) for n, dims in shapes.items()},
              "g": floats(D0, D1), **SCALARS, "decay": floats(draw=constant(0.8)), "apply": scalar(1, "int32")}
    return Sample(f"adafactor, factored {factored}", inputs, build, reference, tuple(n for n, g in inputs.items() if g.dtype == "float"),
                  {n: f"{n}2" for n in ("w", *shapes)})


def _written(a, at, n):
    y = a["cache"].copy()
    y[:, at:at + n] = a["x"] if a["x"].ndim == 3 else a["x"][:, None]
    return y


def _write(name, at, dims, n, is_variable) -> Sample:
    inputs = {"cache": floats(A, C, B, is_variable=is_variable), "x": floats(*dims), "at": scalar(at, "int64")}
    return Sample(f"write {name}", inputs, lambda t: {"y": mm.write(t["cache"], {"c": t["at"]}, t["x"])}, lambda a: {"y": _written(a, at, n)},
                  updates={"cache": "y"} if is_variable else {})


WINDOW, INSIDE = Dimension("c", 3), Dimension("window", 3)
SAMPLES = [
    _adam(1, True, 0.0), _adam(1, False, 0.01), _adam(0, True, 0.01), _sgd(0.0, False), _sgd(0.9, False), _sgd(0.9, True),
    _adafactor(True), _adafactor(False),
    Sample("reduce_sum_squares", {"x": floats(A, B)}, lambda t: {"y": mm.reduce_sum_squares(t["x"])}, lambda a: {"y": np.sum(a["x"] ** 2)}),
    _write("of one index in place", 5, (A, B), 1, True), _write("of a window across slices", 3, (A, WINDOW, B), 3, True),
    _write("into a value", 2, (A, B), 1, False),
    Sample("slice_at one index", {"x": floats(A, C, B), "at": scalar(5, "int64")}, lambda t: {"y": mm.slice_at(t["x"], "c", t["at"])},
           lambda a: {"y": a["x"][:, 5]}),
    Sample("slice_at a window", {"x": floats(A, C, B), "at": scalar(3, "int64")}, lambda t: {"y": mm.slice_at(t["x"], "c", t["at"], INSIDE)},
           lambda a: {"y": a["x"][:, 3:6]}),
    Sample("two variables exchanged", {"p": floats(A, B, is_variable=True), "q": floats(A, B, is_variable=True)},
           lambda t: {"p2": t["p"] * 1.0, "q2": t["q"] * 1.0}, lambda a: {"p2": a["p"], "q2": a["q"]}, updates={"p": "q2", "q": "p2"}),
]

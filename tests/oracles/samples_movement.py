"""Samples of renames, reshapes, relayouts, slices and pads."""

from __future__ import annotations

import numpy as np
from oracles.draw import A, B, C, floats
from oracles.harness import Sample
from oracles.layouts import Layout

import mesh_mpi as mm
from mesh_mpi import Dimension

M, N, P = Dimension("m", 4), Dimension("n", 4), Dimension("p_", 4)
MN, B1, B2, AB = Dimension("mn", 16), Dimension("b1", 2), Dimension("b2", 3), Dimension("ab", 24)
SHORT, LONG = Dimension("short", 4), Dimension("long", 12)
CROSSED = tuple(Layout("p:2;q:2", rules) for rules in (
    "a:p;x:q", "a:p;b:q;x:q;y:p", "b:q;y:p", "a:p;y:p", "a:p;b:q", "x:p;y:q", "b:p;x:p"))


def _used(x):
    """Use a tensor, so that a permuted row would change the result."""
    return x * mm.cast(mm.broadcast(mm.range_of(x.shape.dims[0]), x.shape), x.dtype)


def _reshape(name, old, new, layouts=()) -> Sample:
    sizes = tuple(d.size for d in new)
    return Sample(f"reshape {name}", {"x": floats(*old)}, lambda t: {"y": _used(mm.reshape(t["x"], new))},
                  lambda a: {"y": a["x"].reshape(sizes) * np.arange(sizes[0]).reshape(-1, *[1] * (len(sizes) - 1))}, layouts=layouts)


X, Y = Dimension("x", 4), Dimension("y", 4)
SAMPLES = [
    Sample("rename of one", {"x": floats(A, B)}, lambda t: {"y": _used(mm.rename(t["x"], {"a": "x"}))},
           lambda a: {"y": a["x"] * np.arange(4)[:, None]}),
    Sample("rename that exchanges two", {"x": floats(M, N), "w": floats(M, N)},
           lambda t: {"y": mm.rename(t["x"], {"m": "n", "n": "m"}) * t["w"]}, lambda a: {"y": (a["x"] * a["w"].T)}),
    _reshape("to other names, the rules crossed", (A, Dimension("b", 4)), (X, Y), CROSSED),
    _reshape("that merges", (A, B), (AB,)), _reshape("that splits", (AB,), (A, B)), _reshape("that splits the inner one", (A, B), (A, B1, B2)),
    _reshape("of 4, 4 to 16", (M, N), (MN,)), _reshape("of 4, 4 to 8, 2", (M, N), (Dimension("y", 8), Dimension("z", 2))),
    _reshape("across a dimension of 1", (M, Dimension("one", 1), N), (MN, Dimension("last", 1))),
    _reshape("of the last two of three", (C, M, N), (C, MN)), _reshape("of 2 and 8 to 4 and 4", (Dimension("u", 2), C), (M, N)),
    Sample("reshape of a sum", {"x": floats(A, M, N)}, lambda t: {"y": mm.reshape(mm.reduce_sum(t["x"], "a"), [MN])},
           lambda a: {"y": a["x"].sum(0).reshape(16)}),
    Sample("relayout", {"x": floats(A, C), "w": floats(A, C)},
           lambda t: {"y": mm.relayout(mm.relayout(t["x"] * 2.0, "") * t["w"], "")}, lambda a: {"y": 2.0 * a["x"] * a["w"]}),
    Sample("reorder", {"x": floats(A, B)}, lambda t: {"y": mm.transpose(t["x"], [B, A])}, lambda a: {"y": a["x"].T.copy()}),
    Sample("slice", {"x": floats(A, C)}, lambda t: {"y": mm.slice(t["x"], "c", 3, SHORT), "z": mm.slice(t["x"], "c", 1, Dimension("c", 4))},
           lambda a: {"y": a["x"][:, 3:7], "z": a["x"][:, 1:5]}),
    Sample("slice of a sum", {"x": floats(A, C, B)}, lambda t: {"y": mm.slice(mm.reduce_sum(t["x"], "b"), "c", 3, SHORT)},
           lambda a: {"y": a["x"].sum(2)[:, 3:7]}),
    Sample("pad", {"x": floats(A, C)}, lambda t: {"y": mm.pad(t["x"], "c", 3, LONG), "z": mm.pad(t["x"], "c", 0, Dimension("c", 16))},
           lambda a: {"y": np.pad(a["x"], ((0, 0), (3, 1))), "z": np.pad(a["x"], ((0, 0), (0, 8)))}),
]

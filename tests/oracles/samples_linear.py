"""Samples of contractions, reductions, sums, broadcasts and constants."""

from __future__ import annotations

import numpy as np
from oracles.draw import A, B, C, COLUMNS, ROWS, apart, floats, integers
from oracles.harness import Sample
from oracles.layouts import Layout

import mesh_mpi as mm
from mesh_mpi import Dimension

BATCH, HEADS, LENGTH, D_MODEL, D_KV = (Dimension("batch", 4), Dimension("heads", 4), Dimension("length", 2), Dimension("d_model", 6), Dimension("d_kv", 2))


def _einsum(name, equation: str, inputs, out) -> Sample:
    names = list(inputs)
    return Sample(f"einsum {name}", {n: floats(*dims) for n, dims in inputs.items()}, lambda t: {"y": mm.einsum([t[n] for n in names], out)},
                  lambda a: {"y": np.einsum(equation, *(a[n] for n in names))})


def _reduce(kind: str, f, draw=apart) -> Sample:
    op = getattr(mm, kind)
    return Sample(kind, {"x": floats(A, B, C, draw=draw)},
                  lambda t: {"one": op(t["x"], "b"), "two": op(t["x"], ["a", "c"]), "all": op(t["x"])},
                  lambda a: {"one": f(a["x"], (1,)), "two": f(a["x"], (0, 2)), "all": f(a["x"], (0, 1, 2))})


def _logsumexp(x):
    m = x.max(1, keepdims=True)
    return np.log(np.sum(np.exp(x - m), 1)) + m[:, 0]


def _two_layers(activation):
    """With squares, whose gradient is a product, the gradients go wrong if a partial sum passes a product with a split operand."""
    def build(t):
        h = activation(mm.einsum([t["x"], t["w"]], [BATCH, B]))
        y = mm.einsum([h, t["v"]], [BATCH, D_MODEL])
        return {"loss": mm.reduce_sum(mm.square(y - t["x"]))}
    return build


def _shared_input(t):
    """Three projections of one tensor: its gradient is the sum of three partial sums."""
    q, k, v = (mm.einsum([t["x"], t[n]], [BATCH, HEADS, D_KV]) for n in "qkv")
    return {"y": q * k + v}


SAMPLES = [
    _einsum("matrix product", "ij,jk->ik", {"x": (A, B), "y": (B, C)}, [A, C]),
    _einsum("matrix product, transposed result", "ij,jk->ki", {"x": (A, B), "y": (B, C)}, [C, A]),
    _einsum("batched product", "abc,acd->abd", {"x": (BATCH, A, B), "y": (BATCH, B, C)}, [BATCH, A, C]),
    _einsum("projection to heads", "bld,dhk->bhlk", {"x": (BATCH, LENGTH, D_MODEL), "y": (D_MODEL, HEADS, D_KV)}, [BATCH, HEADS, LENGTH, D_KV]),
    _einsum("back from heads", "bhlk,hkd->bld", {"x": (BATCH, HEADS, LENGTH, D_KV), "y": (HEADS, D_KV, D_MODEL)}, [BATCH, LENGTH, D_MODEL]),
    _einsum("inner product", "ab,ab->", {"x": (A, B), "y": (A, B)}, []),
    _einsum("outer product", "a,b->ab", {"x": (A,), "y": (B,)}, [A, B]),
    _einsum("pointwise product", "ab,b->ab", {"x": (A, B), "y": (B,)}, [A, B]),
    _einsum("sums of what one operand has alone", "abc,bd->a", {"x": (A, B, C), "y": (B, ROWS)}, [A]),
    _einsum("of three", "ab,bc,c->a", {"x": (A, B), "y": (B, C), "z": (C,)}, [A]),
    Sample("einsum of a tensor with itself", {"x": floats(A, B)}, lambda t: {"y": mm.einsum([t["x"], t["x"]], [A])},
           lambda a: {"y": np.sum(a["x"] ** 2, 1)}),
    Sample("two layers and a residual", {"x": floats(BATCH, D_MODEL), "w": floats(D_MODEL, B), "v": floats(B, D_MODEL)}, _two_layers(mm.tanh),
           lambda a: {"loss": np.sum((np.tanh(a["x"] @ a["w"]) @ a["v"] - a["x"]) ** 2)}),
    Sample("two layers with squares", {"x": floats(BATCH, D_MODEL), "w": floats(D_MODEL, B), "v": floats(B, D_MODEL)}, _two_layers(mm.square),
           lambda a: {"loss": np.sum(((a["x"] @ a["w"]) ** 2 @ a["v"] - a["x"]) ** 2)}),
    Sample("three projections of one tensor", {"x": floats(BATCH, D_MODEL), **{n: floats(D_MODEL, HEADS, D_KV) for n in "qkv"}}, _shared_input,
           lambda a: {"y": np.einsum("bd,dhk->bhk", a["x"], a["q"]) * np.einsum("bd,dhk->bhk", a["x"], a["k"]) + np.einsum("bd,dhk->bhk", a["x"], a["v"])}),
    _reduce("reduce_sum", lambda x, axes: x.sum(axes)), _reduce("reduce_mean", lambda x, axes: x.mean(axes)),
    _reduce("reduce_max", lambda x, axes: x.max(axes)), _reduce("reduce_min", lambda x, axes: x.min(axes)),
    Sample("reduce_logsumexp", {"x": floats(ROWS, COLUMNS)}, lambda t: {"y": mm.reduce_logsumexp(t["x"], "columns")},
           lambda a: {"y": _logsumexp(a["x"])}),
    Sample("add_n of sums, partial and whole", {"x": floats(A, B), "y": floats(A, C), "z": floats(A)},
           lambda t: {"y": mm.add_n([mm.reduce_sum(t["x"], "b"), t["z"], mm.reduce_sum(t["y"], "c"), t["z"]])},
           lambda a: {"y": a["x"].sum(1) + a["y"].sum(1) + 2 * a["z"]}),
    Sample("a product of two sums", {"x": floats(A, C), "y": floats(B, C)}, lambda t: {"z": mm.reduce_sum(t["x"], "a") * mm.reduce_sum(t["y"], "b")},
           lambda a: {"z": a["x"].sum(0) * a["y"].sum(0)}),
    Sample("two products whose factors are summed over different axes", {n: floats(B if n[0] == "y" else A, C) for n in ("x1", "x2", "y1", "y2")},
           lambda t: {f"w{i}": mm.tanh(mm.reduce_sum(t[f"x{i}"], "a")) * mm.reduce_sum(t[f"y{i}"], "b") for i in (1, 2)},
           lambda a: {f"w{i}": np.tanh(a[f"x{i}"].sum(0)) * a[f"y{i}"].sum(0) for i in (1, 2)}, layouts=(Layout("p:2;q:2", "a:p;b:q"),)),
    Sample("a sum scaled, negated, reshaped and summed again", {"x": floats(A, B, C), "s": floats(A)},
           lambda t: {"y": mm.reduce_sum(mm.neg(mm.reduce_sum(t["x"], "c") * t["s"]) * 0.5, "b")},
           lambda a: {"y": np.sum(-0.5 * a["x"].sum(2) * a["s"][:, None], 1)}),
    Sample("broadcast", {"x": floats(B)}, lambda t: {"y": mm.broadcast(t["x"], [A, B, C])},
           lambda a: {"y": np.broadcast_to(a["x"][None, :, None], (4, 6, 8)).copy()}),
    Sample("full and range", {"x": integers(A, B)},
           lambda t: {"f": mm.full([A, B], 2.5, "float64"), "r": mm.range_of(C), "s": t["x"] + mm.broadcast(mm.range_of(A), [A, B])},
           lambda a: {"f": np.full((4, 6), 2.5), "r": np.arange(8, dtype=np.int32), "s": a["x"] + np.arange(4, dtype=np.int32)[:, None]}),
]

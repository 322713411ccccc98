"""Samples of norms, softmax, cross-entropy, embedding."""

from __future__ import annotations

import numpy as np
from oracles.draw import COLUMNS, ROWS, floats, integers, normal, positive, whole
from oracles.harness import Sample

import mesh_mpi as mm
from mesh_mpi import Dimension

BATCH, LENGTH, D_MODEL, VOCAB = Dimension("batch", 4), Dimension("length", 2), Dimension("d_model", 6), Dimension("vocab", 8)
D_OTHER = Dimension("d_other", 6)


def _layer_norm(a, eps=1e-6):
    x = a["x"]
    centred = x - x.mean(-1, keepdims=True)
    y = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps) * a["s"]
    return {"y": y + a["b"] if "b" in a else y}


def _rms_norm(a, eps=1e-6):
    return {"y": a["x"] / np.sqrt((a["x"] ** 2).mean(-1, keepdims=True) + eps) * a["s"]}


def _log_softmax(x):
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def cross_entropy(x, targets, n_valid=None, smoothing=0.0, z_loss=0.0, ignore=None):
    """Return the loss of each row from the definition."""
    n = n_valid or x.shape[-1]
    x = x[..., :n]
    m = x.max(-1, keepdims=True)
    lse = np.log(np.exp(x - m).sum(-1)) + m[..., 0]
    valid = (targets >= 0) & (targets != ignore)
    wanted = np.where(np.arange(n) == targets[..., None], 1.0 - smoothing, 0.0) + smoothing / n
    return np.where(valid, (wanted * (lse[..., None] - x)).sum(-1) + z_loss * lse**2, 0.0)


def _cross_entropy(name, low=0, high=8, **settings) -> Sample:
    theirs = {"label_smoothing": "smoothing"}
    return Sample(f"cross_entropy {name}", {"x": floats(BATCH, LENGTH, VOCAB), "t": integers(BATCH, LENGTH, draw=whole(low, high))},
                  lambda t: {"loss": mm.cross_entropy(t["x"], t["t"], "vocab", **settings)},
                  lambda a: {"loss": cross_entropy(a["x"], a["t"], **{theirs.get(k, k): v for k, v in settings.items()})})


def _lookup(table, ids):
    inside = (ids >= 0) & (ids < len(table))
    return np.where(inside[..., None], table[np.clip(ids, 0, len(table) - 1)], 0.0)


def _scattered(a):
    y = a["base"].copy()
    np.add.at(y, a["ids"], a["rows"])
    return {"y": y}


def _tied(t):
    """One table as input embedding and as output projection: its two gradients are added, then reduced."""
    h = mm.tanh(mm.einsum([mm.embedding(t["table"], t["ids"], "vocab"), t["w"]], [BATCH, D_OTHER]))
    logits = mm.einsum([mm.rename(h, {"d_other": "d_model"}), t["table"]], [BATCH, VOCAB])
    return {"loss": mm.reduce_sum(mm.cross_entropy(logits, t["ids"], "vocab"))}


def _tied_reference(a):
    logits = np.tanh(a["table"][a["ids"]] @ a["w"]) @ a["table"].T
    return {"loss": cross_entropy(logits, a["ids"]).sum()}


SAMPLES = [
    Sample("layer_norm", {"x": floats(BATCH, D_MODEL), "s": floats(D_MODEL, draw=positive), "b": floats(D_MODEL)},
           lambda t: {"y": mm.layer_norm(t["x"], "d_model", t["s"], t["b"])}, _layer_norm),
    Sample("layer_norm without bias, over the first dimension", {"x": floats(D_MODEL, BATCH), "s": floats(D_MODEL, draw=positive)},
           lambda t: {"y": mm.layer_norm(t["x"], "d_model", t["s"])}, lambda a: {"y": _layer_norm({"x": a["x"].T, "s": a["s"]})["y"].T}),
    Sample("rms_norm", {"x": floats(BATCH, LENGTH, D_MODEL), "s": floats(D_MODEL, draw=positive)},
           lambda t: {"y": mm.rms_norm(t["x"], "d_model", t["s"])}, _rms_norm),
    Sample("softmax", {"x": floats(ROWS, COLUMNS)}, lambda t: {"y": mm.softmax(t["x"], "columns")}, lambda a: {"y": np.exp(_log_softmax(a["x"]))}),
    Sample("softmax of large numbers over the first dimension", {"x": floats(COLUMNS, ROWS, draw=lambda r, s: 300.0 + normal(r, s))},
           lambda t: {"y": mm.softmax(t["x"], "columns")}, lambda a: {"y": np.exp(_log_softmax(a["x"].T)).T}),
    Sample("log_softmax", {"x": floats(ROWS, COLUMNS)}, lambda t: {"y": mm.log_softmax(t["x"], "columns")}, lambda a: {"y": _log_softmax(a["x"])}),
    _cross_entropy("plain"), _cross_entropy("with smoothing and z-loss", label_smoothing=0.1, z_loss=0.05),
    _cross_entropy("of a padded vocabulary with ignored targets", low=-1, high=5, n_valid=5, label_smoothing=0.1, ignore=2),
    Sample("embedding", {"table": floats(VOCAB, D_MODEL), "ids": integers(BATCH, LENGTH, draw=whole(-1, 10))},
           lambda t: {"y": mm.embedding(t["table"], t["ids"], "vocab")}, lambda a: {"y": _lookup(a["table"], a["ids"])}),
    Sample("embedding of equal indices", {"table": floats(VOCAB, D_MODEL), "ids": integers(BATCH, LENGTH, draw=whole(2, 4), dtype="int64")},
           lambda t: {"y": mm.embedding(t["table"], t["ids"], "vocab")}, lambda a: {"y": _lookup(a["table"], a["ids"])}),
    Sample("scatter_add", {"base": floats(VOCAB, D_MODEL), "ids": integers(BATCH, LENGTH, draw=whole(0, 8)), "rows": floats(BATCH, LENGTH, D_MODEL)},
           lambda t: {"y": mm.scatter_add(t["base"], t["ids"], t["rows"], "vocab")}, _scattered),
    Sample("a table tied to the output", {"table": floats(VOCAB, D_MODEL), "ids": integers(BATCH, draw=whole(0, 8)), "w": floats(D_MODEL, D_OTHER)},
           _tied, _tied_reference),
]

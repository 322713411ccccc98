"""The two-layer network of docs/architecture.md section 4, for tests: small, and with every kind of collective under some layout."""

from __future__ import annotations

import numpy as np

import mesh_mpi as mm

BATCH, D_MODEL, D_FF = 8, 12, 16


def training_step(mesh_shape: str = "", layout: str = "", dtype: str = "float32", name: str = "step", rate: float = 0.1, **options) -> mm.Program:
    """Compile one training step; outputs loss and y[batch, d_model]."""
    batch, d_model, d_ff = mm.Dimension("batch", BATCH), mm.Dimension("d_model", D_MODEL), mm.Dimension("d_ff", D_FF)
    x = mm.placeholder("x", [batch, d_model], dtype)
    w = mm.Variable("w", [d_model, d_ff], init=mm.normal(stddev=0.4), dtype=dtype)
    v = mm.Variable("v", [d_ff, d_model], init=mm.truncated_normal(stddev=0.2), dtype=dtype)
    y = mm.einsum([mm.relu(mm.einsum([x, w], [batch, d_ff])), v], [batch, d_model])
    loss = mm.reduce_mean(mm.square(y - x))
    dw, dv = mm.gradients(loss, [w, v])
    return mm.compile(outputs={"loss": loss, "y": y}, updates=[(w, w - rate * dw), (v, v - rate * dv)],
                      mesh_shape=mesh_shape, layout=layout, name=name, **options)


def batch_of(seed: int = 0, dtype: str = "float32") -> np.ndarray:
    """Return x[batch, d_model]."""
    return np.random.default_rng(seed).normal(size=(BATCH, D_MODEL)).astype(dtype)


def reference(n_steps: int, w: np.ndarray, v: np.ndarray, x: np.ndarray, rate: float = 0.1) -> tuple[list[float], np.ndarray, np.ndarray]:
    """Return the losses and the last weights of ``n_steps``, from the formulas, in float64."""
    w, v, x, losses = w.astype(np.float64), v.astype(np.float64), x.astype(np.float64), []
    for _ in range(n_steps):
        h = np.maximum(x @ w, 0)
        error = h @ v - x
        losses.append(float((error**2).mean()))
        dy = 2 * error / error.size
        dh = (dy @ v.T) * (h > 0)
        w, v = w - rate * (x.T @ dh), v - rate * (h.T @ dy)
    return losses, w, v

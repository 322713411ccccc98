"""Running an optimizer on fed gradients, on the simulated machine."""

from __future__ import annotations

import numpy as np

import mesh_mpi as mm
from mesh_mpi.optimize import UpdateInputs, clip
from mesh_mpi.runtime.simulated import SimulatedMachine


def optimize(optimizer, values, gradients, n_steps=1, rate=0.1, mesh="", layout="", storage=None, dtype="float64", dims=None,
             clip_norm=None, count=1.0, slots=()):
    """Return, for each step, variables and slots by name (and ``norm``, ``applied``) after that step; gradients are the same at every step.

    ``values`` and ``gradients`` map names of variables to arrays, ``dims`` names to dimensions (default a, b, c, ... by position).
    """
    named = dims or {name: [mm.Dimension("abcdef"[i], n) for i, n in enumerate(v.shape)] for name, v in values.items()}
    variables = {name: mm.Variable(name, named[name], dtype=dtype) for name in values}
    fed = {name: mm.placeholder(f"g_{name}", named[name], dtype) for name in values}
    clipped = clip(list(fed.values()), mm.full((), count, dtype), clip_norm)
    step, lr = mm.placeholder("step", (), "int64"), mm.placeholder("learning_rate", (), dtype)
    inputs = UpdateInputs(lr, step, clipped.scale, clipped.apply)
    updates = [pair for name, v in variables.items() for pair in optimizer.update(v, fed[name], inputs)]
    program = mm.compile({"norm": clipped.norm, "applied": clipped.apply}, updates, mesh, layout, storage)
    state = mm.State(program, machine=SimulatedMachine(program.mesh))
    for name, value in values.items():
        state.assign(name, np.asarray(value, dtype))
    history = []
    for i in range(1, n_steps + 1):
        feeds = {**{f"g_{n}": np.asarray(g, dtype) for n, g in gradients.items()}, "step": i, "learning_rate": rate}
        out = state.run(program, **{n: x for n, x in feeds.items() if n in program.feeds})
        history.append({**{n: state.read(n) for n in program.variables}, "norm": float(out["norm"]), "applied": int(out["applied"])})
    return history

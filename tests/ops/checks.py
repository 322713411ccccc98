"""Running operations on the simulated machine: on one rank, and under every legal layout of up to four.

Invariant: a layout that is compared with one rank compares every output and every written variable.
"""

from __future__ import annotations

import itertools

import numpy as np

import mesh_mpi as mm

MESHES = ("a:2", "a:3", "a:4", "a:2;b:2")


def run(outputs=None, feeds=None, updates=(), values=None, mesh="", layout="", seed=0, **options):
    """Compile and run once; return outputs and written variables (by full name) as whole arrays, and the program."""
    program = mm.compile(outputs or {}, updates, mesh_shape=mesh, layout=layout, **options)
    state = mm.State([program], seed=seed, poison=True)
    for name, value in (values or {}).items():
        if name in program.variables:
            state.assign(name, value)
    found = state.run(program, whole=True, **{k: v for k, v in (feeds or {}).items() if k in program.feeds})
    return {**found, **{name: state.read(name) for name in program.written}}, program


def layouts(dims):
    """Yield every assignment of dimensions to the axes of the small meshes, at most two dimensions split."""
    for mesh in MESHES:
        axes = [part.split(":")[0] for part in mesh.split(";")]
        for n in (1, 2):
            for names in itertools.combinations(dims, n):
                for chosen in itertools.product(axes, repeat=n):
                    yield mesh, ";".join(f"{d}:{a}" for d, a in zip(names, chosen))


def every_layout(outputs, dims, tolerance=1e-12, n_least=3, **given):
    """Assert that each legal layout of ``dims`` gives what one rank gives; return how many were legal."""
    one, _ = run(outputs, **given)
    n_legal = 0
    for mesh, layout in layouts(dims):
        try:
            found, _ = run(outputs, mesh=mesh, layout=layout, **given)
        except mm.MeshMpiError:
            continue
        n_legal += 1
        for name, value in one.items():
            assert_close(found[name], value, tolerance, f"{name} under {mesh} {layout}")
    assert n_legal >= n_least, f"only {n_legal} layouts of {dims} are legal"
    return n_legal


def assert_close(found, expected, tolerance, what=""):
    """Assert max|a-b| <= tolerance max|b|, and equality of integers and booleans."""
    found, expected = np.asarray(found), np.asarray(expected)
    assert found.shape == expected.shape, f"{what}: {found.shape} instead of {expected.shape}"
    if expected.dtype.kind != "f":
        assert (found == expected).all(), f"{what}: {found} instead of {expected}"
        return
    worst, size = np.abs(found - expected).max(initial=0.0), np.abs(expected).max(initial=0.0)
    assert worst <= tolerance * size, f"{what}: off by {worst:.3g} of {size:.3g}"


def check_gradients(y, variables, values, feeds=None, tolerance=1e-6, seed=0):
    """Assert that gradients of a weighted sum of ``y`` equal central differences along random directions, in float64."""
    rng = np.random.default_rng(7)
    weights = mm.placeholder("weights_of_y", y.shape, y.dtype)
    loss = mm.reduce_sum(y * weights)
    feeds = {**(feeds or {}), "weights_of_y": rng.standard_normal(y.shape.sizes)}
    gradients = {f"d_{v.full_name}": g for v, g in zip(variables, mm.gradients(loss, variables))}
    found, _ = run({"loss": loss, **gradients}, feeds, values=values, seed=seed)
    for v in variables:
        direction, h = rng.standard_normal(v.shape.sizes), 1e-5
        ends = [run({"loss": loss}, feeds, values={**values, v.full_name: values[v.full_name] + s * h * direction}, seed=seed)[0]["loss"] for s in (1, -1)]
        slope, term = (ends[0] - ends[1]) / (2 * h), found[f"d_{v.full_name}"] * direction
        assert abs(term.sum() - slope) <= tolerance * max(np.abs(term).sum(), abs(slope), 1e-3), f"d_{v.full_name}: {term.sum()} instead of {slope}"
    return {"loss": loss, **gradients}, feeds


def variables_of(rng, dtype="float64", **shapes):
    """Make variables by name and dimensions; return them and random values for them."""
    made = {name: mm.Variable(name, dims, dtype=dtype) for name, dims in shapes.items()}
    return made, {name: rng.standard_normal(v.shape.sizes).astype(dtype) for name, v in made.items()}

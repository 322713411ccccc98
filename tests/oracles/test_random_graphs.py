"""Random graphs of many operations: what operations do to one another's placements, partial sums and memory.

Fixed seeds; every graph under several legal layouts on four ranks, values and gradients against one rank, poisoned and with the ledger.
"""

from __future__ import annotations

import random

import pytest
from oracles.draw import floats, normal
from oracles.harness import Sample, against_no_reuse, against_one_rank, compiled, graph_of, is_legal
from oracles.layouts import Layout, assignments
from oracles.memory_check import clobbered, written_once

import mesh_mpi as mm
from mesh_mpi import Dimension
from mesh_mpi.graph.gradients import reachable

N_GRAPHS, N_OPERATIONS, N_LAYOUTS = 120, 14, 4
TOLERANCE = 1e-10  # wider than an operation's 1e-12: a dozen of them, squares and cancelling differences among them, multiply rounding
DIMS = [Dimension(n, 4) for n in "abcd"]
RENAMED = {d.name: Dimension(d.name * 2, 4) for d in DIMS}
MESHES = ("p:2;q:2", "p:4", "p:2;q:2;r:1")


def _of(rng, tensors, predicate=lambda t: True):
    """Choose a tensor, the latest more often."""
    fitting = [t for t in tensors if predicate(t)]
    return rng.choice(fitting[-4:] if rng.random() < 0.7 else fitting) if fitting else None


def _unary(rng, ts):
    return rng.choice([mm.neg, mm.tanh, mm.square, mm.sin, mm.relu, lambda x: x * 0.5, lambda x: 1.0 - x, lambda x: x / 3.0, mm.sigmoid])(_of(rng, ts))


def _same(rng, ts):
    x = _of(rng, ts)
    y = _of(rng, ts, lambda t: set(t.shape) <= set(x.shape) or set(x.shape) <= set(t.shape))
    return rng.choice([mm.add, mm.sub, mm.mul, mm.mul, lambda u, v: _some(u) * v])(x, y)


def _some(x):
    """Select against zero, by a mask that no rounding changes."""
    return mm.where(mm.broadcast(mm.range_of(x.shape.dims[0]) < 2, x.shape), x, 0.0) if x.shape else x


def _sum(rng, ts):
    x = _of(rng, ts, lambda t: len(t.shape) > 0)
    if x is None:
        return None
    dims = [d for d in x.shape if rng.random() < 0.4] or [rng.choice(x.shape.dims)]
    return rng.choice([mm.reduce_sum, mm.reduce_sum, mm.reduce_mean, mm.reduce_max])(x, dims)


def _two_sums(rng, ts):
    """Combine two sums that leave one common dimension: partial over different axes, as a rule."""
    x = _of(rng, ts, lambda t: len(t.shape) > 1)
    if x is None:
        return None
    y = _of(rng, ts, lambda t: len(t.shape) > 1 and any(d in x.shape for d in t.shape))
    kept = rng.choice([d for d in x.shape if d in y.shape])
    p, q = (mm.reduce_sum(t, [d for d in t.shape if d != kept]) for t in (x, y))
    return rng.choice([lambda: p * q, lambda: p + q, lambda: mm.add_n([p, q, -p]), lambda: mm.einsum([p, q], [kept]), lambda: mm.einsum([p, q], []),
                       lambda: _some(p) + q, lambda: p / (mm.square(q) + 1.0), lambda: (p - q) * p])()


def _einsum(rng, ts):
    x, y = _of(rng, ts), _of(rng, ts)
    dims = list({d.name: d for d in (*x.shape, *y.shape)}.values())
    rng.shuffle(dims)
    return mm.einsum([x, y], [d for d in dims if rng.random() < 0.55][:3]) * 0.5


def _broadcast(rng, ts):
    x = _of(rng, ts, lambda t: len(t.shape) < 3)
    return None if x is None else mm.broadcast(x, [*x.shape, *rng.sample([d for d in DIMS if d.name not in x.shape], 1)][:3 + len(x.shape)])


def _rename(rng, ts):
    x = _of(rng, ts, lambda t: any(len(d.name) == 1 for d in t.shape))
    if x is None:
        return None
    d = rng.choice([d for d in x.shape if len(d.name) == 1])
    return mm.rename(x, {d.name: RENAMED[d.name]}) if d.name * 2 not in x.shape else None


def _back(rng, ts):
    x = _of(rng, ts, lambda t: any(len(d.name) == 2 and d.name[0] not in t.shape for d in t.shape))
    return None if x is None else mm.rename(x, {d.name: d.name[0] for d in x.shape if len(d.name) == 2 and d.name[0] not in x.shape})


def _reshape(rng, ts):
    x = _of(rng, ts, lambda t: len(t.shape) == 2)
    if x is None:
        return None
    merged = mm.reshape(x, [Dimension("m", 16)])
    dims = rng.sample([d for d in DIMS], 2)
    return mm.reshape(merged * 2.0 if rng.random() < 0.5 else merged, dims)


def _slice_and_pad(rng, ts):
    x = _of(rng, ts, lambda t: len(t.shape) > 0)
    if x is None:
        return None
    d = rng.choice(x.shape.dims)
    return mm.pad(mm.slice(x, d.name, rng.randrange(3), Dimension("s", 2)), "s", rng.randrange(3), d)


def _rows(rng, ts):
    x = _of(rng, ts, lambda t: len(t.shape) > 0)
    if x is None:
        return None
    d = rng.choice(x.shape.dims)
    return rng.choice([lambda: mm.softmax(x, d.name), lambda: mm.rms_norm(x, d.name, mm.full([d], 1.5, "float64")),
                       lambda: mm.layer_norm(x, d.name, mm.full([d], 1.5, "float64"))])()


def _relayout(rng, ts):
    return mm.relayout(_of(rng, ts), "")


LINEAR = [_sum, _two_sums, _two_sums, _two_sums, _same, _same, _same, _einsum, _einsum, _rename, _reshape,
          lambda rng, ts: mm.neg(_of(rng, ts)), lambda rng, ts: _of(rng, ts) * 0.5]
OPERATIONS = [_unary, _unary, _same, _same, _same, _sum, _sum, _two_sums, _einsum, _einsum, _broadcast, _rename, _back, _reshape,
              _slice_and_pad, _rows, _relayout]


def graph(seed: int) -> Sample:
    """Return a random graph of the inputs x, y and z as a sample; its outputs are the tensors that nothing else uses.

    Every second one has no gradients and uses most tensors once: only such sums may stay partial.
    """
    forward_only = seed % 2 == 1

    def build(t):
        rng = random.Random(seed)
        tensors, pool = list(t.values()), list(t.values())
        while len(tensors) < N_OPERATIONS:
            made = rng.choice(LINEAR if forward_only and rng.random() < 0.8 else OPERATIONS)(rng, pool)
            if made is None:
                continue
            if forward_only and rng.random() < 0.8:
                pool = [x for x in pool if x not in made.operation.inputs or len(pool) < 4]
            tensors.append(made)
            pool.append(made)
        used = {id(x) for op in reachable(tensors) for x in op.inputs}
        leaves = [x for x in tensors if id(x) not in used]
        if forward_only:
            return {f"leaf_{i}": x for i, x in enumerate(leaves)}
        zeros = mm.add_n([mm.reduce_sum(x) if x.shape else x for x in t.values()])
        return {"last": leaves[-1], "total": mm.add_n([zeros, *(mm.reduce_sum(x) if x.shape else x for x in leaves)])}
    a, b, c, d = DIMS
    inputs = {"x": floats(a, b, c, draw=normal), "y": floats(b, c, d, draw=normal), "z": floats(d, a, draw=normal)}
    return Sample(f"random graph {seed}", inputs, build, lambda arrays: {}, tuple(inputs) if forward_only else ())


def layouts(sample: Sample, seed: int) -> list[Layout]:
    """Return a fixed choice of legal layouts that split as much as they may."""
    names = [d.name for d in DIMS] + [d.name for d in RENAMED.values()] + ["m", "s"]
    rng = random.Random(seed)
    found: list[Layout] = []
    for _ in range(200):
        mesh = rng.choice(MESHES)
        chosen = [n for n in names if rng.random() < 0.5 and any(n in (x.name for x in t.shape) for t in _tensors(sample))]
        layout = rng.choice(assignments(chosen, mesh)) if chosen else None
        if layout is not None and layout not in found and is_legal(sample, layout):
            found.append(layout)
            if len(found) == N_LAYOUTS:
                break
    return found


def _tensors(sample: Sample):
    return [t for op in reachable(list(graph_of(sample, "float64").outputs.values())) for t in op.outputs]


@pytest.mark.parametrize("first", range(0, N_GRAPHS, 10))
def test_random_graphs_give_the_answer_of_one_rank_under_every_layout(first):
    faults, n = [], 0
    for seed in range(first, first + 10):
        sample = graph(seed)
        for layout in layouts(sample, seed):
            faults += against_one_rank(sample, "float64", layout, tolerance=TOLERANCE, least_scale=1.0)
            program = compiled(sample, "float64", layout)
            faults += clobbered(program) + written_once(program)
            n += 1
        faults += against_no_reuse(sample, "float64", layout) + against_no_reuse(sample, "float64", Layout("", ""))
    assert not faults, "\n".join(faults[:10])
    assert n > 20, "too few layouts were legal"

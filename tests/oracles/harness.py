"""The five oracles, as functions that return what is wrong: an empty list means that nothing was found.

Invariant: the reference knows nothing of the package; every rank's slice is compared, not rank 0's alone.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numpy as np
from oracles.layouts import LARGE_LAYOUTS, MOST_LAYOUTS, Layout, large_layouts, small_layouts

import mesh_mpi as mm
from mesh_mpi.errors import LayoutError
from mesh_mpi.graph.gradients import reachable
from mesh_mpi.mesh import Mesh
from mesh_mpi.runtime.simulated import SimulatedMachine
from mesh_mpi.runtime.state import State

TOLERANCE = {"float64": 1e-12, "float32": 1e-5}  # max|a-b| / max|a|, as docs/architecture.md section 6 has it
DIFFERENCE_TOLERANCE = 1e-6                      # of a directional derivative by central differences in float64
WHOLE = Layout("", "")


class Given(NamedTuple):
    """An input: dimensions, how to draw it (rng, shape) -> array, and ``float``, ``int32``, ``int64`` or ``bool``."""

    dims: tuple[mm.Dimension, ...]
    draw: Callable
    dtype: str = "float"
    is_variable: bool = False


class Sample(NamedTuple):
    """One use of an operation.

    ``build(tensors)`` returns outputs by name; ``reference(arrays)`` the same in float64 NumPy, written from the formula.
    ``constants`` are floating inputs that have no gradient; ``updates`` maps variables to the outputs that replace them.
    """

    name: str
    inputs: dict[str, Given]
    build: Callable
    reference: Callable
    constants: tuple[str, ...] = ()
    updates: dict[str, str] = {}
    layouts: tuple[Layout, ...] = ()  # beside those that are enumerated


class Graph(NamedTuple):
    """A sample's graph in one element type: outputs and gradients, the gradient's names, all dimensions and kinds."""

    outputs: dict[str, mm.Tensor]
    updates: list
    gradients: tuple[str, ...]
    dims: tuple[str, ...]
    kinds: tuple[str, ...]


def rng_of(*words) -> np.random.Generator:
    """Return a generator that depends on the words only."""
    return np.random.default_rng(zlib.crc32(" ".join(map(str, words)).encode()))


class _Key:
    """Makes a sample hashable by identity, and keeps it alive."""

    def __init__(self, sample):
        self.sample = sample

    def __hash__(self):
        return id(self.sample)

    def __eq__(self, other):
        return self.sample is other.sample


def graph_of(sample: Sample, dtype: str) -> Graph:
    """Build a sample once in an element type: its outputs, and gradients of sum(output * cotangent) for each floating input."""
    return _graph(_Key(sample), dtype)


@cache
def _graph(key: _Key, dtype: str) -> Graph:
    sample = key.sample
    tensors: dict[str, mm.Tensor] = {}
    for name, given in sample.inputs.items():
        kind = dtype if given.dtype == "float" else given.dtype
        tensors[name] = mm.Variable(name, given.dims, dtype=kind) if given.is_variable else mm.placeholder(name, given.dims, kind)
    outputs = dict(sample.build(tensors))
    updates = [(tensors[v], outputs[out]) for v, out in sample.updates.items()]
    floating = {name: t for name, t in outputs.items() if t.dtype.startswith("float")}
    wanted = [n for n, given in sample.inputs.items() if given.dtype == "float" and n not in sample.constants]
    if wanted and floating:
        cotangents = [mm.placeholder(f"cotangent_{name}", t.shape, t.dtype) for name, t in floating.items()]
        found = mm.gradients(list(floating.values()), [tensors[n] for n in wanted], cotangents)
        missing = [n for n, g in zip(wanted, found) if g is None]
        assert not missing, f"{sample.name}: no gradient reaches {missing}; if that is meant, name it in constants"
        outputs |= {f"d_{n}": g for n, g in zip(wanted, found)}
    operations = reachable(list(outputs.values()))
    dims = dict.fromkeys(d.name for op in operations for t in op.outputs for d in t.shape)
    return Graph(outputs, updates, tuple(f"d_{n}" for n in wanted if floating), tuple(dims),
                 tuple(dict.fromkeys(op.definition.kind for op in operations)))


@cache
def _feeds(key: _Key) -> dict[str, np.ndarray]:
    sample, arrays = key.sample, {}
    for name, given in sample.inputs.items():
        array = np.asarray(given.draw(rng_of(sample.name, name), tuple(d.size for d in given.dims)))
        arrays[name] = array.astype(np.float64 if given.dtype == "float" else given.dtype)
    for name, t in graph_of(sample, "float64").outputs.items():
        if t.dtype.startswith("float") and not name.startswith("d_"):
            arrays[f"cotangent_{name}"] = rng_of(sample.name, "cotangent", name).standard_normal(t.shape.sizes)
    return arrays


def arrays_of(sample: Sample) -> dict[str, np.ndarray]:
    """Return the sample's inputs and cotangents, the same in every run; floating ones in float64."""
    return _feeds(_Key(sample))


class Watch(SimulatedMachine):
    """A simulated machine that notes, for each collective, the sizes of the buffers that it was really given."""

    def __init__(self, mesh: Mesh):
        super().__init__(mesh)
        self.seen: list[tuple] = []

    def bind(self, kind, axes, outs, ins, reduce="", label=""):
        """Return the call, which also notes (kind, axes, bytes of the larger buffer)."""
        inner = super().bind(kind, axes, outs, ins, reduce, label)
        sizes = {max(o.nbytes, i.nbytes) for o, i in zip(outs, ins, strict=True)}
        assert len(sizes) == 1 and len(outs) == self.mesh.size, f"{label}: buffers of {sorted(sizes)} bytes on {len(outs)} ranks"
        entry = (kind, tuple(axes), sizes.pop())

        def call():
            self.seen.append(entry)
            inner()
        return call


def compiled(sample: Sample, dtype: str, layout: Layout, **settings) -> mm.Program:
    """Compile a sample; raises LayoutError where the layout is not legal."""
    graph = graph_of(sample, dtype)
    return mm.compile(graph.outputs, graph.updates, mesh_shape=layout.mesh_shape, layout=layout.layout, **settings)


class Run(NamedTuple):
    """What a program left: for each output and written variable the array and the global slices of every rank, and the collectives seen."""

    arrays: dict[str, list[tuple[np.ndarray, tuple[slice, ...]]]]
    seen: list[tuple]

    def whole(self, name: str) -> np.ndarray:
        """Return the array of a run on one rank."""
        assert len(self.arrays[name]) == 1
        return self.arrays[name][0][0]


def run(program: mm.Program, arrays: dict[str, np.ndarray], poison: bool = True, seed: int = 7) -> Run:
    """Run a program on a watched, simulated machine."""
    machine = Watch(program.mesh)
    state = State([program], seed=seed, machine=machine, poison=poison)
    for name, b in program.variables.items():
        state.assign(name, arrays[name].astype(b.value.dtype))
    state.run(program, **{name: arrays[name].astype(b.value.dtype) for name, b in program.feeds.items() if name != "seed"})
    found = {}
    for name, b in program.outputs.items():
        found[name] = [(m.view(program.plan, b.value).copy(), b.slices(program.mesh, m.coordinate)) for m in state.memories]
    for name in program.written:
        found[f"{name}:="] = [(piece.array.copy(), piece.slices) for piece in state.pieces(name)]
    return Run(found, machine.seen)


# -- the oracles -----------------------------------------------------------------------------


def against_reference(sample: Sample, dtype: str) -> list[str]:
    """Oracle 1: on one rank, every output equals the formula."""
    arrays = arrays_of(sample)
    result, expected = run(compiled(sample, dtype, WHOLE), arrays), sample.reference(arrays)
    outputs = [name for name in graph_of(sample, dtype).outputs if not name.startswith("d_")]
    assert sorted(expected) == sorted(outputs), f"{sample.name}: the reference gives {sorted(expected)}, the graph {sorted(outputs)}"
    faults = [fault for name in outputs for fault in differences(f"{sample.name}: {name}", result.whole(name), expected[name], TOLERANCE[dtype])]
    for variable, output in sample.updates.items():
        faults += differences(f"{sample.name}: {variable} afterwards", result.whole(f"{variable}:="), expected[output], TOLERANCE[dtype])
    return faults


def against_differences(sample: Sample) -> list[str]:
    """Oracle 2: gradients equal central differences of the formula along random directions, in float64."""
    graph, arrays = graph_of(sample, "float64"), arrays_of(sample)
    if not graph.gradients:
        return []
    result, faults = run(compiled(sample, "float64", WHOLE), arrays), []

    def total(changed) -> float:
        outputs = sample.reference({**arrays, **changed})
        return sum(float(np.sum(np.asarray(outputs[n]) * arrays[f"cotangent_{n}"])) for n in outputs if f"cotangent_{n}" in arrays)

    for name in graph.gradients:
        x, gradient = arrays[name[2:]], result.whole(name)
        for i in range(2):
            v = rng_of(sample.name, name, i).standard_normal(x.shape)
            h = 1e-5
            slope = (total({name[2:]: x + h * v}) - total({name[2:]: x - h * v})) / (2 * h)
            found, scale = float(np.sum(gradient * v)), float(np.sum(np.abs(gradient * v)))
            if not abs(found - slope) <= DIFFERENCE_TOLERANCE * max(scale, abs(slope), 1e-3):
                faults.append(f"{sample.name}: {name} along direction {i} is {found!r}, by differences {slope!r}")
    return faults


def against_one_rank(sample: Sample, dtype: str, layout: Layout, change: Callable | None = None, tolerance: float | None = None,
                     least_scale: float = 0.0) -> list[str]:
    """Oracles 3 and 4: under a layout every rank has its slice of the 1-rank answer, and moves the bytes that the program states.

    ``change(program)`` plants a fault; numbers below ``least_scale`` count as cancelled.
    """
    program = compiled(sample, dtype, layout)
    result = run(change(program) if change else program, arrays_of(sample), poison=change is None)
    return compare(f"{sample.name} under {layout}", result, _one_rank(_Key(sample), dtype), tolerance or TOLERANCE[dtype], least_scale) + ledger(program, result)


@cache
def _one_rank(key: _Key, dtype: str) -> Run:
    return run(compiled(key.sample, dtype, WHOLE), arrays_of(key.sample))


def compare(what: str, result: Run, one: Run, tolerance: float, least_scale: float = 0.0) -> list[str]:
    """Compare every rank's slice with that of a run on one rank."""
    faults = []
    for name, ranks in result.arrays.items():
        whole = one.whole(name)
        for rank, (array, slices) in enumerate(ranks):
            faults += differences(f"{what}: {name} on rank {rank}", array, whole[slices], tolerance, scale=max(_scale(whole), least_scale))
    return faults


def ledger(program: mm.Program, result: Run) -> list[str]:
    """Oracle 4: what the buffers' sizes say equals what the program says, call by call."""
    stated = [(c.name, c.axes, c.payload_bytes) for c in program.collectives()]
    return [] if stated == result.seen else [f"{program.name}: the program states {stated} and the communicator saw {result.seen}"]


def against_no_reuse(sample: Sample, dtype: str, layout: Layout) -> list[str]:
    """Oracle 5: poisoned at every last use, the arena's run equals one in which every value has memory of its own, bit for bit."""
    shared = run(compiled(sample, dtype, layout), arrays_of(sample), poison=True)
    own = run(compiled(sample, dtype, layout, reuse_memory=False), arrays_of(sample), poison=False)
    return [f"{sample.name} under {layout}: {name} on rank {rank} differs between the arena and memory of its own"
            for name in shared.arrays for rank, ((a, _), (b, _)) in enumerate(zip(shared.arrays[name], own.arrays[name], strict=True))
            if a.tobytes() != b.tobytes()]


def _scale(array) -> float:
    array = np.asarray(array)
    finite = np.abs(array[np.isfinite(array)]) if array.dtype.kind == "f" else array[:0]
    return float(finite.max()) if finite.size else 0.0


def differences(what: str, found, expected, tolerance: float, scale: float | None = None) -> list[str]:
    """Compare two arrays: whole numbers and truth values exactly, others by max|a-b| / max|a|; infinities must stand at the same places."""
    found, expected = np.asarray(found), np.asarray(expected)
    if found.shape != expected.shape:
        return [f"{what}: shape {found.shape} instead of {expected.shape}"]
    if found.dtype.kind != "f":
        return [] if np.array_equal(found, expected) else [f"{what}: {found.tolist()} instead of {expected.tolist()}"]
    if not np.isfinite(expected).all() or not np.isfinite(found).all():
        same = (found == expected) | np.isfinite(found) & np.isfinite(expected)
        if not same.all():
            return [f"{what}: {found[~same].ravel()[:3]} instead of {expected[~same].ravel()[:3]}"]
        found, expected = found[np.isfinite(found)], expected[np.isfinite(expected)]
    worst = float(np.max(np.abs(found.astype(np.float64) - expected), initial=0.0))
    limit = tolerance * (_scale(expected) if scale is None else scale)
    return [] if worst <= limit else [f"{what}: off by {worst:.3g}, {limit:.3g} allowed"]


# -- layouts ---------------------------------------------------------------------------------


class Legal(NamedTuple):
    """The legal layouts of a sample to try, and how many there are and were looked at."""

    small: list[Layout]
    large: list[Layout]
    n_all: int
    n_illegal: int


@cache
def _legal(key: _Key) -> Legal:
    sample = key.sample
    names = list(graph_of(sample, "float64").dims)
    small, n_all = small_layouts(names)
    if n_all > MOST_LAYOUTS:
        random.Random(sample.name).shuffle(small)
    found, n_illegal = [*sample.layouts], 0
    for layout in small:
        if len(found) >= MOST_LAYOUTS:
            break
        if is_legal(sample, layout):
            found.append(layout)
        else:
            n_illegal += 1
    large = []
    for layout in large_layouts(names, sample.name)[:40]:
        if len(large) < LARGE_LAYOUTS and is_legal(sample, layout):
            large.append(layout)
    return Legal(found, large, n_all, n_illegal)


def legal_layouts(sample: Sample) -> Legal:
    """Return the layouts under which a sample compiles."""
    return _legal(_Key(sample))


def is_legal(sample: Sample, layout: Layout) -> bool:
    """Tell whether a sample compiles under a layout."""
    try:
        compiled(sample, "float64", layout)
    except LayoutError:
        return False
    return True

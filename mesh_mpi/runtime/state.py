"""State: the variables of one or more programs, on a machine.

Invariant: each variable exists once, whatever the number of programs; its bytes change only by a run that ended, by
``assign``, or by a run that failed, after which the state says so and refuses to be saved.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..compiler.listing import placed_text
from ..compiler.program import Bound, Program
from ..errors import GraphError, MeshError, ShapeError, nearest
from ..graph.variable import Accumulator, Variable
from .executor import Call, bind, execute
from .feeds import Feed, check_dtype, check_names
from .initial import initial_program
from .machine import choose_machine
from .memory import Memory, allocate
from .versions import kernels_digest, package_version


class Slice(NamedTuple):
    """What one rank holds of an array: ``array`` is a copy of ``whole[slices]``."""

    array: np.ndarray
    slices: tuple[slice, ...]


class Piece(NamedTuple):
    """A variable's memory on one rank of this process, no copy. ``is_owner``: the first of the ranks that hold these slices."""

    array: np.ndarray
    slices: tuple[slice, ...]
    is_owner: bool


class _Ready(NamedTuple):
    """A program bound to this state: its calls, its feeds, and each output's array on every rank of this process."""

    calls: tuple[Call, ...]
    feeds: dict[str, Feed]
    outputs: dict[str, list[np.ndarray]]


class State:
    """Variables and an arena for ``programs``, with initial values that depend on ``seed`` and names only.

    ``machine`` defaults to the one this process is part of (see :func:`mesh_mpi.runtime.machine.choose_machine`).
    ``extra_digest`` is compared between ranks too (the resolved configuration). ``poison=True`` overwrites memory at its last
    use, to find values that are read too late.

    Comm    compares digests between ranks once; initial values need none.
    Raises  MeshError, GraphError if programs do not share mesh or variables; LaunchError if ranks have different programs.
    """

    def __init__(self, programs: Program | Iterable[Program], seed: int = 0, machine=None, extra_digest: str = "", poison: bool = False):
        self.programs = [programs] if isinstance(programs, Program) else list(programs)
        self.mesh = _common_mesh(self.programs)
        self.variables: dict[str, Bound] = _common_variables(self.programs)
        if not 0 <= seed < 2**64:
            raise GraphError(f"state: seed {seed} is not within 0 and 2**64 - 1. Choose another.")
        self.seed = seed
        self.machine = choose_machine(self.mesh) if machine is None else machine
        if self.machine.mesh != self.mesh:
            raise MeshError(f"state: the programs are compiled for mesh {self.mesh} and the machine is {self.machine.mesh}. Compile them for that mesh.")
        initial = initial_program(self.mesh, self.variables)
        self.machine.check_same(self._fingerprint(extra_digest))
        self.arena_bytes = max(p.arena_bytes for p in self.programs)
        self.variable_bytes = sum(b.value.n_bytes for b in self.variables.values())
        self._poison, self._running, self._unrestored = poison, "", set()
        self.memories = [Memory(c, allocate(initial.arena_bytes), {name: allocate(b.value.n_bytes) for name, b in self.variables.items()})
                         for c in self.machine.coordinates]
        self._run(initial, self._bound(initial), {})
        for memory in self.memories:
            memory.arena = allocate(self.arena_bytes)
        self._ready = {id(program): self._bound(program) for program in self.programs}

    # -- sizes and places ------------------------------------------------------------------

    @property
    def peak_bytes(self) -> int:
        """Bytes of one rank: all variables and the arena of the largest program. Known before the first run; a run adds none."""
        return self.arena_bytes + self.variable_bytes

    def slices(self, variable: str | Variable) -> tuple[slice, ...]:
        """Return the global index ranges of a variable that this rank (simulated: rank 0) holds."""
        return self._variable(variable).slices(self.mesh, self.machine.coordinates[0])

    def pieces(self, variable: str | Variable) -> list[Piece]:
        """Return the memory of a variable on each rank of this process: one under MPI, all when simulated."""
        b = self._variable(variable)
        return [Piece(self._array(b, memory), b.slices(self.mesh, memory.coordinate), b.is_owner(self.mesh, memory.coordinate))
                for memory in self.memories]

    @property
    def saved_names(self) -> list[str]:
        """The names of the variables that a checkpoint holds: all but accumulators."""
        return [name for name, b in self.variables.items() if not isinstance(b.variable, Accumulator)]

    # -- running ---------------------------------------------------------------------------

    def run(self, program: Program, whole: Sequence[str] | str | bool = (), **feeds: Any) -> dict[str, Any]:
        """Run ``program`` once and return its outputs by name.

        A feed is the global array, a number, or ``callable(slices) -> array``, asked only for what this rank holds. Outputs
        without dimensions come back as NumPy scalars; those named in ``whole`` (True: all) as global arrays; others as
        :class:`Slice` of this rank (simulated: rank 0).

        Comm    the program's collectives, and one gather for each output in ``whole``: call it on every rank alike.
        Raises  GraphError, ShapeError, DtypeError for feeds, before any communication.
        """
        ready = self._ready.get(id(program))
        if ready is None:
            raise GraphError(f"run: {program!r} is not of this state, which has {', '.join(p.name for p in self.programs)}. "
                             "Give all programs when you make it: State([a, b]).")
        check_names(program, feeds)
        wanted = _wanted(program, whole)
        return self._run(program, ready, feeds, wanted)

    def _run(self, program: Program, ready: _Ready, feeds: dict[str, Any], whole: frozenset[str] = frozenset()) -> dict[str, Any]:
        if self._poison:
            for memory in self.memories:
                memory.arena.fill(0xFF)
        for name, feed in ready.feeds.items():
            feed.fill(np.uint64(self.seed) if name == "seed" else feeds[name])
        failed_before, self._running = self._running, program.name  # set during a run too: a signal handler must not save then
        try:
            execute(ready.calls)
        except BaseException:
            self._unrestored = set(self.saved_names)
            raise
        self._running = failed_before
        return {name: self._output(program.outputs[name], arrays, name in whole) for name, arrays in ready.outputs.items()}

    def _bound(self, program: Program) -> _Ready:
        feeds = {name: Feed(program, b, self.memories) for name, b in program.feeds.items()}
        outputs = {name: [m.view(program.plan, b.value) for m in self.memories] for name, b in program.outputs.items()}
        return _Ready(bind(program, self.machine, self.memories, self._poison), feeds, outputs)

    def _output(self, b: Bound, arrays: list[np.ndarray], whole: bool) -> Any:
        if not b.dims:
            return arrays[0][()]
        if whole:
            return self._whole(b, arrays)
        return Slice(arrays[0].copy(), b.slices(self.mesh, self.machine.coordinates[0]))

    # -- variables -------------------------------------------------------------------------

    @property
    def usable(self) -> bool:
        """False after a run that did not finish, until every variable has been assigned anew."""
        return not self._running

    def assert_complete(self) -> None:
        """Raise GraphError if a run did not finish: the variables then mix old and new values and must not be saved."""
        if self._running:
            raise GraphError(f"state: program {self._running!r} did not finish, so variables may hold old and new values side by side. "
                             "Load a checkpoint (every variable anew), or make a new State.")

    def read(self, variable: str | Variable) -> np.ndarray:
        """Return the whole global array of a variable, on every rank.

        Comm    one gather over the axes that split it: call it on every rank alike. Memory: twice the whole array.
        Raises  GraphError for an unknown variable, an accumulator of partial sums, or a state that is not complete.
        """
        self.assert_complete()
        b = self._variable(variable)
        if b.placement.partial:
            raise GraphError(f"read {b.name}: it holds partial sums over {'*'.join(b.placement.partial)}, not a value. Read what is computed from it.")
        return self._whole(b, [self._array(b, memory) for memory in self.memories])

    def assign(self, variable: str | Variable, given: Any) -> None:
        """Set a variable to a global array, or to what ``callable(slices)`` returns for each slice. No communication.

        Raises ShapeError or DtypeError. Once every variable has been assigned after a failed run, the state is usable again.
        """
        b = self._variable(variable)
        dtype = np.dtype(b.value.dtype)
        for piece in self.pieces(b.name):
            array = np.asarray(given(piece.slices) if callable(given) else given)
            shape = piece.array.shape if callable(given) else b.shape
            if array.shape != shape:
                raise ShapeError(f"assign {b.name}: an array of shape {list(array.shape)} was given for {list(shape)} of "
                                 f"{b.name}[{', '.join(map(repr, b.dims))}]. Give the global array.")
            check_dtype(f"assign {b.name}", array, dtype)
            np.copyto(piece.array, array if callable(given) else array[piece.slices], casting="unsafe")
        self._restored(b.name)

    def expect_all(self, names: Iterable[str], what: str) -> None:
        """From now on the state counts as not complete until each of ``names`` has been assigned: ``what`` ("load of ...") replaces them all."""
        self._unrestored = set(names) | (self._unrestored if self._running else set())
        self._running = what if self._unrestored else self._running

    def _restored(self, name: str) -> None:
        if self._running:
            self._unrestored.discard(name)
            if not self._unrestored:
                self._running = ""

    def _variable(self, variable: str | Variable) -> Bound:
        name = variable.full_name if isinstance(variable, Variable) else variable
        found = self.variables.get(name)
        if found is None:
            raise GraphError(f"state: there is no variable {name!r}.{nearest(name, self.variables)}")
        return found

    def _array(self, b: Bound, memory: Memory) -> np.ndarray:
        return np.ndarray(b.value.shape, b.value.dtype, memory.variables[b.name])

    def _whole(self, b: Bound, arrays: list[np.ndarray]) -> np.ndarray:
        axes = tuple(a for a in self.mesh.names if a in b.placement.split_axes)
        if not axes:
            return arrays[0].copy()
        rank = self.mesh.rank(self.machine.coordinates[0])
        group = next(g for g in self.mesh.groups(axes) if rank in g)
        result = np.empty(b.shape, b.value.dtype)
        for member, block in zip(group, self.machine.gather(axes, arrays)):
            result[b.slices(self.mesh, self.mesh.coordinate(member))] = block
        return result

    def _fingerprint(self, extra_digest: str) -> dict[str, str]:
        parts = {"version of mesh_mpi": package_version(), "versions of kernels": kernels_digest(), "configuration": extra_digest,
                 "seed": str(self.seed), "number of programs": str(len(self.programs))}
        for i, program in enumerate(self.programs):
            parts[f"program {i} ({program.name})"] = program.digest
        return parts


def _common_mesh(programs: list[Program]):
    if not programs:
        raise GraphError("state: no program is given. Write State([program]).")
    for program in programs:
        if not isinstance(program, Program):
            raise GraphError(f"state: {program!r} is not a program. Compile it first: mm.compile(...).")
        if program.mesh != programs[0].mesh:
            raise MeshError(f"state: program {programs[0].name!r} is compiled for mesh {programs[0].mesh} and {program.name!r} for {program.mesh}. "
                            "Compile all programs of a state for one mesh.")
    return programs[0].mesh


def _common_variables(programs: list[Program]) -> dict[str, Bound]:
    """Return all variables by name, or raise GraphError where two programs disagree about one."""
    found: dict[str, Bound] = {}
    owner: dict[str, Program] = {}
    for program in programs:
        for name, b in program.variables.items():
            first = found.setdefault(name, b)
            owner.setdefault(name, program)
            if _described(first) != _described(b):
                raise GraphError(f"state: variable {name!r} is {_described(first)} in program {owner[name].name!r} and {_described(b)} in "
                                 f"{program.name!r}. Compile both with the same dimensions, layout and storage"
                                 + (", and like=the first for its accumulators." if isinstance(b.variable, Accumulator) else "."))
    return found


def _described(b: Bound) -> str:
    return f"{b.name}{placed_text(b.dims, b.placement)} {b.value.dtype} {b.variable.init}" + (
        " (accumulator)" if isinstance(b.variable, Accumulator) else "")


def _wanted(program: Program, whole: Sequence[str] | str | bool) -> frozenset[str]:
    names = list(program.outputs) if whole is True else [whole] if isinstance(whole, str) else list(whole or ())
    for name in names:
        if name not in program.outputs:
            raise GraphError(f"run {program.name}: there is no output {name!r}.{nearest(name, program.outputs)}")
    return frozenset(names)

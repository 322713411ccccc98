"""The MPI machine: this process is one rank of a mesh.

Invariant: all communication is on a private duplicate of the world; ranks are numbered row-major over the mesh, the
last axis fastest, and never reordered.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

import numpy as np

from ..errors import LaunchError, MeshError
from ..keys import text_digest
from ..log import launcher_size
from ..mesh import Mesh
from . import abort, patience
from .collect import Collector
from .communicator import Communicator
from .library import start_mpi, vendor_text, what_to_do
from .simulated import mirrored
from .threads import fit_blas_threads
from .watchdog import Progress, start_watchdog


class World:
    """MPI as this process started it: the private communicator, the module, the vendor, the node, the threads."""

    def __init__(self):
        abort.install()
        self.mpi = start_mpi()
        world = self.mpi.COMM_WORLD
        self.vendor = vendor_text(self.mpi)
        _check_size(launcher_size(), world.Get_size(), self.vendor)
        abort.attach(self.mpi)  # first of all: a rank that failed before it came here makes the same duplicate
        self.comm = world.Dup()
        self.rank, self.size = self.comm.Get_rank(), self.comm.Get_size()
        node = self.comm.Split_type(self.mpi.COMM_TYPE_SHARED)
        masks = node.allgather(sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1)))
        self.n_ranks_on_node = node.Get_size()
        self.n_threads, self.threads_from = fit_blas_threads(masks, node.Get_rank())
        self.progress = Progress()
        self.meshes: dict[Mesh, MpiMachine] = {}
        self.watchdog = start_watchdog(self.progress, self.rank, self.size, lambda folder: self.comm.bcast(folder, 0))


_world: list[World] = []


def mpi_machine(mesh: Mesh) -> MpiMachine:
    """Return this process's machine for ``mesh``, made once.

    Comm    collective for a mesh that is new. Raises MeshError, LaunchError.
    """
    if not _world:
        _world.append(World())
    world = _world[0]
    if mesh.size != world.size:
        raise MeshError(f"mesh {mesh} needs {mesh.size} rank{'s' * (mesh.size > 1)} and {world.size} {'are' if world.size > 1 else 'is'} running. "
                        f"Start with -n {mesh.size}, or choose sizes whose product is {world.size}.")
    if mesh not in world.meshes:
        with world.progress.during(f"setting up mesh {mesh}"):
            _check_same(world.comm, {"mesh": repr(mesh)})
            world.meshes[mesh] = MpiMachine(mesh, world)
        abort.describe(f"{world.meshes[mesh].coordinates[0]}")
        if world.watchdog is not None:
            world.watchdog.mesh = mesh
    return world.meshes[mesh]


def any_machine() -> MpiMachine:
    """Return the first machine that was made, else one of a single axis ``rank``. Comm: collective the first time."""
    if not _world:
        _world.append(World())
    made = list(_world[0].meshes.values())
    return made[0] if made else mpi_machine(Mesh({"rank": _world[0].size} if _world[0].size > 1 else ""))


class MpiMachine:
    """One rank of ``mesh``; see :class:`mesh_mpi.runtime.simulated.SimulatedMachine` for what its methods promise."""

    is_simulated = False

    def __init__(self, mesh: Mesh, world: World):
        self.mesh, self.world = mesh, world
        self.rank, self.n_ranks, self.progress = world.rank, world.size, world.progress
        self.coordinates = [mesh.coordinate(world.rank)]
        self.recorder = None
        self.comm_s = 0.0
        self._cart = world.comm.Create_cart(mesh.shape, [False] * len(mesh.shape), reorder=False) if mesh.names else world.comm
        if self._cart.Get_rank() != world.rank:
            raise LaunchError(f"mesh {mesh}: the MPI library numbered rank {world.rank} as {self._cart.Get_rank()} although asked not to reorder. "
                              "Use another MPI library.")
        self._groups: dict[tuple[str, ...], Communicator] = {}
        self._collector: Collector | None = None

    def __repr__(self):
        return f"mesh {self.mesh}, rank {self.rank}"

    def group(self, axes: Sequence[str]) -> Communicator:
        """Return the communicator of this rank's group along a set of axes. Comm: collective the first time for a set."""
        axes = tuple(a for a in self.mesh.names if a in axes)
        if axes not in self._groups:
            with self.progress.during(f"making the communicator over {'*'.join(axes)}"):
                comm = self._cart.Sub([name in axes for name in self.mesh.names]) if axes != self.mesh.names else self._cart
            self._groups[axes] = Communicator(comm, axes, self, self.world.mpi)
        return self._groups[axes]

    def bind(self, kind: str, axes: tuple[str, ...], outs: Sequence[np.ndarray], ins: Sequence[np.ndarray],
             reduce: str = "", label: str = "") -> Callable[[], None]:
        """Return a call that runs one collective on this rank."""
        partner = -1
        if kind == "swap":
            members = next(g for g in self.mesh.groups(axes) if self.rank in g)
            partner = members.index(mirrored(self.mesh, axes, self.coordinates[0]))
        return self.group(axes).bind(kind, outs[0], ins[0], reduce, label, partner)

    def gather(self, axes: tuple[str, ...], arrays: Sequence[np.ndarray]) -> np.ndarray:
        """Return [ranks in this rank's group along ``axes``, ...]: their arrays, in order."""
        source = np.ascontiguousarray(arrays[0])
        group = self.group(axes)
        out = np.empty((group.size, *source.shape), source.dtype)
        if group.size == 1:
            out[0] = source
        else:
            group.bind("allgather", out.reshape(-1), source.reshape(-1), label=f"gather over {'*'.join(axes)}", recorded="gather")()
        return out

    def collect(self, sources: Sequence[np.ndarray | None], targets: Sequence[np.ndarray | None], label: str = "") -> None:
        """Bring this rank's array to rank 0, whose targets take every rank's."""
        start = time.perf_counter()
        with self.progress.during(label or "collecting arrays on rank 0"):
            if self._collector is None:
                self._collector = Collector(self._cart)
            passed = self._collector.collect(sources[0], targets)
        if self.recorder is not None:
            self.recorder.record("collect", (), passed)
        self.comm_s += time.perf_counter() - start

    def check_same(self, parts: dict[str, str]) -> None:
        """Raise the same LaunchError on every rank if any part differs between ranks, naming it and them."""
        with self.progress.during("comparison of programs between ranks"):
            _check_same(self._cart, parts)

    def maxima(self, values: Sequence[float]) -> list[float]:
        """Return the largest of each value over all ranks."""
        largest = np.array(values, np.float64)
        with self.progress.during("maxima over all ranks"):
            self._cart.Allreduce(self.world.mpi.IN_PLACE, largest, self.world.mpi.MAX)
        return largest.tolist()

    def broadcast(self, value):
        """Return rank 0's value on every rank: a verdict, a name; anything that pickles."""
        with self.progress.during("broadcast from rank 0"):
            patience.wait(self._cart.Ibcast(np.zeros(1, np.uint8), 0))
            return self._cart.bcast(value, 0)

    def gather_objects(self, value) -> list:
        """Return every rank's value, in order of rank, on every rank."""
        with self.progress.during("gathering a value of each rank"):
            patience.wait(self._cart.Ibarrier())
            return self._cart.allgather(value)


def _check_size(meant: int | None, found: int, vendor: str) -> None:
    if meant is None or meant == found:
        return
    alone = "every process is rank 0 of 1: launcher and MPI library are of different kinds, and the ranks do not see one another" if found == 1 \
        else "launcher and MPI library disagree"
    raise LaunchError(f"launch: the launcher meant {meant} ranks and the MPI library ({vendor}) has {found}; {alone}. {what_to_do(meant)}")


def _check_same(comm, parts: dict[str, str]) -> None:
    """Compare one digest over all parts by MIN and MAX; only if it differs, look which part and where."""
    from mpi4py import MPI

    digest = np.frombuffer(bytes.fromhex(text_digest(*(f"{k}={v}" for k, v in parts.items()))), np.uint64)
    both = np.concatenate([digest, ~digest])  # max(~x) is ~min(x)
    comm.Allreduce(MPI.IN_PLACE, both, MPI.MAX)
    if np.array_equal(both[:digest.size], ~both[digest.size:]):
        return
    every = comm.allgather(parts)
    faults = []
    for label in dict.fromkeys(label for one in every for label in one):
        values: dict[str, list[int]] = {}
        for rank, one in enumerate(every):
            values.setdefault(one.get(label, "nothing"), []).append(rank)
        if len(values) > 1:
            faults.append(f"{label} is " + ", ".join(f"{value[:32]!r} on {ranks_text(ranks)}" for value, ranks in values.items()))
    raise LaunchError(f"start: the ranks do not agree: {'; '.join(faults)}. "
                      "Run the same code, configuration and installation on every rank, with nothing in a model that depends on the rank.")


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ``rank 3`` or ``ranks 0-2, 5``."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in spans)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"

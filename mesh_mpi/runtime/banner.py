"""The lines that a run prints first: what runs where, with what.

Invariant: everything in it was measured or asked for in this process; nothing is assumed.
"""

from __future__ import annotations

import platform
from importlib import metadata

import numpy as np

from ..compiler.listing import bytes_text
from .threads import threads_text
from .versions import kernels_digest, package_version


def place(state) -> str:
    """Return the mesh of a State, and where its ranks are. No communication."""
    machine = state.machine
    if machine.is_simulated:
        where = f"simulated, {machine.n_ranks} ranks in one process" if machine.n_ranks > 1 else "one process, no MPI"
        where += f"; {threads_text()}"
    else:
        world = machine.world
        where = (f"{machine.n_ranks} ranks, {world.n_ranks_on_node} on this node; {world.vendor}; "
                 f"BLAS threads of a rank {world.n_threads} ({world.threads_from})")
    return f"mesh {state.mesh}: {where}"


def banner(state) -> str:
    """Return the banner of a State: mesh, ranks, MPI, threads, memory of a rank, digests, versions. No communication."""
    machine = state.machine
    lines = [place(state),
             f"memory of a rank: variables {bytes_text(state.variable_bytes)} + arena {bytes_text(state.arena_bytes)} = {bytes_text(state.peak_bytes)}"]
    lines += [f"program {p.name}: {len(p.instructions)} instructions, {len(p.collectives())} collectives, digest {p.digest[:16]}" for p in state.programs]
    lines += [f"warning: {text}" for text in dict.fromkeys(w for p in state.programs for w in p.warnings)]
    lines.append(f"mesh_mpi {package_version()}, kernels {kernels_digest()[:8]}, Python {platform.python_version()}, NumPy {np.__version__}"
                 + _version_of("mpi4py", not machine.is_simulated))
    return "\n".join(lines)


def _version_of(package: str, used: bool) -> str:
    if not used:
        return ""
    try:
        return f", {package} {metadata.version(package)}"
    except metadata.PackageNotFoundError:
        return ""

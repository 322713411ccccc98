"""Which machine this process is part of: one MPI rank if a launcher started it, else all ranks, simulated.

Invariant: the choice depends on the launcher's per-process variables only; a Slurm allocation alone decides nothing.

A machine has ``mesh``, ``coordinates`` (of the ranks in this process), ``rank``, ``n_ranks``, ``is_simulated``, ``recorder``,
``comm_s``, and ``bind``, ``gather``, ``collect``, ``check_same``, ``maxima``, ``broadcast``, ``gather_objects``; see simulated.py for their contracts.
"""

from __future__ import annotations

from ..log import launcher_rank
from ..mesh import Mesh
from .simulated import SimulatedMachine


def choose_machine(mesh: Mesh):
    """Return the machine for ``mesh``, made once for each mesh under MPI.

    Comm    under a launcher, the first call starts MPI and every call for a new mesh is collective.
    Raises  MeshError if the number of ranks differs from the mesh's; LaunchError if launcher and MPI library do not fit.
    """
    if launcher_rank() is None:
        return SimulatedMachine(mesh)
    from .mpi import mpi_machine

    return mpi_machine(mesh)


def any_machine():
    """Return a machine for what ranks agree on whatever their mesh (files, folders): the first that was made, or a new one.

    Comm    under a launcher, the first call starts MPI. Raises LaunchError if launcher and MPI library do not fit.
    """
    if launcher_rank() is None:
        return SimulatedMachine(Mesh())
    from .mpi import any_machine as any_mpi_machine

    return any_mpi_machine()

"""The MPI library: loaded and started here, once, or refused with words where it would only abort or leave every rank alone.

Invariant: MPI is never started under a launcher that is known not to fit it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from ..errors import LaunchError


def start_mpi():
    """Return mpi4py's module, MPI started. Raises LaunchError, alike on every rank, if no library loads or it cannot fit the launcher."""
    os.environ.setdefault("MPI4PY_CHECK_MPIEXEC", "0")  # its warning is less than what is said here
    try:
        import mpi4py

        before = mpi4py.rc.initialize
        mpi4py.rc(initialize=False, finalize=True)  # the vendor is known before the start, which may abort the process
        from mpi4py import MPI

        mpi4py.rc(initialize=before)
    except (ImportError, RuntimeError) as error:
        raise LaunchError(f"launch: a launcher started this process, but no MPI library loads: {error}. "
                          "Install one (pip install 'mesh-mpi[mpi]'), load your site's MPI module, or start without the launcher.") from None
    if not MPI.Is_initialized():
        refuse_foreign_launcher(MPI.get_vendor()[0], vendor_text(MPI))
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    return MPI


def vendor_text(mpi) -> str:
    """Return ``MPICH 5.0.2``."""
    name, version = mpi.get_vendor()
    return f"{name} {'.'.join(map(str, version))}"


def refuse_foreign_launcher(vendor: str, library: str, environment: Mapping[str, str] = os.environ) -> None:
    """Raise LaunchError if Open MPI's mpiexec started this process and the library is of another family, which aborts in its start."""
    if environment.get("OMPI_COMM_WORLD_RANK", "").isdigit() and vendor != "Open MPI":
        n = environment.get("OMPI_COMM_WORLD_SIZE", "?")
        raise LaunchError(f"launch: Open MPI's mpiexec meant {n} ranks and the MPI library is {library}; launcher and MPI library are of different "
                          f"kinds, and the ranks could not see one another. {what_to_do(n)}")


def what_to_do(n) -> str:
    """Return the advice for a launcher and a library that do not fit."""
    return (f"Start with the mpiexec of that library (mesh-mpi launch -n {n} -- ... finds it), with srun --mpi= what it was "
            "built for, or name the launcher's library in MPI4PY_MPIABI and MPI4PY_LIBMPI.")

"""What must be the same on every rank besides the programs: the package and its kernels.

Invariant: nothing here differs between two processes that run the same installed files.
"""

from __future__ import annotations

import sys

from ..kernels import contract
from ..keys import text_digest


def package_version() -> str:
    """Return the version of mesh_mpi."""
    return sys.modules[__name__.split(".")[0]].__version__


def kernels_digest() -> str:
    """Return a digest over the versions of all kernel contracts."""
    return text_digest(*(f"{name} {k.version}" for name, k in sorted(contract.KERNELS.items())))

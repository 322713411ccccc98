"""Lines for people, on stderr, from one rank only; and what a launcher's environment says about this process.

Invariant: nothing here imports or asks MPI, so that every command may print before MPI starts.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

_RANK_VARIABLES = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "PALS_RANKID")
_SIZE_VARIABLES = ("MESH_MPI_WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")


def launcher_rank(environment: Mapping[str, str] = os.environ) -> int | None:
    """Return this process's rank by its launcher's variables, or None if no launcher started it.

    Slurm's variables count only inside a step that is not the batch script's or an allocation's shell.
    """
    for name in _RANK_VARIABLES:
        if environment.get(name, "").isdigit():
            return int(environment[name])
    step = environment.get("SLURM_STEP_ID", "")
    if step.isdigit() and int(step) < 2**31 and environment.get("SLURM_PROCID", "").isdigit():
        return int(environment["SLURM_PROCID"])
    return None


def launcher_size(environment: Mapping[str, str] = os.environ) -> int | None:
    """Return the number of ranks that the launcher meant to start, or None if no launcher started this process."""
    if launcher_rank(environment) is None:
        return None
    for name in (*_SIZE_VARIABLES, "SLURM_STEP_NUM_TASKS"):
        if environment.get(name, "").isdigit():
            return int(environment[name])
    return None


def is_speaker() -> bool:
    """Return whether this process speaks for all: rank 0 by the launcher's variable, or no rank at all."""
    return launcher_rank() in (None, 0)


def say(text: str) -> None:
    """Print a line on stderr, on the speaking rank only."""
    if is_speaker():
        print(text, file=sys.stderr, flush=True)

"""What one rank finds out about the world outside (files, disks), all ranks know, and fail alike.

Invariant: a MeshMpiError or an OSError of ``action`` is raised with the same class and text on every rank, after the last one has
finished its part; any other exception is a fault of the code and ends the job.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import MeshMpiError


def on_rank_0(machine, operation: str, action: Callable[[], Any]) -> Any:
    """Run ``action`` on rank 0 alone and return its value (anything that pickles) on every rank.

    Comm    one broadcast. Raises what ``action`` raised, alike on every rank; an OSError as MeshMpiError "``operation``: ...".
    """
    value, fault = _attempt(operation, action) if machine.rank == 0 else (None, None)
    value, fault = machine.broadcast((value, fault))
    if fault is not None:
        raise fault
    return value


def on_every_rank(machine, operation: str, action: Callable[[], Any]) -> Any:
    """Run ``action`` on every rank and return its own value on each.

    Comm    one gather of verdicts. Raises on every rank what the first rank that failed raised.
    """
    value, fault = _attempt(operation, action)
    first = next((f for f in machine.gather_objects(fault) if f is not None), None)
    if first is not None:
        raise first
    return value


def _attempt(operation: str, action: Callable[[], Any]) -> tuple[Any, MeshMpiError | None]:
    try:
        return action(), None
    except MeshMpiError as error:
        return None, type(error)(str(error))  # without its frames, which do not travel
    except OSError as error:
        return None, MeshMpiError(f"{operation}: {error}. See to it that every rank may read and write there.")

"""What this package raises, and how a message is put together.

Invariant: every error that a user can cause is a ``MeshMpiError`` whose text reads
*operation: what was found, with every number, in the notation of the documentation. What to do.*
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class MeshMpiError(Exception):
    """Base of every error of this package; its text is complete without a traceback."""


class DimensionError(MeshMpiError):
    """A dimension is missing, doubled, or has another size than it should."""


class ShapeError(MeshMpiError):
    """Shapes do not fit one another."""


class DtypeError(MeshMpiError):
    """Element types do not fit one another."""


class MeshError(MeshMpiError):
    """The mesh is malformed or does not fit the number of ranks."""


class LayoutError(MeshMpiError):
    """A rule of a layout is unknown, doubled, contradictory or does not divide."""


class GraphError(MeshMpiError):
    """The graph is used in a way that has no meaning (a missing feed, two owners of a name)."""


class ConfigError(MeshMpiError):
    """A configuration file or an override is wrong."""


class DataError(MeshMpiError):
    """A text or a token file is missing, damaged, or does not fit the model."""


class LaunchError(MeshMpiError):
    """The launcher, the MPI library and the job do not fit one another."""


class CheckpointError(MeshMpiError):
    """A checkpoint cannot be written or read, is damaged, or does not fit the model."""


class RegistryError(MeshMpiError):
    """An operation was registered incompletely."""


def nearest(word: str, known: Iterable[str], before: str = "") -> str:
    """Return ``" Did you mean 'x'?"`` for the closest known word, with ``before`` in front of it; else the list of known words."""
    known = list(known)
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    if close:
        return f" Did you mean {before + close[0]!r}?"
    return f" Known: {', '.join(known)}." if known else ""

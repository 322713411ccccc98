"""Context of graph building: the path of names and the class of rules.

Invariant: both are context variables, so threads and notebooks do not disturb one another, and
there is no global graph.
"""

from __future__ import annotations

import contextlib
import contextvars
import itertools

_path: contextvars.ContextVar[tuple[str, ...]] = contextvars.ContextVar("mesh_mpi_scope", default=())
_rules: contextvars.ContextVar[str] = contextvars.ContextVar("mesh_mpi_rules", default="compute")
_counter = itertools.count()


@contextlib.contextmanager
def scope(name: str):
    """Prefix the names of variables, masks and operations made inside with ``name/``."""
    token = _path.set((*_path.get(), name))
    try:
        yield
    finally:
        _path.reset(token)


@contextlib.contextmanager
def inside(path: str):
    """Name what is made inside by the full path ``path`` alone, whatever scopes enclose it: a layer names its parts so wherever it is called."""
    token = _path.set(tuple(path.split("/")) if path else ())
    try:
        yield
    finally:
        _path.reset(token)


@contextlib.contextmanager
def rules_of(storage_class: str):
    """Place the operations made inside by the rules of a storage class (``"optimizer"``) instead of the layout's alone."""
    token = _rules.set(storage_class)
    try:
        yield
    finally:
        _rules.reset(token)


def scoped(name: str) -> str:
    """Return ``name`` with the path of the enclosing scopes before it."""
    return "/".join((*_path.get(), name))


def current_rules() -> str:
    """Return the class of rules that places operations made now: ``compute`` or a storage class."""
    return _rules.get()


def creation_number() -> int:
    """Return a growing number; it breaks every tie of ordering and nothing else."""
    return next(_counter)

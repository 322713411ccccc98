"""All samples."""

from __future__ import annotations

import importlib

from oracles.harness import Sample, graph_of

from mesh_mpi.graph.operation import REGISTRY
from mesh_mpi.graph.variable import SOURCES

FAMILIES = ("pointwise", "linear", "movement", "rows", "attention", "state")
SAMPLES: list[Sample] = [sample for family in FAMILIES for sample in importlib.import_module(f"oracles.samples_{family}").SAMPLES]
TRIED: dict[str, tuple[int, int, int, int]] = {}  # filled by the layout tests: small, large, illegal, all


def sample_called(name: str) -> Sample:
    """Return a new copy of a sample, so that nothing that was built before is used again."""
    return next(sample for sample in SAMPLES if sample.name == name)._replace()


def kinds_without_samples() -> list[str]:
    """Return the registered operations that no sample uses, forwards or in its gradient."""
    covered = {kind for sample in SAMPLES for kind in graph_of(sample, "float64").kinds}
    return sorted(kind for kind, definition in REGISTRY.items() if definition not in SOURCES and kind not in covered)


def named(sample: Sample) -> str:
    """Return a sample's name, for the names of tests."""
    return sample.name

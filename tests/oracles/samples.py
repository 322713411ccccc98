"""All samples."""

from __future__ import annotations

import importlib

from oracles.harness import Sample

FAMILIES = ("pointwise", "linear", "movement", "rows", "attention", "state")
SAMPLES: list[Sample] = [sample for family in FAMILIES for sample in importlib.import_module(f"oracles.samples_{family}").SAMPLES]
TRIED: dict[str, tuple[int, int, int, int]] = {}  # filled by the layout tests: small, large, illegal, all


def named(sample: Sample) -> str:
    """Return a sample's name, for the names of tests."""
    return sample.name

"""Every layout of a set of dimensions over the small meshes, and a fixed-seed sample over those of eight ranks."""

from __future__ import annotations

import itertools
import random
from typing import NamedTuple

SMALL_MESHES = ("all:2", "all:3", "all:4", "p:2;q:2")
LARGE_MESHES = ("all:8", "p:2;q:4", "p:2;q:2;r:2")
MOST_LAYOUTS = 60   # of one sample on the small meshes; more are sampled by a fixed seed
LARGE_LAYOUTS = 3   # of one sample on the meshes of eight ranks


class Layout(NamedTuple):
    """A mesh and rules, as ``compile`` takes them."""

    mesh_shape: str
    layout: str


def assignments(names: list[str], mesh_shape: str) -> list[Layout]:
    """Return every assignment of each dimension to no axis or one of the mesh's, the empty one left out."""
    axes = [part.split(":")[0] for part in mesh_shape.split(";")]
    found = []
    for choice in itertools.product(["", *axes], repeat=len(names)):
        rules = ";".join(f"{name}:{axis}" for name, axis in zip(names, choice) if axis)
        if rules:
            found.append(Layout(mesh_shape, rules))
    return found


def small_layouts(names: list[str]) -> tuple[list[Layout], int]:
    """Return the layouts to try on 2, 3 and 4 ranks, and how many there are in all."""
    found = [layout for mesh in SMALL_MESHES for layout in assignments(names, mesh)]
    return found, len(found)


def large_layouts(names: list[str], seed: str) -> list[Layout]:
    """Return every assignment on eight ranks, in an order that depends on ``seed`` only."""
    found = [layout for mesh in LARGE_MESHES for layout in assignments(names, mesh)]
    random.Random(seed).shuffle(found)
    return found

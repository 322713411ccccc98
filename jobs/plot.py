"""Draw loss and throughput of runs against their steps.

    mesh-mpi plot runs/quickstart                                   runs/quickstart/curves.png
    mesh-mpi plot runs/a runs/b --output comparison.svg             several runs over one another

Reads metrics.jsonl alone, also of a run that is going on. Faint: every step; strong: smoothed over a fiftieth of the run; points: held-out
loss. Needs matplotlib: pip install 'mesh-mpi[plot]'.
"""

from __future__ import annotations

import argparse
from pathlib import Path


ONE_PROCESS = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``mesh-mpi plot``."""
    parser.add_argument("runs", nargs="+", metavar="RUN", help="the folder of a run, or its metrics.jsonl")
    parser.add_argument("--output", metavar="FILE", help="a .png, .svg or .pdf (default: curves.png in the first run's folder)")


def run(arguments: argparse.Namespace) -> int:
    """Draw, and print the picture's path."""
    from mesh_mpi.training.curves import draw, read_curves

    curves = [read_curves(name) for name in arguments.runs]
    first = Path(arguments.runs[0])
    output = arguments.output or (first if first.is_dir() else first.parent) / "curves.png"
    draw(curves, output)
    print(output)
    return 0

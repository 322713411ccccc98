"""Show what stands in a checkpoint or a file of tokens: shapes, dimension names, element types, bytes.

    mesh-mpi inspect runs/a                                     the run's latest checkpoint
    mesh-mpi inspect runs/a/checkpoints/step_00001000 --stats   and the numbers in it
    mesh-mpi inspect runs/a --verify                            read all of it, compare checksums
    mesh-mpi inspect --diff runs/a runs/b                       exit code 1 if anything differs
    mesh-mpi inspect runs/a --config                            the configuration it was saved with

Needs no MPI. Arrays are read in blocks, whatever their size.
"""

from __future__ import annotations

import argparse
import time

from mesh_mpi.errors import CheckpointError


ONE_PROCESS = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``mesh-mpi inspect``."""
    parser.add_argument("paths", nargs="+", metavar="PATH", help="a checkpoint's folder, a run's folder (its latest), or an HDF5 file")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--stats", action="store_true", help="minimum, maximum, mean, rms, share of zeros, elements that are not finite")
    what.add_argument("--diff", action="store_true", help="compare two PATHs: arrays, shapes, largest differences")
    what.add_argument("--verify", action="store_true", help="read every array and compare its checksum")
    what.add_argument("--config", action="store_true", help="print the configuration that the checkpoint was saved with")


def run(arguments: argparse.Namespace) -> int:
    """Print what was asked for; return 1 if a comparison found differences."""
    n = 2 if arguments.diff else 1
    if len(arguments.paths) != n:
        raise CheckpointError(f"inspect: {len(arguments.paths)} paths were given. Give {'two, with --diff' if n == 2 else 'one, or two with --diff'}.")
    if arguments.diff:
        return difference(*arguments.paths)
    path = arguments.paths[0]
    if arguments.config:
        from mesh_mpi.checkpoint import read_configuration

        print(read_configuration(path), end="")
    elif arguments.verify:
        whole(path)
    elif arguments.stats:
        figures(path)
    else:
        tree(path)
    return 0


def tree(path) -> None:
    """Print the head and the tree of a file."""
    from mesh_mpi.checkpoint import describe

    found = describe(path)
    print(head(found))
    rows, parents = [], ()
    for dataset in found.datasets:
        *groups, last = dataset.path.split("/")
        shared = next((i for i, (a, b) in enumerate(zip(groups, parents)) if a != b), min(len(groups), len(parents)))
        rows += [("  " * i + groups[i] + "/",) for i in range(shared, len(groups))]
        parents = tuple(groups)
        rows.append(("  " * len(groups) + last, str(dataset), dataset.dtype, f"{dataset.n_bytes:,} bytes", dataset.attributes.get("initializer", "")))
    print(table(rows, right=(3,)))


def figures(path) -> None:
    """Print statistics of every array, as they are computed."""
    from mesh_mpi.checkpoint import describe, statistics

    found = describe(path)
    print(head(found))
    width = max((len(d.path) for d in found.datasets), default=0)
    print(f"{'':{width}}  {'min':>11} {'max':>11} {'mean':>11} {'rms':>11} {'zeros':>7} not finite")
    for s in statistics(path):
        print(f"{s.dataset.path:{width}}  {s.minimum:>11.4g} {s.maximum:>11.4g} {s.mean:>11.4g} {s.rms:>11.4g} {s.zeros:>7.1%} {s.not_finite:>10,}", flush=True)


def whole(path) -> None:
    """Verify a checkpoint and say so."""
    from mesh_mpi.checkpoint import verify

    start = time.perf_counter()
    found = verify(path)
    if not found.is_checkpoint:
        raise CheckpointError(f"inspect {path}: files of tokens hold no checksums. Give a checkpoint.")
    n_bytes = sum(d.n_bytes for d in found.datasets)
    print(f"{found.path}: whole; {len(found.datasets)} arrays, {n_bytes:,} bytes, all checksums agree ({time.perf_counter() - start:.1f} s)")


def difference(a, b) -> int:
    """Print in what two files differ; return 1 if in anything."""
    from mesh_mpi.checkpoint import compare

    found = compare(a, b)
    print(f"a: {head(found.a)}\nb: {head(found.b)}")
    rows = [("only in a", f"{d.path}{d}") for d in found.only_in_a] + [("only in b", f"{d.path}{d}") for d in found.only_in_b]
    rows += [("shape", f"{x.path}: {x} in a, {y} in b") for x, y in found.other_shapes]
    rows += [("values", f"{d.dataset.path}{d.dataset}: {d.n_different:,} of {d.dataset.size:,} differ, by at most {d.absolute:.3g} "
              f"(relative {d.relative:.3g})") for d in found.differences if d.n_different]
    n_same = sum(not d.n_different for d in found.differences)
    rows.append(("same", f"{n_same} arrays"))
    print(table(rows))
    if n_same < len(found.differences):
        largest = max(found.differences, key=lambda d: d.absolute)
        print(f"{len(found.differences) - n_same} of {len(found.differences)} arrays differ; the largest difference is {largest.absolute:.3g}, in {largest.dataset.path}")
    return 0 if found.same else 1


def head(found) -> str:
    """Return a file's first line: what it is, its counters or attributes."""
    n_bytes = sum(d.n_bytes for d in found.datasets)
    said = found.values if found.is_checkpoint else {k: v for k, v in found.attributes.items() if k not in ("format", "format_version")}
    text = ", ".join(f"{k} {v:,}" if isinstance(v, int) else f"{k} {v}" for k, v in said.items())
    size = f"{len(found.datasets)} arrays, {n_bytes:,} bytes"
    if found.is_checkpoint:
        size += f", {sum(d.size for d in found.datasets if d.group == 'parameters'):,} parameters"
    return f"{found.path}: {found.attributes['format']}, version {found.attributes['format_version']}; {text}; {size}"


def table(rows, right=()) -> str:
    """Return rows as aligned text; the columns ``right`` end flush."""
    widths = [max((len(row[i]) for row in rows if i < len(row)), default=0) for i in range(max(map(len, rows), default=0))]
    return "\n".join("  ".join(cell.rjust(w) if i in right else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths))).rstrip() for row in rows)

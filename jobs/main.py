"""``mesh-mpi COMMAND ...``: the console entry; also ``python -m mesh_mpi.jobs.main``.

Invariant: help costs no import beyond the standard library, this package's errors and the one command's own file;
an error of the user's ends with its message on rank 0, exit code 2, and no traceback.

A command is a module of this folder with ``add_arguments(parser)`` and ``run(arguments) -> int``. One with ``ONE_PROCESS = True`` has no
work for ranks: under a launcher the first does it, and the others end.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import sys
from collections.abc import Sequence

from mesh_mpi.errors import MeshMpiError, nearest
from mesh_mpi.jobs import COMMANDS
from mesh_mpi.log import is_speaker, launcher_rank, say


_NO_OUTPUT = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EIO)


class _Parser(argparse.ArgumentParser):
    """An argument parser whose complaints come from one rank only."""

    def error(self, message: str):
        if is_speaker():
            super().error(message)
        sys.exit(2)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code (2 for an error of the user's, 130 after an interrupt)."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help", "--version"):
        return _overview(words)
    name = words[0]
    if name not in COMMANDS:
        say(f"mesh-mpi: there is no command {name!r}.{nearest(name, COMMANDS)} See mesh-mpi --help.")
        return 2
    command = importlib.import_module(f"mesh_mpi.jobs.{name.replace('-', '_')}")
    parser = _Parser(prog=f"mesh-mpi {name}", description=command.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    command.add_arguments(parser)
    # launch keeps all that follows its first word; elsewhere options and key=value may stand in any order
    parsed = (parser.parse_args if name == "launch" else parser.parse_intermixed_args)(words[1:])
    alone = getattr(command, "ONE_PROCESS", False)
    if alone and not is_speaker():
        return 0
    code = _run(name, command, parsed, alone)
    if alone and launcher_rank() is not None and arguments is None:
        sys.stdout.flush()
        os._exit(code)  # the other ranks ended with 0, and leaving in the common way would wait for them
    return code


def _run(name: str, command, parsed: argparse.Namespace, alone: bool) -> int:
    """Run a command; return its exit code, whatever a user may do to it."""
    try:
        code = command.run(parsed)
        sys.stdout.flush()
        return code
    except MeshMpiError as error:
        if alone:
            say(f"{type(error).__name__}: {error}")
            return 2
        from mesh_mpi.runtime.abort import report  # it knows whether MPI has started, and agrees with the other ranks if so

        return report(error)
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        if error.filename is not None or error.errno not in _NO_OUTPUT or launcher_rank() is not None and not alone:
            raise
        return _unprinted(name, error)


def _unprinted(name: str, error: OSError) -> int:
    """Say that the output has no reader, or no room; in silence where a reader such as ``head`` had enough."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what Python still holds back goes there
    if not isinstance(error, BrokenPipeError):
        say(f"{name}: the output cannot be written: {error.strerror or error}. See where it goes.")
    return 141 if isinstance(error, BrokenPipeError) else 2


def _overview(words: list[str]) -> int:
    if words == ["--version"]:
        from importlib.metadata import PackageNotFoundError, version
        try:
            print(f"mesh-mpi {version('mesh-mpi')}")
        except PackageNotFoundError:
            print("mesh-mpi, not installed")
        return 0
    print("usage: mesh-mpi COMMAND ...\n       mesh-mpi --version\n\ncommands (mesh-mpi COMMAND --help says more):")
    for name, text in COMMANDS.items():
        print(f"  {name:<10} {text}")
    return 0 if words else 2


if __name__ == "__main__":
    sys.exit(main())

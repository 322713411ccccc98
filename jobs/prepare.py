"""Turn texts into a file of tokens for training.

    mesh-mpi prepare books/*.txt more.txt.gz train.h5 --length 256
    mesh-mpi prepare corpus.txt train.h5 --length 256 --valid-fraction 0.05 --valid-output valid.h5
    mesh-mpi prepare bundled:sotu sotu.h5 --length 128          the text that comes with the package

A text is UTF-8, plain or gzip, a sentence or paragraph a line, with a blank line between documents. The tokens of a document are its bytes and
an end; documents follow one another from row to row, and a token sees its own document's part of the row only. Of any number of texts of any
size, only a little is in memory at a time. The output is HDF5 and appears when it is whole.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``mesh-mpi prepare``."""
    parser.add_argument("paths", nargs="+", metavar="INPUT... OUTPUT.h5", help="texts, plain or gzip, or bundled:sotu; the last path is the output")
    parser.add_argument("--length", type=int, required=True, metavar="L", help="tokens in a row: the model's length")
    parser.add_argument("--vocabulary", default="bytes", metavar="NAME", help="how texts become tokens (default and, so far, only: bytes, 258 symbols)")
    parser.add_argument("--valid-fraction", default="0", metavar="F", help="hold out this fraction of the documents, spread evenly")
    parser.add_argument("--valid-output", metavar="V.h5", help="where the documents held out are written")
    parser.add_argument("--any-bytes", action="store_true", help="take inputs that are no text as well (binary, other encodings)")
    parser.add_argument("--force", action="store_true", help="replace outputs that exist")


def run(arguments: argparse.Namespace) -> int:
    """Prepare, and print what was written."""
    from mesh_mpi.errors import DataError
    from mesh_mpi.log import launcher_size

    *inputs, output = arguments.paths
    if not inputs:
        raise DataError(f"prepare: one path was given, {output}. Give at least one text and then the output: prepare TEXT OUTPUT.h5 --length L.")
    for path in filter(None, (output, arguments.valid_output)):
        if Path(path).suffix not in (".h5", ".hdf5"):
            raise DataError(f"prepare: the output {path} does not end in .h5. The output stands last: prepare TEXT... OUTPUT.h5 --length L.")
    if (launcher_size() or 1) > 1:
        raise DataError(f"prepare: {launcher_size()} ranks would write the same file. Start it without a launcher.")
    from mesh_mpi.data.prepare import prepare

    progress = Progress()
    try:
        done = prepare(inputs, output, arguments.length, arguments.vocabulary, arguments.valid_fraction, arguments.valid_output,
                       arguments.force, arguments.any_bytes, progress)
    finally:
        progress.clear()
    for path, statistics in zip((output, arguments.valid_output), done):
        if statistics is not None:
            print(f"{path}: {describe(statistics, arguments.length)}")
    return 0


def describe(statistics, length: int) -> str:
    """Return the statistics of a token file as one line for people."""
    s = statistics
    return (f"{counted(s.n_documents, 'document')}, {counted(s.n_lines, 'line')}, {counted(s.n_words, 'word')}, {counted(s.n_bytes, 'byte')}; "
            f"{counted(s.n_tokens, 'token')} in {counted(s.n_rows, 'row')} of {length}, {s.padding:.3%} padding")


def counted(n: int, word: str) -> str:
    """Return a number with its word in the singular or plural."""
    return f"{n:,} {word}{'' if n == 1 else 's'}"


class Progress:
    """A line on the terminal that says which text is being read and how far; nothing where stderr is no terminal."""

    def __init__(self):
        self.shown, self.next_s = False, 0.0

    def __call__(self, text) -> None:
        if not sys.stderr.isatty() or time.monotonic() < self.next_s:
            return
        self.shown, self.next_s = True, time.monotonic() + 0.2
        share = f"{text.place_bytes / text.size_bytes:4.0%}, " if text.size_bytes else ""
        print(f"\r\x1b[Kprepare: {text.name}: {share}{text.n_bytes / 1e6:,.1f} MB of text", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Take the line away."""
        if self.shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

"""Texts to token files, and the bundled text to rows in memory.

Invariant: memory does not depend on the size of the texts; either every output appears, whole, or none does.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..errors import DataError
from .packing import MAX_LENGTH, Packer, Statistics
from .text import BUNDLED, Text, pieces
from .tokens import TokenRows
from .vocabulary import make_vocabulary
from .writer import TokenWriter

BUNDLED_VALID_FRACTION = "0.1"


class Prepared(NamedTuple):
    """The statistics of what was written; ``valid`` is None if nothing was held out."""

    train: Statistics
    valid: Statistics | None


class HeldOut:
    """Which documents are held out: of any first n, ``fraction`` of them (rounded down), spread evenly; the same in every run."""

    def __init__(self, fraction: str | float):
        try:
            self.fraction = Fraction(str(fraction))
        except (ValueError, ZeroDivisionError):
            self.fraction = Fraction(-1)
        if not 0 <= self.fraction < 1:
            raise DataError(f"prepare: the fraction held out is {fraction}. Give a number from 0 up to, but without, 1.")

    def __contains__(self, document: int) -> bool:
        p, q = self.fraction.numerator, self.fraction.denominator
        return (document + 1) * p // q > document * p // q


def prepare(inputs: Sequence[str], output: str | Path, length: int, vocabulary: str = "bytes", valid_fraction: str | float = 0,
            valid_output: str | Path | None = None, force: bool = False, any_bytes: bool = False,
            progress: Callable[[Text], None] = lambda text: None) -> Prepared:
    """Write the documents of ``inputs`` (paths of texts, plain or gzip, or ``bundled:sotu``), in order, as rows of ``length`` tokens.

    A blank line stands between documents. ``valid_fraction`` of them go to ``valid_output`` instead. ``force`` replaces outputs that exist.
    ``progress`` is called now and then with the text being read. Raises DataError, and then nothing is left behind.
    """
    held_out, vocab = HeldOut(valid_fraction), make_vocabulary(vocabulary)
    outputs = [Path(output), *([Path(valid_output)] if valid_output is not None else [])]
    _check_arguments(inputs, outputs, length, held_out, force)
    texts, writers = [], []
    try:
        for name in inputs:
            texts.append(Text(name, any_bytes))
        for path in outputs:
            writers.append(TokenWriter(path, length))
        packers = [Packer(length, vocab, writer.write) for writer in writers]
        _feed(texts, packers, held_out, progress)
        statistics = [packer.finish() for packer in packers]
        _check_documents(statistics, held_out)
        for writer, its, part in zip(writers, statistics, ("train", "valid")):
            writer.close(vocab, its, _provenance(texts, part, held_out, any_bytes))
        for writer in writers:
            writer.publish()
    finally:
        for thing in texts:
            thing.close()
        for writer in writers:
            writer.discard()
    return Prepared(*statistics, *([None] if len(statistics) == 1 else []))


def bundled_rows(source: str, length: int, part: str = "all", vocabulary: str = "bytes") -> TokenRows:
    """Return the rows of a bundled text, prepared in memory: ``part`` "train" is without the tenth of its documents that is "valid"."""
    vocab, kept = make_vocabulary(vocabulary), []
    _check_length(length)
    held_out = HeldOut(0 if part == "all" else BUNDLED_VALID_FRACTION)

    def keep(targets, segments):
        kept.append((targets.copy(), segments.copy()))

    packers = [Packer(length, vocab, keep if part != "valid" else _drop), Packer(length, vocab, keep if part == "valid" else _drop)]
    _feed([Text(source)], packers, held_out)
    for packer in packers:
        packer.finish()
    name = source if part == "all" else f"{source} ({part})"
    return TokenRows(name, *(np.concatenate(arrays) for arrays in zip(*kept)), vocab)


def _drop(targets, segments) -> None:
    """Take rows that nobody wants."""


def _feed(texts: Sequence[Text], packers: Sequence[Packer], held_out: HeldOut, progress: Callable[[Text], None] = lambda text: None) -> None:
    """Bring each document to its packer: the second one if it is held out."""
    document = 0
    for text in texts:
        for piece in pieces(text, progress):
            n_ended, goes_on = len(piece.parts) - 1, bool(piece.parts[-1])
            parts = piece.parts if goes_on else piece.parts[:-1]
            if len(packers) == 1:
                packers[0].add(parts, goes_on)
            else:
                chosen = [int(document + i in held_out) for i in range(len(parts))]
                for which, packer in enumerate(packers):
                    its = [part for part, c in zip(parts, chosen) if c == which]
                    if its:
                        packer.add(its, goes_on and chosen[-1] == which)
            document += n_ended


def _check_arguments(inputs: Sequence[str], outputs: Sequence[Path], length: int, held_out: HeldOut, force: bool) -> None:
    _check_length(length)
    if not inputs:
        raise DataError("prepare: no text was given. Give the path of at least one, or bundled:sotu.")
    if bool(held_out.fraction) != (len(outputs) == 2):
        given = "a file" if len(outputs) == 2 else "no file"
        raise DataError(f"prepare: a fraction of {float(held_out.fraction):g} is held out and {given} is named for it. "
                        "Give both --valid-fraction and --valid-output, or neither.")
    if len({os.path.realpath(path) for path in outputs}) < len(outputs):
        raise DataError(f"prepare: {outputs[0]} is named for both parts. Name two files.")
    for path in outputs:
        for name in inputs:
            if name not in BUNDLED and os.path.realpath(path) == os.path.realpath(name):
                raise DataError(f"prepare: {path} is both read and written. Name another output.")
        if os.path.isdir(path):
            raise DataError(f"prepare: {path} is a folder. Give the path of a file in it.")
        if os.path.lexists(path) and not force:
            raise DataError(f"prepare: {path} exists. Give another path, or --force to replace it.")


def _check_length(length: int) -> None:
    if not 2 <= length <= MAX_LENGTH:
        raise DataError(f"prepare: rows of length {length}. Give a length from 2 to {MAX_LENGTH:,}.")


def _check_documents(statistics: Sequence[Statistics], held_out: HeldOut) -> None:
    counts = [its.n_documents for its in statistics]
    if 0 in counts:
        raise DataError(f"prepare: of {sum(counts)} documents, {counts[1]} are held out at a fraction of {float(held_out.fraction):g}, and each part needs "
                        "one. Put blank lines between documents, or choose another fraction.")


def _provenance(texts: Sequence[Text], part: str, held_out: HeldOut, any_bytes: bool) -> dict:
    return {"sources": [{"name": text.name, "n_bytes": text.n_bytes, "blake2b": text.digest} for text in texts],
            "part": part, "valid_fraction": str(held_out.fraction), "any_bytes": any_bytes}

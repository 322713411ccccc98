"""The rows that a configuration's ``data`` section names.

Invariant: rows that are returned fit the model.
"""

from __future__ import annotations

from ..errors import DataError
from .prepare import bundled_rows
from .text import BUNDLED
from .tokens import TokenFile, TokenRows


def open_rows(source: str, part: str, length: int, vocab_size: int) -> TokenRows:
    """Return the rows of ``data.train`` or ``data.valid`` (``part`` "train" or "valid"): a token file, or a bundled text prepared in memory.

    Raises DataError, naming the source, if there are none or they do not fit ``length`` and ``vocab_size`` of the model.
    """
    if source == "synthetic":
        raise DataError(f"data: data.{part}=synthetic has no rows. Give a token file, or bundled:sotu.")
    rows = bundled_rows(source, length, part) if source.startswith("bundled:") or source in BUNDLED else TokenFile(source)
    rows.check_fits(length, vocab_size)
    return rows

"""Texts to ids and back.

Invariant: id 0 is padding and id 1 ends a document in every vocabulary; decoding what was encoded gives the text back to the byte.
"""

from __future__ import annotations

import numpy as np

from ..errors import DataError, nearest

PAD, EOS = 0, 1


class ByteVocabulary:
    """One id a byte: byte b is id b + 2; 258 ids in all."""

    name = "bytes"
    size = 258

    def encode(self, text: bytes | np.ndarray) -> np.ndarray:
        """Return the ids of ``text`` (bytes, or uint8 [n]), uint16 [n], without an end."""
        data = text if isinstance(text, np.ndarray) else np.frombuffer(text, np.uint8)
        return np.add(data, 2, dtype=np.uint16)

    def decode(self, ids) -> bytes:
        """Return the bytes of ``ids`` (whole numbers [n]) up to the first end, padding left out. Raises DataError for an id that does not exist."""
        ids = np.asarray(ids, np.int64).ravel()
        if ids.size and not 0 <= ids.min() <= ids.max() < self.size:
            raise DataError(f"decode: ids from {ids.min()} to {ids.max()} in a vocabulary of {self.size}. Give ids from 0 to {self.size - 1}.")
        ends = np.flatnonzero(ids == EOS)
        ids = ids[:ends[0]] if ends.size else ids
        return (ids[ids != PAD] - 2).astype(np.uint8).tobytes()


VOCABULARIES = {ByteVocabulary.name: ByteVocabulary}


def make_vocabulary(name: str) -> ByteVocabulary:
    """Return the vocabulary of that name. Raises DataError if there is none."""
    if name not in VOCABULARIES:
        raise DataError(f"vocabulary: there is none of the name {name!r}.{nearest(name, VOCABULARIES)}")
    return VOCABULARIES[name]()

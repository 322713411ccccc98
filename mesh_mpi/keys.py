"""Names and texts to numbers, the same in every process and every run.

Invariant: nothing here depends on Python's ``hash``, which is salted anew in each process.
"""

from __future__ import annotations

import hashlib


def name_key(name: str) -> int:
    """Return the 64-bit key of a name: the second word of a Philox key."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def text_digest(*texts: str) -> str:
    """Return a hexadecimal digest (128 bits) of texts, each counted with its length."""
    state = hashlib.blake2b(digest_size=16)
    for text in texts:
        raw = text.encode()
        state.update(len(raw).to_bytes(8, "little"))
        state.update(raw)
    return state.hexdigest()

"""Texts become the same documents, words and rows however the reading falls into blocks."""

import gzip
import random
import re

import numpy as np
import pytest

from mesh_mpi.data import text as text_module
from mesh_mpi.data.packing import Packer, segment_dtype
from mesh_mpi.data.prepare import HeldOut, bundled_rows
from mesh_mpi.data.text import Text, pieces
from mesh_mpi.data.vocabulary import ByteVocabulary
from mesh_mpi.errors import DataError


def documents(path) -> list[bytes]:
    """Return the documents of a text by way of its pieces."""
    found, rest = [], b""
    for piece in pieces(Text(str(path))):
        for part in piece.parts[:-1]:
            found.append(rest + part)
            rest = b""
        rest += piece.parts[-1]
    assert not rest
    return found


def expected(raw: bytes) -> list[bytes]:
    """Return the documents of a text by way of its lines."""
    groups: list[list[bytes]] = [[]]
    for line in raw.split(b"\n"):
        if line.strip():
            groups[-1].append(line)
        elif groups[-1]:
            groups.append([])
    last_cr = [b"\n".join(group) for group in groups if group]
    return [re.sub(rb"\r\Z", b"", text) for text in last_cr]


@pytest.mark.parametrize("raw", [
    b"one", b"one\n", b"one\ntwo\n\nthree\n", b"\n\none\n \t\n\n\ntwo", b"one\r\ntwo\r\n\r\nthree\r\n", b"  a\n  \n  b  \n\n  c  ", b"a\n\n\n", b"\na\n",
    "hé\u2028llo\x85\n\nö\u00a0\n".encode()])
@pytest.mark.parametrize("block", [1, 2, 3, 7, 1000])
def test_a_blank_line_ends_a_document_and_nothing_else_does(raw, block, tmp_path, monkeypatch):
    monkeypatch.setattr(text_module, "BLOCK_BYTES", block)
    (tmp_path / "text").write_bytes(raw)
    found = documents(tmp_path / "text")
    if block >= 7:  # below, white space may be more than a block
        assert found == expected(raw)
    assert b"".join(b"".join(found).split()) == b"".join(raw.split())


def test_random_texts_are_cut_as_their_lines_say(tmp_path, monkeypatch):
    draw = random.Random(0)
    for i in range(200):
        raw = "".join(draw.choice(["a", "bc", " ", "\n", "\n\n", "\r\n", "é", "\t"]) for _ in range(60)).encode()
        monkeypatch.setattr(text_module, "BLOCK_BYTES", draw.choice([61, 64, 100]))
        (tmp_path / "text").write_bytes(raw or b"x")
        assert documents(tmp_path / "text") == expected(raw), raw
        assert i < 200


def test_gzip_is_known_by_its_content_and_read_as_the_text_in_it(tmp_path):
    (tmp_path / "plain").write_bytes(b"one\n\ntwo\n")
    (tmp_path / "packed").write_bytes(gzip.compress(b"one\n") + gzip.compress(b"\ntwo\n"))
    for name in ("plain", "packed"):
        text = Text(str(tmp_path / name))
        assert b"".join(text.blocks()) == b"one\n\ntwo\n" and text.n_bytes == 9
        digest = text.digest
    assert digest == text.digest and len(digest) == 32


def test_white_space_without_end_takes_no_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(text_module, "BLOCK_BYTES", 16)
    (tmp_path / "text").write_bytes(b"a\n" + b" \n" * 1000 + b"b" + b" " * 1000 + b"c")
    found = documents(tmp_path / "text")
    assert found[0] == b"a" and b"".join(found).replace(b" ", b"") == b"abc"


def pack(texts: list[bytes], length: int):
    rows = []
    packer = Packer(length, ByteVocabulary(), lambda targets, segments: rows.append((targets.copy(), segments.copy())))
    for text in texts:
        packer.add([text[:1]], True)
        packer.add([text[1:]], False)
    statistics = packer.finish()
    return statistics, *(np.concatenate(arrays) for arrays in zip(*rows))


def test_documents_are_packed_in_order_and_go_on_as_new_segments():
    statistics, targets, segments = pack([b"ab", b"c", b"defgh"], 6)
    a = ByteVocabulary().encode(b"abcdefgh").tolist()
    assert targets.tolist() == [[a[0], a[1], 1, a[2], 1, a[3]], [a[4], a[5], a[6], a[7], 1, 0]]
    assert segments.tolist() == [[1, 1, 1, 2, 2, 3], [1, 1, 1, 1, 1, 0]]
    assert statistics == (3, 3, 3, 8, 11, 2, 1) and statistics.padding == 1 / 12


@pytest.mark.parametrize("length", [2, 3, 508, 509, 510, 511])
def test_segments_are_counted_in_a_type_that_holds_them(length):
    statistics, targets, segments = pack([b"a"] * 2000, length)
    assert segments.dtype == segment_dtype(length) and targets.dtype == np.uint16
    assert segments.max() == length // 2 + (length > 2 and length % 2 == 1)
    assert statistics.n_tokens == 4000 and targets.size == 4000 + statistics.n_padding


def test_words_and_lines_are_counted_across_pieces():
    statistics, _, _ = pack([b"one  two\nthree\tfour", b" five ", b"x"], 4)
    assert (statistics.n_words, statistics.n_lines, statistics.n_documents) == (6, 4, 3)


def test_held_out_documents_are_the_fraction_of_any_first_ones():
    for fraction in ("0.1", "0.05", "0.29", 0.5, "1/3", 0):
        held_out = HeldOut(fraction)
        chosen = [n in held_out for n in range(1000)]
        assert all(sum(chosen[:n]) == int(n * held_out.fraction) for n in range(1001))
    for wrong in ("1", "-0.1", "x", "nan", "1/0"):
        with pytest.raises(DataError, match="fraction held out is"):
            HeldOut(wrong)


def test_the_bundled_text_has_a_held_out_part():
    whole, train, valid = (bundled_rows("bundled:sotu", 128, part) for part in ("all", "train", "valid"))
    assert (whole.n_rows, train.n_rows, valid.n_rows) == (3052, 2813, 239) and whole.vocab_size == 258
    opening = whole.vocabulary.decode(train.rows([0])["targets"])
    assert opening.startswith(b"Thank you very much. Mr. Speaker") and opening != whole.vocabulary.decode(valid.rows([0])["targets"])

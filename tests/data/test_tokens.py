"""Token files: what is read is what was prepared, by this package and by the HDF5 tools."""

import os
import shutil
import subprocess
import threading

import h5py
import numpy as np
import pytest

from mesh_mpi.data.prepare import bundled_rows, prepare
from mesh_mpi.data.rows import FEEDS
from mesh_mpi.data.source import open_rows
from mesh_mpi.data.tokens import TokenFile
from mesh_mpi.errors import DataError


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """The bundled text as a token file of length 64."""
    path = tmp_path_factory.mktemp("tokens") / "sotu.h5"
    prepare(["bundled:sotu"], path, 64)
    return path


@pytest.fixture(scope="module")
def tokens(path):
    """The opened file."""
    with TokenFile(path) as tokens:
        yield tokens


def refused(call, *words: str) -> None:
    with pytest.raises(DataError) as caught:
        call()
    for word in words:
        assert word in str(caught.value), str(caught.value)


def test_the_rows_read_are_the_rows_prepared(tokens):
    memory = bundled_rows("bundled:sotu", 64)
    assert (memory.n_rows, memory.length, memory.vocab_size) == (tokens.n_rows, tokens.length, tokens.vocab_size)
    a, b = (rows.rows(np.arange(rows.n_rows)) for rows in (tokens, memory))
    for name in FEEDS:
        assert a[name].dtype == np.int32 and np.array_equal(a[name], b[name])
    targets = a["targets"][a["segments"] > 0]
    assert len(targets) == tokens.attributes["n_tokens"] and np.count_nonzero(targets == 1) == tokens.attributes["n_documents"] == 10


def test_the_text_comes_back_from_the_rows(tokens):
    from mesh_mpi.data.text import Text, pieces

    ids = tokens.rows(np.arange(tokens.n_rows))["targets"].ravel()
    ends = np.flatnonzero(ids == 1)
    found = [tokens.vocabulary.decode(ids[a:b]) for a, b in zip([0, *(ends[:-1] + 1)], ends)]
    raw = b"".join(Text("bundled:sotu").blocks())
    assert b"\n\n".join(found) + b"\n" == raw
    assert sum(len(piece.parts) - 1 for piece in pieces(Text("bundled:sotu"))) == len(found)


def test_rows_come_in_any_order_doubled_and_with_padding(tokens):
    whole = tokens.rows(np.arange(tokens.n_rows))
    asked = np.random.default_rng(0).integers(-1, tokens.n_rows, 200)
    got = tokens.rows(asked, slice(10, 37))
    for name in FEEDS:
        expected = np.where(asked[:, None] < 0, 0, whole[name][asked][:, 10:37])
        assert np.array_equal(got[name], expected), name
    assert tokens.rows([])["inputs"].shape == (0, 64) and tokens.rows([1], slice(5, 5))["inputs"].shape == (1, 0)
    assert not any(array.any() for array in tokens.rows([-1, -1]).values())
    refused(lambda: tokens.rows([0, tokens.n_rows]), f"{tokens.n_rows:,} rows", "0 to")


def test_only_the_asked_rows_are_read(tokens):
    class Spy:
        def __init__(self, inner):
            self.inner, self.shape, self.dtype, self.asked = inner, inner.shape, inner.dtype, []

        def __getitem__(self, cut):
            self.asked.append((cut[0].start, cut[0].stop))
            return self.inner[cut]

    memory = bundled_rows("bundled:sotu", 64)
    memory._targets = spy = Spy(memory._targets)
    memory.rows([8, 3, 4, 100, 5, 3])
    assert spy.asked == [(3, 6), (8, 9), (100, 101)]


def test_threads_may_read_at_once(tokens):
    whole, wrong = tokens.rows(np.arange(500)), []

    def read(seed):
        draw = np.random.default_rng(seed)
        for _ in range(30):
            asked = draw.integers(0, 500, 20)
            if not np.array_equal(tokens.rows(asked)["inputs"], whole["inputs"][asked]):
                wrong.append(seed)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not wrong


def test_the_tools_of_hdf5_read_the_file_and_show_its_labels(path):
    for tool in ("h5dump", "h5ls"):
        assert shutil.which(tool), f"this test needs {tool}: apt-get install hdf5-tools"
    shown = subprocess.run(["h5dump", "-d", "/targets", "-s", "0,0", "-c", "1,5", path], capture_output=True, text=True, timeout=30, check=True).stdout
    assert '"row", "position"' in shown and "H5T_STD_U16LE" in shown and "86, 106, 99, 112, 109" in shown
    listed = subprocess.run(["h5ls", "-v", path], capture_output=True, text=True, timeout=30, check=True).stdout
    assert "segments" in listed and "DIMENSION_LABELS" in listed and "unsigned char" in listed
    said = subprocess.run(["h5dump", "-d", "/provenance", path], capture_output=True, text=True, timeout=30, check=True).stdout
    assert "bundled:sotu" in said and "blake2b" in said
    attributes = subprocess.run(["h5dump", "-A", path], capture_output=True, text=True, timeout=30, check=True).stdout
    for name in ("format", "format_version", "vocabulary", "vocab_size", "length", "n_documents", "n_tokens", "n_bytes", "n_words", "n_padding"):
        assert f'ATTRIBUTE "{name}"' in attributes


def test_the_same_text_gives_the_same_file_to_the_byte(path, tmp_path):
    prepare(["bundled:sotu"], tmp_path / "again.h5", 64)
    assert (tmp_path / "again.h5").read_bytes() == path.read_bytes()


def test_a_file_that_does_not_fit_the_model_is_refused_with_both_numbers(tokens, path):
    tokens.check_fits(64, 258)
    tokens.check_fits(64, 8192)
    refused(lambda: tokens.check_fits(128, 258), str(path), "64", "model.length is 128", "model.length=64", "--length 128")
    refused(lambda: tokens.check_fits(64, 256), str(path), "258 symbols", "model.vocab_size is 256", "model.vocab_size=258")
    refused(lambda: open_rows(str(path), "train", 128, 256), "model.length is 128", "model.vocab_size is 256")
    refused(lambda: open_rows("bundled:sotu", "valid", 128, 256), "bundled:sotu (valid)", "258")
    assert open_rows(str(path), "train", 64, 258).n_rows == tokens.n_rows


def test_what_is_no_token_file_is_refused(tmp_path, path):
    (tmp_path / "text.txt").write_text("words\n")
    refused(lambda: TokenFile(tmp_path / "none.h5"), "none.h5", "does not exist", "mesh-mpi prepare")
    refused(lambda: TokenFile(tmp_path), "is a folder")
    refused(lambda: TokenFile(tmp_path / "text.txt"), "text.txt", "not HDF5")
    refused(lambda: open_rows("synthetic", "train", 64, 258), "synthetic")
    refused(lambda: open_rows("bundled:stou", "train", 64, 258), "bundled:sotu")
    with h5py.File(tmp_path / "other.h5", "w") as other:
        other["x"] = 1
    refused(lambda: TokenFile(tmp_path / "other.h5"), "attribute format is None")
    (tmp_path / "cut.h5").write_bytes(path.read_bytes()[:-100_000])
    refused(lambda: TokenFile(tmp_path / "cut.h5"), "cut.h5", "truncated")


@pytest.mark.parametrize("name, value, words", [("format_version", 2, ["version 2", "reads 1"]), ("vocabulary", "words", ["'words'", "bytes (258)"]),
                                                ("vocab_size", 300, ["300"]), ("length", 63, ["damaged", "63"])])
def test_a_file_of_another_make_is_refused(name, value, words, tmp_path, path):
    shutil.copy(path, tmp_path / "changed.h5")
    with h5py.File(tmp_path / "changed.h5", "a") as changed:
        changed.attrs[name] = value
    refused(lambda: TokenFile(tmp_path / "changed.h5"), "changed.h5", *words)


def test_reading_a_closed_file_is_an_error_with_its_name(path):
    tokens = TokenFile(path)
    tokens.close()
    refused(lambda: tokens.rows([0]), "sotu.h5", "closed")


@pytest.mark.parametrize(("position", "value", "words"), [(slice(None), 0, "the largest id in row 2 is 0"), (3, 60_000, "id in row 2 is 60000; ids are from 1 to 257")])
def test_a_row_that_nobody_prepared_is_refused_when_it_is_read(position, value, words, path, tmp_path):
    shutil.copy(path, tmp_path / "damaged.h5")
    with h5py.File(tmp_path / "damaged.h5", "r+") as file:
        file["targets"][2, position] = value
    with TokenFile(tmp_path / "damaged.h5") as damaged:
        assert damaged.rows([0, 1, -1])["targets"].any()
        refused(lambda: damaged.rows([0, 2]), "damaged.h5 is damaged", words)


def test_a_file_that_is_cut_short_while_it_is_open_is_refused(path, tmp_path):
    shutil.copy(path, tmp_path / "cut.h5")
    with TokenFile(tmp_path / "cut.h5") as cut:
        os.truncate(tmp_path / "cut.h5", 100)
        refused(lambda: cut.rows(range(cut.n_rows)), "cut.h5")

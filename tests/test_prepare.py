"""``mesh-mpi prepare``: what it writes and says, and every bad input refused with one message and nothing left behind."""

import gzip
import os
import pty
import resource
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from mpi_runner import import_path, run_ranks

from mesh_mpi.data.prepare import prepare
from mesh_mpi.data.tokens import TokenFile
from mesh_mpi.errors import DataError
from mesh_mpi.jobs.main import main

BUNDLED = Path(__file__).resolve().parent.parent / "mesh_mpi" / "data" / "sotu.txt.gz"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """An empty folder, which the test runs in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(capsys, *words) -> tuple[int, str, str]:
    """Run the command here; return its exit code, output and messages."""
    try:
        code = main(["prepare", *map(str, words)])
    except SystemExit as end:
        code = end.code
    return code, *capsys.readouterr()


def refused(capsys, *words, expect: tuple[str, ...]) -> None:
    """Run a command that must end with one message, exit code 2, and the folder as it was."""
    before = {path: path.stat().st_mtime_ns for path in Path().rglob("*")}
    code, out, err = run(capsys, *words)
    assert code == 2 and not out and err.count("\n") == 1 and "Traceback" not in err, err
    for word in expect:
        assert word in err, err
    assert {path: path.stat().st_mtime_ns for path in Path().rglob("*")} == before


def test_the_bundled_text_has_the_statistics_that_wc_gives(capsys):
    code, out, err = run(capsys, "bundled:sotu", "sotu.h5", "--length", 128)
    raw = gzip.decompress(BUNDLED.read_bytes())
    assert code == 0 and not err
    assert out == ("sotu.h5: 10 documents, 916 lines, 67,792 words, 390,521 bytes; 390,531 tokens in 3,052 rows of 128, 0.032% padding\n")
    assert len(raw.split()) == 67_792 and len([line for line in raw.split(b"\n") if line]) == 916
    with TokenFile("sotu.h5") as tokens:
        assert tokens.attributes == {"format": "mesh_mpi tokens", "format_version": 1, "vocabulary": "bytes", "vocab_size": 258, "length": 128,
                                     "n_documents": 10, "n_lines": 916, "n_words": 67_792, "n_bytes": 390_521, "n_tokens": 390_531, "n_padding": 125}
        assert '"bundled:sotu"' in tokens.provenance and '"n_bytes": 390540' in tokens.provenance
    assert os.listdir() == ["sotu.h5"]


def test_documents_are_held_out_in_their_own_file(capsys):
    code, out, _ = run(capsys, "bundled:sotu", "train.h5", "--length", 128, "--valid-fraction", "0.1", "--valid-output", "valid.h5")
    assert code == 0 and out.splitlines()[0].startswith("train.h5: 9 documents") and out.splitlines()[1].startswith("valid.h5: 1 document, 68 lines")
    run(capsys, "bundled:sotu", "whole.h5", "--length", 128)
    n = {name: TokenFile(f"{name}.h5").attributes["n_tokens"] for name in ("train", "valid", "whole")}
    assert n["train"] + n["valid"] == n["whole"]


def test_several_texts_plain_and_gzip_follow_one_another(capsys):
    Path("a.txt").write_text("one\ntwo")
    Path("b.txt.gz").write_bytes(gzip.compress("drei\n\nvier é\n".encode()))
    code, out, _ = run(capsys, "a.txt", "--length", 4, "b.txt.gz", "out.h5")
    assert code == 0 and "3 documents, 4 lines, 5 words, 18 bytes; 21 tokens in 6 rows of 4" in out
    tokens = TokenFile("out.h5")
    ids = tokens.rows(np.arange(6))["targets"].ravel()
    assert tokens.vocabulary.decode(ids) == b"one\ntwo" and ids[7] == 1


def test_an_existing_output_is_replaced_only_by_force(capsys):
    Path("a.txt").write_text("one\n")
    Path("out.h5").write_text("precious")
    refused(capsys, "a.txt", "out.h5", "--length", 4, expect=("out.h5 exists", "--force"))
    Path("bad.txt").write_bytes(b"\xff")
    refused(capsys, "bad.txt", "out.h5", "--length", 4, "--force", expect=("bad.txt",))
    assert Path("out.h5").read_text() == "precious"
    assert run(capsys, "a.txt", "out.h5", "--length", 4, "--force")[0] == 0 and TokenFile("out.h5").n_rows == 1


@pytest.mark.parametrize("content, expect", [
    (None, ("in.txt", "No such file")),
    (b"", ("is empty",)),
    (b"\n \n\n", ("only blank lines",)),
    (b"ab\ncd\0ef", ("NUL byte at byte 5 (line 2)", "--any-bytes")),
    (b"one\ntw\xffo\n", ("no UTF-8", "0xff", "byte 6 (line 2)", "--any-bytes")),
    (b"a" * (2**18 - 1) + "é".encode() + b"\xc3(\n", ("0xc3", f"byte {2**18 + 1:,} (line 1)")),
    (b"cut short \xe2\x82", ("no UTF-8", "byte 10", "unexpected end")),
    (gzip.compress(os.urandom(10_000).hex().encode())[:-2000], ("damaged gzip", "again")),
    (gzip.compress(b"abc\n")[:-4], ("damaged gzip",)),
    (gzip.compress(b"abc\n") + b"rubbish", ("damaged gzip",)),
    (gzip.compress(b"abc\0"), ("NUL byte",)),
    (gzip.compress(b""), ("only blank lines",)),
], ids=["missing", "empty", "blank", "nul", "latin", "torn", "cut", "half_gzip", "short_gzip", "long_gzip", "nul_in_gzip", "empty_gzip"])
def test_a_bad_text_is_refused(content, expect, capsys):
    Path("good.txt").write_text("good text\n" * 1000)
    if content is not None:
        Path("in.txt").write_bytes(content)
    refused(capsys, "good.txt", "in.txt", "out.h5", "--length", 16, expect=("in.txt", *expect))


def test_any_bytes_are_taken_where_they_are_asked_for(capsys):
    Path("in.bin").write_bytes(bytes(range(256)) + b"\n\n" + b"\xff\0")
    assert run(capsys, "in.bin", "out.h5", "--length", 16, "--any-bytes")[0] == 0
    tokens = TokenFile("out.h5")
    assert tokens.vocabulary.decode(tokens.rows(range(tokens.n_rows))["targets"]) == bytes(range(256)) and tokens.attributes["n_documents"] == 2


def test_wrong_words_on_the_command_line_are_refused(capsys):
    Path("a.txt").write_text("one\n")
    Path("d").mkdir()
    Path("plain.gz").write_text("no gzip")
    refused(capsys, "d", "out.h5", "--length", 8, expect=("d cannot be read", "Is a directory"))
    refused(capsys, "plain.gz", "out.h5", "--length", 8, expect=("plain.gz", "without .gz"))
    refused(capsys, "bundled:stou", "out.h5", "--length", 8, expect=("'bundled:stou'", "bundled:sotu"))
    refused(capsys, "out.h5", "--length", 8, expect=("one path was given",))
    refused(capsys, "a.txt", "a.txt", "--length", 8, expect=("a.txt does not end in .h5",))
    refused(capsys, "a.txt", "out.h5", "--length", 1, expect=("length 1", "2 to 65,535"))
    refused(capsys, "a.txt", "out.h5", "--length", 70000, expect=("length 70000",))
    refused(capsys, "a.txt", "out.h5", "--length", 8, "--vocabulary", "words", expect=("'words'", "bytes"))
    refused(capsys, "a.txt", "none/out.h5", "--length", 8, expect=("none/out.h5 cannot be written", "No such file", "folder that exists"))
    refused(capsys, "a.txt", "a.txt/out.h5", "--length", 8, expect=("a.txt/out.h5 cannot be written", "Not a directory"))
    refused(capsys, "a.txt", "/proc/out.h5", "--length", 8, expect=("/proc/out.h5 cannot be written",))
    Path("dir.h5").mkdir()
    refused(capsys, "a.txt", "dir.h5", "--length", 8, "--force", expect=("dir.h5 is a folder",))
    Path("text.h5").write_text("one\n")
    refused(capsys, "text.h5", "text.h5", "--length", 8, "--force", expect=("both read and written",))
    both = ("--valid-fraction", "0.5", "--valid-output", "v.h5")
    refused(capsys, "a.txt", "out.h5", "--length", 8, *both[:2], expect=("0.5", "--valid-output"))
    refused(capsys, "a.txt", "out.h5", "--length", 8, *both[2:], expect=("--valid-fraction",))
    refused(capsys, "a.txt", "v.h5", "--length", 8, *both, expect=("both parts",))
    refused(capsys, "a.txt", "out.h5", "--length", 8, *both, expect=("of 1 documents, 0 are held out",))
    refused(capsys, "a.txt", "out.h5", "--length", 8, "--valid-fraction", "2", "--valid-output", "v.h5", expect=("fraction held out is 2",))


@pytest.mark.parametrize("limit", [0, 100, 5000, 100_000, 400_000])
def test_a_full_disk_is_one_message_and_nothing_is_left(limit):
    words = [sys.executable, "-B", "-m", "mesh_mpi.jobs.main", "prepare", "bundled:sotu", "out.h5", "--length", "64"]  # -B: no cut .pyc is left
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, env={**os.environ, **import_path()},
                          preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))
    assert done.returncode == 2 and done.stderr.count("\n") == 1, (done.returncode, done.stderr)
    assert "out.h5 cannot be written: File too large. Make room" in done.stderr
    assert os.listdir() == []


def test_an_interrupt_leaves_nothing():
    def interrupt(text):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(["bundled:sotu"], "out.h5", 64, progress=interrupt)
    assert os.listdir() == []


def test_a_large_text_or_line_takes_no_more_memory_than_a_small_one():
    line = b"some words \xc3\xa9 of a line that goes on, and " * 25
    with open("lines.txt", "wb") as lines, open("line.txt", "wb") as one:
        for i in range(30_000_000 // len(line)):
            lines.write(line + (b"\n\n" if i % 3 == 0 else b"\n"))
            one.write(line)
    peaks = {}
    for name in ("lines.txt", "line.txt"):
        tracemalloc.start()
        done = prepare([name], f"{name}.h5", 256)
        peaks[name] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert done.train.n_bytes > 29_000_000 and done.train.n_lines == (30_000_000 // len(line) if name == "lines.txt" else 1)
    assert max(peaks.values()) < 12e6, peaks


def test_progress_is_shown_on_a_terminal_and_taken_away():
    Path("text.txt").write_text("words and more\n\n" * 100_000)
    parent, child = pty.openpty()
    done = subprocess.run([sys.executable, "-m", "mesh_mpi.jobs.main", "prepare", "text.txt", "out.h5", "--length", "64"], stdout=subprocess.PIPE,
                          stderr=child, timeout=60, env={**os.environ, **import_path()})
    os.close(child)
    shown = os.read(parent, 100_000).decode()
    os.close(parent)
    assert done.returncode == 0 and b"100,000 documents" in done.stdout
    assert "prepare: text.txt:" in shown and "MB of text" in shown and shown.endswith("\r\x1b[K")


def test_several_ranks_are_refused_before_they_write_the_same_file():
    Path("a.txt").write_text("one\n")
    done = run_ranks(2, ["prepare", "a.txt", "out.h5", "--length", "4"], cwd=Path.cwd())
    assert done.returncode != 0 and "2 ranks would write the same file" in done.stderr
    assert os.listdir() == ["a.txt"]


def test_both_outputs_appear_or_none(monkeypatch):
    from mesh_mpi.data import writer

    def fail(self, *arguments):
        if self.path.name == "v.h5":
            raise DataError("prepare: no. Wait.")

    monkeypatch.setattr(writer.TokenWriter, "close", fail)
    with pytest.raises(DataError):
        prepare(["bundled:sotu"], "out.h5", 64, valid_fraction="0.1", valid_output="v.h5")
    assert os.listdir() == []

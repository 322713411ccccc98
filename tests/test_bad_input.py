"""Wrong files, folders, numbers and states of the world: each command says one thing, ends with 2, and loses nothing; on four ranks with the same text."""

from __future__ import annotations

import gzip
import hashlib
import re
import shutil
import signal
import sys

import pytest
from mpi_runner import import_path, run_group, run_ranks

from mesh_mpi import checkpoint
from mesh_mpi.config import load
from mesh_mpi.jobs import main
from mesh_mpi.runtime.state import State
from mesh_mpi.training.step import build

CONFIG = """
mesh_shape: "data:2;model:2"
layout: "batch:data;d_ff:model;heads:model;vocab:model"
sequences_per_batch: 8
seed: 3
model: {d_model: 16, d_ff: 32, heads: 4, d_kv: 4, layers: 1, vocab_size: 258, vocab_multiple: 4, length: 16}
data: {train: "bundled:sotu", valid: "bundled:sotu"}
train: {steps: 4, log_every: 0, evaluate_every: 4, evaluate_batches: 1, checkpoint_every: 2}
"""
FULL = "config: the output cannot be written: No space left on device. See where it goes.\n"
TRAIN, NEW = ["train", "tiny.yaml"], "run_dir=new"
PREPARE = ["prepare", "--length", "16"]
MESSAGES = {  # words of the command, in a folder that ``world`` makes: the beginning of the message, a regular expression
    "a configuration that is not there": (["train", "no.yaml"], "ConfigError: config: there is no file 'no.yaml'"),
    "a configuration that is a folder": (["train", "folder"], "ConfigError: config: there is no file 'folder'"),
    "an empty configuration": (["config", "empty"], "ConfigError: config: empty: model is missing"),
    "a configuration of bytes": (["train", "bytes"], "ConfigError: config: bytes: cannot be read: 'utf-8' codec can't decode byte 0x80"),
    "a configuration of one huge line": (["train", "huge.yaml"], "ConfigError: config: huge.yaml:1: the file holds 'x{196}[.]{3}"),
    "half a configuration": (["config", "half.yaml"], "ConfigError: config: half.yaml:1: no YAML"),
    "neither a configuration nor defaults": (["config"], "ConfigError: config: neither a file nor --defaults were given"),
    "a number of another type": ([*TRAIN, NEW, "train.steps=many"], "ConfigError: config: override 'train.steps=many': train.steps is 'many'"),
    "an unknown key": ([*TRAIN, NEW, "train.stepz=3"], "ConfigError: config: override 'train.stepz=3': unknown key 'train.stepz'. Did you mean 'train.steps'"),
    "heads that do not divide": ([*TRAIN, NEW, "model.heads=3"], "LayoutError: layout: dimension heads=3 is split over model=2 ranks and does not divide"),
    "a batch that does not divide": ([*TRAIN, NEW, "sequences_per_batch=7"], "ConfigError: .* 7 sequences do not divide"),
    "held-out rows for synthetic ones": ([*TRAIN, NEW, "data.train=synthetic"], "ConfigError: train: data.train is synthetic"),
    "a token file that is not there": ([*TRAIN, NEW, "data.train=no.h5"], "DataError: data: no.h5 does not exist"),
    "a token file that is a folder": ([*TRAIN, NEW, "data.train=folder"], "DataError: data: folder is a folder"),
    "an empty token file": ([*TRAIN, NEW, "data.valid=empty"], "DataError: data: empty is no token file: it is not HDF5"),
    "a token file of other bytes": ([*TRAIN, NEW, "data.train=bytes"], "DataError: data: bytes is no token file: it is not HDF5"),
    "rows of another length": ([*TRAIN, NEW, "data.train=rows_8.h5"], "DataError: data: rows_8.h5 has rows of 8 positions and model.length is 16"),
    "too small a vocabulary": ([*TRAIN, NEW, "model.vocab_size=100"], r"DataError: data: bundled:sotu \(train\) has 258 symbols .* model.vocab_size is 100"),
    "more bytes than an address has": ([*TRAIN, NEW, "model.d_model=99999999999999999999"], "MeshMpiError: state: .* GiB could not be allocated"),
    "a run folder without a name": ([*TRAIN, "run_dir=''"], "ConfigError: run_dir: '' cannot be written: it is empty"),
    "a run folder that is a file": ([*TRAIN, "run_dir=tiny.yaml"], "ConfigError: run_dir: 'tiny.yaml' cannot be written: File exists"),
    "a run folder below a file": ([*TRAIN, "run_dir=tiny.yaml/run"], "ConfigError: run_dir: 'tiny.yaml/run' cannot be written: Not a directory"),
    "a run folder with NUL in its name": ([*TRAIN, r'run_dir="a\0b"'], r"ConfigError: run_dir: 'a\\x00b' cannot be written: embedded null byte"),
    "nothing to resume": ([*TRAIN, NEW, "resume=nowhere"], "CheckpointError: checkpoint nowhere: it does not exist"),
    "a text to resume": ([*TRAIN, NEW, "resume=text"], "CheckpointError: checkpoint text: it cannot be read"),
    "tokens to resume": ([*TRAIN, NEW, "resume=rows_8.h5"], "CheckpointError: load rows_8.h5: rows_8.h5 is a file of tokens"),
    "a checkpoint that no training loop saved": ([*TRAIN, NEW, "resume=foreign"], "CheckpointError: resume from .*: it has no rows_consumed and no tokens"),
    "a checkpoint of another model": ([*TRAIN, "run_dir=run", "model.d_ff=64"], r"CheckpointError: load .*: 6 variables differ: .* \[d_model=16, d_ff=64\]"),
    "another seed": ([*TRAIN, "run_dir=run", "seed=4"], "CheckpointError: resume from .*: seed 3 there and 4 here"),
    "a used folder that must not be resumed": ([*TRAIN, "run_dir=run", "resume=never"], "ConfigError: resume: never was asked for and run holds step_00000004"),
    "initial values of another shape": ([*TRAIN, NEW, "init_from=run", "model.d_ff=64"], "CheckpointError: load run.*: 2 variables differ"),
    "a text that is not there": ([*PREPARE, "no.txt", "out.h5"], "DataError: prepare: no.txt cannot be read: No such file"),
    "a text that is a folder": ([*PREPARE, "folder", "out.h5"], "DataError: prepare: folder cannot be read: Is a directory"),
    "an empty text": ([*PREPARE, "empty", "out.h5"], "DataError: prepare: empty is empty"),
    "a text that is none": ([*PREPARE, "bytes", "out.h5"], "DataError: prepare: bytes holds a NUL byte at byte 128"),
    "a text in another encoding": ([*PREPARE, "latin", "out.h5"], "DataError: prepare: latin is no UTF-8: byte 0xe9 at byte 3"),
    "half a gzip file": ([*PREPARE, "half.gz", "out.h5"], "DataError: prepare: half.gz is damaged gzip"),
    "a file of tokens that exists": ([*PREPARE, "text", "rows_8.h5"], "DataError: prepare: rows_8.h5 exists"),
    "an empty run to evaluate": (["evaluate", "folder"], "CheckpointError: checkpoint folder: there is neither index.h5 nor latest in it"),
    "tokens to evaluate": (["evaluate", "rows_8.h5"], "CheckpointError: checkpoint rows_8.h5: rows_8.h5 is a mesh_mpi tokens file and holds no configuration"),
    "another model to evaluate": (["evaluate", "run", "model.d_ff=64"], "ConfigError: evaluate: model.d_ff is the checkpoint's and cannot be set"),
    "held-out rows without a name": (["evaluate", "run", "--data", ""], "ConfigError: evaluate: --data is empty"),
    "an empty run to write with": (["generate", "folder"], "CheckpointError: checkpoint folder: there is neither index.h5 nor latest in it"),
    "too long a prompt": (["generate", "run", "--prompt", "x" * 16], "ConfigError: generate: the prompt has 16 tokens and the model's length is 16"),
    "no token": (["generate", "run", "--tokens", "0"], "ConfigError: generate: 1 samples of 0 tokens"),
    "a negative temperature": (["generate", "run", "--temperature", "-1"], "ConfigError: generate: the temperature is -1.0"),
    "more samples than there is memory": (["generate", "run", "--samples", "9" * 22], "MeshMpiError: state: .* GiB could not be allocated"),
    "a text to inspect": (["inspect", "text"], "CheckpointError: checkpoint text: it cannot be read"),
    "too long a name to inspect": (["inspect", "x" * 300], "CheckpointError: checkpoint x*: File name too long"),
    "a configuration of tokens": (["inspect", "--config", "rows_8.h5"], "CheckpointError: checkpoint rows_8.h5: .* holds no configuration"),
    "one path to compare": (["inspect", "--diff", "run"], "CheckpointError: inspect: 1 paths were given"),
    "no run to draw": (["plot", "folder"], "ConfigError: plot: folder/metrics.jsonl cannot be read: No such file"),
    "metrics without a step": (["plot", "empty"], "ConfigError: plot: empty has 0 lines and no step's loss"),
    "metrics of bytes": (["plot", "bytes"], "ConfigError: plot: bytes has .* lines and no step's loss"),
    "metrics without a number": (["plot", "numbers"], "ConfigError: plot: numbers has 5 lines and no step's loss"),
}
ON_RANKS = ["a configuration of bytes", "heads that do not divide", "a token file of other bytes", "rows of another length", "a run folder that is a file",
            "nothing to resume", "a checkpoint of another model", "a checkpoint that no training loop saved", "tokens to evaluate", "too long a prompt"]
WORLDS = {  # what stands in a run's folder: what is done to it, and how the message of resuming begins
    "metrics.jsonl is a folder": (lambda run: (run / "metrics.jsonl").unlink() or (run / "metrics.jsonl").mkdir(), "MeshMpiError: metrics of run: .*directory"),
    "run.lock is a folder": (lambda run: (run / "run.lock").unlink() or (run / "run.lock").mkdir(), "ConfigError: run_dir: 'run' cannot be .* Is a directory"),
    "checkpoints is a file": (lambda run: shutil.rmtree(run / "checkpoints") or (run / "checkpoints").write_text(""), "MeshMpiError: checkpoints of run: .*Not a dir"),
    "every checkpoint is damaged": (lambda run: [file.write_bytes(b"x") for file in run.glob("checkpoints/*/index.h5")], "CheckpointError: .* none of 2 can be used"),
    "a file has the next checkpoint's name": (lambda run: (run / "checkpoints" / "step_00000005").write_text(""),
                                              "CheckpointError: save step 5: Not a directory .errno 20.: run/checkpoints/step_00000005, in .* Move away"),
}
MENDED = {  # what a run gets over
    "latest is no text": lambda run: (run / "checkpoints" / "latest").write_bytes(b"\xff\0"),
    "latest is a huge line": lambda run: (run / "checkpoints" / "latest").write_text("x" * 5000),
    "latest is gone": lambda run: (run / "checkpoints" / "latest").unlink(),
    "the configuration is gone": lambda run: (run / "config.resolved.yaml").unlink(),
    "the metrics are no text": lambda run: (run / "metrics.jsonl").write_bytes(b"\xff\xfe\n" + (run / "metrics.jsonl").read_bytes()),
    "the metrics are empty": lambda run: (run / "metrics.jsonl").write_bytes(b""),
}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A folder with a run of four steps and files of all kinds."""
    folder = tmp_path_factory.mktemp("world")
    (folder / "tiny.yaml").write_text(CONFIG)
    (folder / "folder").mkdir()
    numbers = [b'{"step": 1e999, "loss": 1}', b'{"step": 1, "loss": NaN}', b'{"step": 2, "loss": 1e999}', b"[" * 100_000,
               b'{"step": 3, "loss": 1' + b"0" * 500 + b"}"]
    for name, content in {"empty": b"", "bytes": bytes(range(128, 256)) + b"\0" * 9, "text": b"words\n\nmore words\n", "latin": b"caf\xe9\n",
                          "huge.yaml": b"x" * 1_000_000, "half.yaml": b"a: {b: ", "half.gz": gzip.compress(bytes(5000))[:20],
                          "numbers": b"\n".join(numbers)}.items():
        (folder / name).write_bytes(content)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main.main(["prepare", "text", "rows_8.h5", "--length", "8"]) == 0
        assert main.main([*TRAIN, "run_dir=run"]) == 0
        config = load("tiny.yaml")
        checkpoint.save(State(build(config).programs, 3), "foreign", 4, {}, "")
    return folder


def bytes_of(folder) -> dict[str, str]:
    """Return a digest of every file, but of the locks, which hold the process."""
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.rglob("*")) if p.is_file() and p.name != "run.lock"}


def refused(capsys, words) -> str:
    """Run a command that must end with 2 and without output; return its message, the last line."""
    capsys.readouterr()
    assert main.main(words) == 2
    said = capsys.readouterr()
    assert said.out == "" and "Traceback" not in said.err
    return said.err.splitlines()[-1]


@pytest.mark.parametrize("case", MESSAGES)
def test_bad_input_ends_with_2_and_one_message_and_nothing_is_lost(case, world, capsys, monkeypatch):
    words, expected = MESSAGES[case]
    monkeypatch.chdir(world)
    before = bytes_of(world)
    assert re.match(expected, refused(capsys, words))
    after = bytes_of(world)
    assert {name: after.get(name) for name in before} == before
    assert {name for name in after if name not in before} <= {"new/config.resolved.yaml"}
    shutil.rmtree(world / "new", ignore_errors=True)


@pytest.mark.parametrize("case", ON_RANKS)
def test_four_ranks_say_the_same_once(case, world, capsys, monkeypatch):
    words, expected = MESSAGES[case]
    monkeypatch.chdir(world)
    alone = refused(capsys, words)
    result = run_ranks(4, words, 60, cwd=world)
    shutil.rmtree(world / "new", ignore_errors=True)
    assert (result.returncode, result.timed_out, result.stdout) == (2, False, ""), result.stderr
    assert re.sub(r"^warning: 4 ranks on a node .*\n", "", result.stderr) == alone + "\n" and re.match(expected, alone)


@pytest.mark.parametrize("case", WORLDS)
def test_a_run_folder_in_which_something_else_stands_is_refused_by_name(case, world, tmp_path, capsys, monkeypatch):
    change, expected = WORLDS[case]
    shutil.copytree(world / "run", tmp_path / "run")
    shutil.copy(world / "tiny.yaml", tmp_path)
    change(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    assert re.match(expected, refused(capsys, [*TRAIN, "run_dir=run", "train.steps=5"]))


@pytest.mark.parametrize("case", MENDED)
def test_a_run_gets_over_damage_of_what_it_can_make_anew(case, world, tmp_path, monkeypatch):
    shutil.copytree(world / "run", tmp_path / "run")
    shutil.copy(world / "tiny.yaml", tmp_path)
    MENDED[case](tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    assert main.main([*TRAIN, "run_dir=run", "train.steps=5"]) == 0
    assert (tmp_path / "run" / "checkpoints" / "latest").read_text() == "step_00000005\n"
    assert main.main(["inspect", "run", "--verify"]) == 0


@pytest.mark.parametrize(("reader", "code", "said"), [("| true", 141, ""), ("> /dev/full", 2, FULL)])
def test_output_without_a_reader_or_without_room_ends_without_a_traceback(reader, code, said):
    command = f"set -o pipefail; {{ sleep 0.3; exec {sys.executable} -m mesh_mpi.jobs.main config --defaults; }} {reader}"
    result = run_group(["bash", "-c", command], 60, import_path())
    assert (result.returncode, result.stderr) == (code, said)


def test_a_signal_before_the_configuration_is_read_saves_after_the_first_step(world, tmp_path, monkeypatch):
    def load_and_be_asked(*given):
        signal.raise_signal(signal.SIGUSR1)
        return load(*given)

    monkeypatch.setattr("mesh_mpi.config.load", load_and_be_asked)
    assert main.main(["train", str(world / "tiny.yaml"), f"run_dir={tmp_path}"]) == 85
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step_00000001\n"

"""``mesh-mpi inspect``: what it prints of checkpoints and of files of tokens, without MPI."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import h5py
import numpy as np
import pytest
from mpi_runner import import_path, mpiexec, run_group, run_ranks

import mesh_mpi as mm
from mesh_mpi import checkpoint
from mesh_mpi.jobs.main import main


@pytest.fixture
def run_dir(tmp_path):
    """A run with steps 1 and 2 of two small variables and a slot."""
    a, b = mm.Dimension("a", 2), mm.Dimension("b", 3)
    w, bias = mm.Variable("layer/w", [a, b], init=mm.normal(stddev=0.5)), mm.Variable("layer/bias", [b])
    slot = mm.Variable("layer/w/momentum", [a, b], storage_class="optimizer", trainable=False)
    state = mm.State([mm.compile(outputs={"w": w, "bias": bias, "slot": slot})])
    state.assign(w, np.array([[1, -2, 3], [0, np.nan, np.inf]], np.float32))
    checkpoint.save(state, tmp_path, 1, {"tokens": 1000}, "seed: 0\n")
    state.assign(w, np.array([[1, -2.5, 3], [0, np.nan, 4]], np.float32))
    checkpoint.save(state, tmp_path, 2, {"tokens": 2000}, "seed: 0\n")
    return tmp_path


def test_a_tree_has_shapes_with_names_types_bytes_and_initial_values(run_dir, capsys):
    assert main(["inspect", str(run_dir)]) == 0
    assert capsys.readouterr().out == f"""\
{run_dir}/checkpoints/step_00000002/index.h5: mesh_mpi checkpoint, version 1; seed 0, step 2, tokens 2,000; 3 arrays, 60 bytes, 9 parameters
optimizer/
  layer/
    w/
      momentum  [a=2, b=3]  float32  24 bytes  zeros()
parameters/
  layer/
    bias        [b=3]       float32  12 bytes  zeros()
    w           [a=2, b=3]  float32  24 bytes  normal(mean=0, stddev=0.5)
"""


def test_statistics_are_over_finite_elements_and_the_others_are_counted(run_dir, capsys):
    assert main(["inspect", str(run_dir / "checkpoints" / "step_00000001"), "--stats"]) == 0
    lines = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines()[2:]}
    assert lines["parameters/layer/w"] == ["-2", "3", "0.5", "1.871", "16.7%", "2"]
    assert lines["optimizer/layer/w/momentum"] == ["0", "0", "0", "0", "100.0%", "0"]


def test_differences_are_counted_with_the_largest_and_the_exit_code_says_whether_there_are_any(run_dir, tmp_path, capsys):
    one, two = (str(run_dir / "checkpoints" / f"step_0000000{i}") for i in (1, 2))
    assert main(["inspect", "--diff", one, two]) == 1
    out = capsys.readouterr().out
    assert "values  parameters/layer/w[a=2, b=3]: 2 of 6 differ, by at most inf (relative inf)" in out and "same    2 arrays" in out
    assert main(["inspect", one, one, "--diff"]) == 0
    assert "same  3 arrays" in capsys.readouterr().out
    other = tmp_path / "other"
    w = mm.Variable("layer/w", [mm.Dimension("a", 4), mm.Dimension("b", 3)])
    checkpoint.save(mm.State([mm.compile(outputs={"w": w})]), other, 1)
    assert main(["inspect", "--diff", two, str(other)]) == 1
    out = capsys.readouterr().out
    assert "only in a  parameters/layer/bias[b=3]" in out and "shape      parameters/layer/w: [a=2, b=3] in a, [a=4, b=3] in b" in out
    found = checkpoint.compare(two, two)
    assert found.same and [d.n_different for d in found.differences] == [0, 0, 0]


def test_the_largest_differences_are_absolute_and_relative_to_the_larger_element(tmp_path):
    n = mm.Dimension("n", 4)
    w = mm.Variable("w", [n])
    state = mm.State([mm.compile(outputs={"w": w})])
    for i, values in enumerate(([1, 100, 0, 2], [1, 101, 0, 1])):
        state.assign(w, np.array(values, np.float32))
        checkpoint.save(state, tmp_path / str(i), 0)
    difference, = checkpoint.compare(tmp_path / "0", tmp_path / "1").differences
    assert difference[1:] == (2, 1.0, 0.5)


def test_verification_says_whole_or_names_what_is_damaged(run_dir, capsys):
    assert main(["inspect", str(run_dir), "--verify"]) == 0
    assert "index.h5: whole; 3 arrays, 60 bytes, all checksums agree" in capsys.readouterr().out
    path = checkpoint.resolve(run_dir)
    with h5py.File(path, "r+") as file:
        file["parameters/layer/w"][0, 0] = 7
        file["parameters/layer/bias"][0] = 7
    assert main(["inspect", str(run_dir), "--verify"]) == 2
    err = capsys.readouterr().err
    assert "2 of 3 arrays are damaged: parameters/layer/bias[b=3] has checksum" in err and "parameters/layer/w[a=2, b=3] has checksum" in err


def test_the_configuration_comes_back_as_it_was_given(run_dir, capsys):
    assert main(["inspect", str(run_dir), "--config"]) == 0
    assert capsys.readouterr().out == "seed: 0\n"


def test_a_file_of_tokens_is_shown_too(tmp_path, capsys):
    path = tmp_path / "tokens.h5"
    with h5py.File(path, "w", libver=("earliest", "v110")) as file:
        file.attrs.update({"format": "mesh_mpi tokens", "format_version": 1, "vocabulary": "bytes", "n_tokens": 5})
        for name, array in (("targets", np.array([[3, 8, 1, 5, 1, 0]], np.uint16)), ("segments", np.array([[1, 1, 1, 2, 2, 0]], np.uint8))):
            item = file.create_dataset(name, data=array)
            item.dims[0].label, item.dims[1].label = "row", "position"
    assert main(["inspect", str(path)]) == 0
    out = capsys.readouterr().out
    assert "mesh_mpi tokens, version 1; n_tokens 5, vocabulary bytes; 2 arrays, 18 bytes\n" in out
    assert "targets   [row=1, position=6]  uint16  12 bytes" in out
    assert main(["inspect", str(path), "--stats"]) == 0 and "16.7%" in capsys.readouterr().out
    assert main(["inspect", str(path), "--verify"]) == 2 and "files of tokens hold no checksums" in capsys.readouterr().err


@pytest.mark.parametrize("words, part", [(["nowhere"], "checkpoint nowhere: it does not exist."), (["a", "b"], "2 paths were given. Give one"),
                                         (["a", "--diff"], "1 paths were given. Give two")])
def test_what_cannot_be_inspected_is_said(words, part, capsys):
    assert main(["inspect", *words]) == 2
    assert part in capsys.readouterr().err


def test_a_file_that_is_no_hdf5_is_said(tmp_path, capsys):
    (tmp_path / "index.h5").write_text("hello")
    assert main(["inspect", str(tmp_path)]) == 2
    assert "it cannot be read, OSError" in capsys.readouterr().err


def test_under_a_launcher_the_first_rank_inspects_and_the_others_end(run_dir, capsys, monkeypatch):
    monkeypatch.setenv("PMI_RANK", "1")
    assert main(["inspect", str(run_dir)]) == 0 and capsys.readouterr() == ("", "")
    monkeypatch.setenv("PMI_RANK", "0")
    assert main(["inspect", str(run_dir)]) == 0 and "mesh_mpi checkpoint" in capsys.readouterr().out


@pytest.mark.parametrize("mpi", ["mpich", "openmpi"])
def test_differences_and_a_full_output_end_a_job_of_several_ranks_as_one_process(run_dir, mpi):
    started = time.monotonic()
    one, two = (str(run_dir / "checkpoints" / f"step_0000000{step}") for step in (1, 2))
    result = run_ranks(2, ["inspect", "--diff", one, two], timeout=40, mpi=mpi)
    assert result.returncode == 1 and "rank 0" not in result.stderr.split("----")[0] and "arrays differ; the largest difference is" in result.stdout, result
    script = f"exec {sys.executable} -m mesh_mpi.jobs.main config runs/quickstart.yaml > /dev/full"
    result = run_group([mpiexec(mpi), "-n", "1", "sh", "-c", script], 40, {**import_path(), "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"})
    assert result.returncode == 2 and "config: the output cannot be written: No space left on device" in result.stderr, result
    assert "Traceback" not in result.stderr and time.monotonic() - started < 30


def test_inspect_starts_no_mpi(run_dir):
    code = "import sys; from mesh_mpi.jobs.main import main; main(sys.argv[1:]); print([n for n in ('mpi4py', 'mpi4py.MPI') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code, "inspect", str(run_dir), "--verify"], capture_output=True, text=True, timeout=60,
                          env={**os.environ, **import_path()})
    assert done.returncode == 0 and done.stdout.endswith("[]\n"), done.stderr

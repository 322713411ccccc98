"""Wrong meshes, layouts and shapes: one message, once, the same on one process and on four ranks; exit code 2 and no traceback."""

from __future__ import annotations

import os
import re
import sys

import pytest
from mpi_runner import ROOT, import_path, run_group, run_ranks

from mesh_mpi.jobs import main

PATH = {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]))}
QUICKSTART = "runs/quickstart.yaml"
MESH = "mesh_shape=data:2;model:2"
BENCH = {
    "an unknown dimension": (
        ["layout=bacth:data;heads:model"], "LayoutError: layout: rule bacth:data names dimension 'bacth', which no tensor has. Did you mean 'batch'?"),
    "an unknown axis": (
        ["layout=batch:data;heads:modle"], "ConfigError: config: override 'layout=batch:data;heads:modle': layout: rule heads:modle names axis 'modle', "
        "but the mesh is [data=2, model=2]. Did you mean 'model'?"),
    "two axes for a dimension": (
        ["layout=heads:data;heads:model"], "ConfigError: config: override 'layout=heads:data;heads:model': layout: dimension 'heads' stands in two rules, "
        "heads:data and heads:model. Keep one of them."),
    "a rule twice": (
        ["layout=batch:data;batch:data"], "ConfigError: config: override 'layout=batch:data;batch:data': layout: rule batch:data stands twice. Delete one."),
    "an axis without a size": (
        ["mesh_shape=data:2;model:"], "ConfigError: config: override 'mesh_shape=data:2;model:': mesh: 'model:' in 'data:2;model:' is no axis:size. "
        "Write mesh_shape as \"data:2;model:2\"."),
    "an axis of no rank": (
        ["mesh_shape=data:2;model:0"], "ConfigError: config: override 'mesh_shape=data:2;model:0': mesh: axis 'model' has size '0'. "
        "Write mesh_shape as \"data:2;model:2\", sizes at least 1."),
    "two dimensions of tensors on an axis": (
        ["layout=batch:data;length:data"], "LayoutError: layout: tensor inputs[batch=24, length=64] and "),
    "a size that does not divide": (
        ["model.heads=3"], "LayoutError: layout: dimension heads=3 is split over model=2 ranks and does not divide. Sizes of the axis that do: 1, 3; "
        "or make heads a multiple of 2."),
    "a batch that does not divide": (
        ["sequences_per_batch=3"], "ConfigError: config: override 'sequences_per_batch=3': sequences_per_batch: 3 sequences do not divide"),
    "a typing error in a key": (
        ["modle.layers=2"], "ConfigError: config: override 'modle.layers=2': unknown key 'modle'. Did you mean 'model'?"),
}
RANKS = {
    "a mesh that is too large": (
        ["mesh_shape=data:4;model:3", "model.heads=6", "model.d_ff=516", "model.vocab_multiple=12"],
        "MeshError: mesh [data=4, model=3] needs 12 ranks and 4 are running. Start with -n 12, or choose sizes whose product is 4.",
        "LaunchError: bench: mesh [data=4, model=3] needs 12 ranks and this is one process. Add -n 12, or mesh_shape= for one rank."),
    "a mesh that is too small": (
        ["mesh_shape=data:2", "layout=batch:data"],
        "MeshError: mesh [data=2] needs 2 ranks and 4 are running. Start with -n 2, or choose sizes whose product is 4.",
        "LaunchError: bench: mesh [data=2] needs 2 ranks and this is one process. Add -n 2, or mesh_shape= for one rank."),
}
SCRIPTS = {
    "two dimensions of a tensor on an axis": (
        "x = mm.placeholder('x', [batch, io])\nmm.compile({'y': x * 2.0}, mesh_shape='data:4', layout='batch:data;io:data')",
        "LayoutError: layout: tensor x[batch=8, io=4] and 1 more have two dimensions on axis 'data', batch=8 and io=4. "
        "Split only one of them there, or rename one (mm.rename) around this operation."),
    "two dimensions on an axis in an operation's index space only": (
        "u, v = mm.placeholder('u', [batch, io]), mm.placeholder('v', [io, out])\n"
        "mm.compile({'y': mm.einsum([u, v], [])}, mesh_shape='data:4', layout='batch:data;out:data')",
        "LayoutError: layout: operation einsum einsum of u[batch=8, io=4], v[io=4, out=12] has two dimensions on axis 'data', batch=8 and out=12. "
        "Split only one of them there, or rename one (mm.rename) around this operation."),
    "a dimension of an einsum's output that no operand has": (
        "mm.einsum([mm.placeholder('x', [batch, io])], [batch, out])",
        "DimensionError: einsum: output dimension out=12 is in none of the operands [batch=8, io=4]. Remove it, or broadcast the result (mm.broadcast)."),
    "one name with two sizes in an operation": (
        "mm.einsum([mm.placeholder('x', [batch, io]), mm.placeholder('w', [mm.Dimension('io', 5), out])], [batch, out])",
        "DimensionError: einsum: dimension 'io' has two sizes, 4 and 5, among [batch=8, io=4], [io=5, out=12], [batch=8, out=12]. "
        "Rename one, or slice or pad it."),
    "several faults at once": (
        "mm.compile({'y': mm.placeholder('x', [batch, io]) * 2.0}, mesh_shape='data:4', layout='bacth:data;io:dta')",
        "LayoutError: layout: rule bacth:data names dimension 'bacth', which no tensor has. Did you mean 'batch'?\n"
        "layout: rule io:dta names axis 'dta', but the mesh is [data=4]. Did you mean 'data'?"),
}
DIMENSIONS = "import mesh_mpi as mm\nbatch, io, out = mm.Dimension('batch', 8), mm.Dimension('io', 4), mm.Dimension('out', 12)\n"


def message_of_ranks(command: str | list) -> str:
    """Run a command on four ranks; return what was said, a warning about cores aside; it must have come with exit code 2."""
    result = run_ranks(4, command, timeout=60, env=PATH)
    assert (result.returncode, result.timed_out, result.stdout) == (2, False, ""), f"{result.stdout}\n{result.stderr}"
    return re.sub(r"^warning: 4 ranks on a node .*\n", "", result.stderr)


def message_here(capsys, words: list[str]) -> str:
    """Run a command of mesh-mpi in this process; return what it said, which must have come with exit code 2."""
    assert main.main(words) == 2
    said = capsys.readouterr()
    assert said.out == ""
    return said.err


@pytest.mark.parametrize("case", BENCH)
def test_bench_refuses_on_one_process_and_on_four_ranks_with_one_text(case, capsys):
    words, text = BENCH[case]
    bench = ["bench", QUICKSTART, *([] if words[0].startswith("mesh_shape") else [MESH]), *words]
    alone = message_here(capsys, bench)
    assert alone.startswith(text) and alone.count("\n") == 1 and "Traceback" not in alone
    assert message_of_ranks(bench) == alone


@pytest.mark.parametrize("case", RANKS)
def test_bench_refuses_a_mesh_of_another_size_than_the_ranks(case, capsys):
    words, on_ranks, alone = RANKS[case]
    assert message_here(capsys, ["bench", QUICKSTART, *words]) == alone + "\n"
    assert message_of_ranks(["bench", QUICKSTART, *words]) == on_ranks + "\n"


@pytest.mark.parametrize("case", SCRIPTS)
def test_a_script_that_does_not_catch_the_error_ends_with_2_and_the_text_alone_and_on_four_ranks(case):
    script, text = SCRIPTS[case]
    alone = run_group([sys.executable, "-c", DIMENSIONS + script], 60, {**import_path(), **PATH})
    assert (alone.returncode, alone.stdout, alone.stderr) == (2, "", text + "\n")
    assert message_of_ranks(DIMENSIONS + script) == text + "\n"


def test_an_exception_of_another_kind_keeps_its_traceback_in_a_script_without_a_launcher():
    result = run_group([sys.executable, "-c", DIMENSIONS + "raise ValueError('mine')"], 60, {**import_path(), **PATH})
    assert result.returncode == 1 and re.fullmatch(r"Traceback .*ValueError: mine\n", result.stderr, re.DOTALL)

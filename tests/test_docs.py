"""Documentation is executed: every command and program of the README and of docs/language.md runs, and the outputs shown are the real ones."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import typing
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
INSTALL = re.compile(r"python3 -m venv venv && venv/bin/pip install -e '(\.\[[a-z,]+\])' && venv/bin/")


def blocks(document: str, language: str) -> list[str]:
    """Return the fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", (ROOT / document).read_text(), re.S | re.M)


def run(command: list[str], timeout_s: int, folder: Path = ROOT) -> str:
    """Run a command with this environment's programs first; return what it printed."""
    env = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, f"{command} ended with {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout + done.stderr


def readme_commands() -> list[str]:
    """Return the README's command lines without what installs, and without pytest."""
    lines = [INSTALL.sub("", line) for block in blocks("README.md", "sh") for line in block.splitlines() if line.strip()]
    return [line for line in lines if line != "pytest"]


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A folder that has what a clone has for the commands, and takes what they write."""
    folder = tmp_path_factory.mktemp("clone")
    for name in ("configs", "docs"):
        (folder / name).symlink_to(ROOT / name)
    return folder


@pytest.mark.parametrize("command", readme_commands())
def test_a_command_of_the_readme_runs(command, clone):
    assert run(["bash", "-c", command], 300, clone).strip()


def test_the_readme_has_its_two_set_up_commands_and_ci_takes_the_same():
    text = (ROOT / "README.md").read_text()
    assert INSTALL.findall(text) == [".[mpi]", ".[mpi,test]"] and "venv/bin/pytest" in text
    ci = (ROOT / ".ci" / "run").read_text()
    assert "-e '.[mpi,test]'" in ci and "pytest" in ci
    assert len(text.splitlines()) <= 150


def test_the_readmes_program_runs_and_prints_both_layouts():
    out = "".join(run([sys.executable, "-c", block], 60) for block in blocks("README.md", "python"))
    assert "mesh [data=2, model=2]" in out and "mesh [model=4]" in out


def stdout(command: list[str]) -> str:
    """Return what a command prints on stdout alone."""
    env = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60, check=True).stdout


def test_the_language_pages_program_prints_what_the_page_shows():
    program, = blocks("docs/language.md", "python")
    first, second = blocks("docs/language.md", "text")
    assert stdout([sys.executable, "-c", program]) == first
    old = 'mesh_shape="data:2;model:2", layout="batch:data;d_ff:model"'
    new = re.search(r"Only `(mesh_shape=.*?)` is changed", (ROOT / "docs/language.md").read_text()).group(1)
    assert old in program
    assert stdout([sys.executable, "-c", program.replace(old, new)]) == second


def test_links_of_the_documents_lead_somewhere():
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        text = re.sub(r"```.*?```|`[^`]*`", "", page.read_text(), flags=re.S)
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
            assert (page.parent / target).exists(), f"{page.name} links to {target}, which does not exist"


def test_the_page_for_people_from_mesh_tensorflow_runs_and_names_only_what_exists():
    import mesh_mpi as mm
    from mesh_mpi import config_schema as schema
    from mesh_mpi import layers

    page = (ROOT / "docs/from-mesh-tensorflow.md").read_text()
    program, = blocks("docs/from-mesh-tensorflow.md", "python")
    assert stdout([sys.executable, "-c", program]) == blocks("docs/from-mesh-tensorflow.md", "text")[1]
    assert [n for n in re.findall(r"\bmm\.(\w+)", page) if not hasattr(mm, n)] == []
    assert [n for n in re.findall(r"`layers\.([A-Z]\w+|residual)", page) if not hasattr(layers, n)] == []
    assert [n for n in re.findall(r"`mesh-mpi (\w+)", page) if not (ROOT / "jobs" / f"{n}.py").exists()] == []
    keys = {"": set(schema.Config.__struct_fields__)}
    for name, kind in typing.get_type_hints(schema.Config).items():
        fields = {f for section in (kind, *typing.get_args(kind)) for f in getattr(section, "__struct_fields__", ())}
        keys.update({name: fields} if fields else {})
    named = re.findall(rf"`({'|'.join(filter(None, keys))})\.(\w+)(?:: [^`]*)?`", page)
    named += [("", n) for n in re.findall(r"`(\w+):(?: [^`]*)?`", page) if n != "gathered"]
    assert len(named) > 50 and [(section, key) for section, key in named if key not in keys[section]] == []
    tags = {c.__struct_config__.tag for union in (schema.Optimizer, schema.Schedule) for c in typing.get_args(union)}
    assert set(re.findall(r"\{name: (\w+)\}", page)) == tags

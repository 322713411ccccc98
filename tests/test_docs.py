"""Documentation is executed: every command and program of the README and of docs/language.md runs, and the outputs shown are the real ones."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
SET_UP = "python3 -m venv venv && . venv/bin/activate && pip install -e '.[mpi,test]'"


def blocks(document: str, language: str) -> list[str]:
    """Return the fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", (ROOT / document).read_text(), re.S | re.M)


def run(command: list[str], timeout_s: int) -> str:
    """Run a command from the root with this environment's programs first; return what it printed."""
    env = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, f"{command} ended with {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


def readme_commands() -> list[str]:
    """Return the README's command lines less the installing one and pytest itself."""
    lines = [line for block in blocks("README.md", "sh") for line in block.splitlines() if line.strip()]
    return [line for line in lines if line not in (SET_UP, "pytest")]


@pytest.mark.parametrize("command", readme_commands())
def test_a_command_of_the_readme_runs(command):
    out = run(["bash", "-c", command], 400)
    assert out.strip()


def test_the_readme_has_its_two_set_up_commands_and_ci_takes_the_same():
    text = (ROOT / "README.md").read_text()
    assert SET_UP in text and "pytest" in [line for block in blocks("README.md", "sh") for line in block.splitlines()]
    ci = (ROOT / ".ci" / "run").read_text()
    assert "-e '.[mpi,test]'" in ci and "pytest" in ci
    assert len(text.splitlines()) <= 150


def test_the_readmes_program_runs_and_prints_both_layouts():
    out = "".join(run([sys.executable, "-c", block], 60) for block in blocks("README.md", "python"))
    assert "mesh [data=2, model=2]" in out and "mesh [model=4]" in out


def test_the_language_pages_program_prints_what_the_page_shows():
    program, = blocks("docs/language.md", "python")
    first, second = blocks("docs/language.md", "text")
    assert run([sys.executable, "-c", program], 60) == first
    old = 'mesh_shape="data:2;model:2", layout="batch:data;d_ff:model"'
    new = re.search(r"Only `(mesh_shape=.*?)` is changed", (ROOT / "docs/language.md").read_text()).group(1)
    assert old in program
    assert run([sys.executable, "-c", program.replace(old, new)], 60) == second


def test_links_of_the_documents_lead_somewhere():
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        text = re.sub(r"```.*?```|`[^`]*`", "", page.read_text(), flags=re.S)
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
            assert (page.parent / target).exists(), f"{page.name} links to {target}, which does not exist"

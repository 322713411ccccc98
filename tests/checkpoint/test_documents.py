"""docs/checkpoints.md is executed: its programs and commands run in one folder, and the outputs shown are the real ones."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from mpi_runner import ROOT, import_path

PAGE = ROOT / "docs" / "checkpoints.md"
PAIRS = re.compile(r"^```(sh|python)\n(.*?)^```\n\n```text\n(.*?)^```$", re.S | re.M)
TOOLS = {"h5ls": "apt-get install hdf5-tools", "h5dump": "apt-get install hdf5-tools", "h5glance": "pip install 'mesh-mpi[test]'",
         "mesh-mpi": "pip install -e '.[mpi,test]'"}


def output(kind: str, text: str, folder: Path) -> str:
    """Run a command line or a program in ``folder``; return what it printed, lines without trailing spaces."""
    env = {**os.environ, **import_path(), "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    command = ["bash", "-c", text] if kind == "sh" else [sys.executable, "-c", text]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
    return "".join(line.rstrip() + "\n" for line in done.stdout.rstrip().splitlines())


def test_the_page_of_checkpoints_shows_what_its_programs_and_tools_really_print(tmp_path):
    missing = {name: how for name, how in TOOLS.items() if shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}") is None}
    assert not missing, f"this test needs {missing}"
    pairs = PAIRS.findall(PAGE.read_text())
    assert [kind for kind, _, _ in pairs] == ["python", "sh", "sh", "sh", "python", "sh", "sh"]
    for kind, text, shown in pairs:
        assert output(kind, text, tmp_path) == shown, text

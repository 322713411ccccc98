"""The commands give the same losses, logits and texts as MPI jobs on other meshes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "docs" / "examples" / "command_matrix.py"


def test_the_quick_matrix_of_commands_is_within_its_bounds(tmp_path):
    done = subprocess.run([sys.executable, str(SCRIPT), str(tmp_path / "runs"), "--quick"], capture_output=True, text=True, timeout=500,
                          env={**os.environ, "OPENBLAS_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("text the same  ok") == 3 and "0 beyond a bound" in done.stdout

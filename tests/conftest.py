"""Lets the tests run from an uninstalled clone as well: without an installed mesh_mpi, the one beside this folder is used."""

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

if importlib.util.find_spec("mesh_mpi") is None:
    sys.path.insert(0, str(ROOT))

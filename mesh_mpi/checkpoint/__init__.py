"""Checkpoints: every variable of a state in one HDF5 file that a person can read, whatever the mesh.

Invariant: a checkpoint under its own name is whole and was read back; only this package and ``data`` import h5py.
"""

from .difference import compare as compare
from .difference import statistics as statistics
from .folder import resolve as resolve
from .format import describe as describe
from .format import read_configuration as read_configuration
from .integrity import verify as verify
from .reader import load as load
from .search import find as find
from .writer import SaveReport as SaveReport
from .writer import save as save

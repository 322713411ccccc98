"""mesh_mpi: Transformers of any size on meshes of MPI ranks, written once with named dimensions.

Invariant: importing this package initialises no MPI and imports neither CuPy nor h5py. It does decide how this process ends: an
uncaught MeshMpiError is its message and exit code 2 (see runtime/abort.py).
"""

from .compiler.compile import compile as compile
from .compiler.program import Program as Program
from .dims import Dimension as Dimension
from .dims import Shape as Shape
from .errors import MeshMpiError as MeshMpiError
from .graph.gradients import gradients as gradients
from .graph.initializers import constant_value as constant_value
from .graph.initializers import fan_in_normal as fan_in_normal
from .graph.initializers import normal as normal
from .graph.initializers import ones as ones
from .graph.initializers import truncated_normal as truncated_normal
from .graph.initializers import uniform as uniform
from .graph.initializers import zeros as zeros
from .graph.scope import rules_of as rules_of
from .graph.scope import scope as scope
from .graph.tensor import Tensor as Tensor
from .graph.variable import Accumulator as Accumulator
from .graph.variable import Variable as Variable
from .graph.variable import placeholder as placeholder
from .layout import Rules as Rules
from .log import say as say  # before the operations: the module must not take the name of the function log
from .mesh import Mesh as Mesh
from .ops import *  # noqa: F403
from .runtime import abort as _abort
from .runtime.state import State as State

__version__ = "0.1.0"
_abort.install()

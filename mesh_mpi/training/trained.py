"""What a run left behind, taken up again without its optimizer: its configuration and its parameters.

Invariant: a checkpoint's own configuration says what the model is; only where and in what form it runs may be set anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ..checkpoint import find, load, read_configuration
from ..compiler.program import Program
from ..config import Config, loads
from ..config_schema import BATCH_FORMS
from ..errors import ConfigError
from ..mesh import Mesh
from ..runtime.agreement import on_rank_0
from ..runtime.machine import any_machine, choose_machine
from ..runtime.state import State

FREE = ("mesh_shape", "layout", "storage", "strict_layout", "float_type", *BATCH_FORMS, "data", "train.microbatches",
        "train.tokens_per_microbatch_per_replica")  # what may be other than in training: all that changes no parameter


class Trained(NamedTuple):
    """A checkpoint: its configuration with overrides, the HDF5 file, and the machine of its mesh."""

    config: Config
    path: Path
    machine: object

    def state(self, programs: Sequence[Program], seed: int = 0) -> State:
        """Return a State of ``programs`` with the checkpoint's parameters.

        Comm    collective; each rank reads its slices. Raises CheckpointError, alike on every rank, if they do not fit the programs.
        """
        state = State(programs, seed, self.machine)
        load(state, self.path, only="parameters", verified=True)
        return state


def open_trained(source: str, overrides: Sequence[str], command: str) -> Trained:
    """Return what ``source`` (a run's folder: its latest checkpoint; or a checkpoint) was trained with, ``key=value`` overrides on top.

    Comm    collective; ranks share the reading. Raises CheckpointError (damaged or missing), ConfigError (an override that would make it
            another model), MeshError (another number of ranks), alike on every rank.
    """
    for text in overrides:
        key = text.partition("=")[0].strip()
        if not any(key == free or key.startswith(f"{free}.") for free in FREE):
            raise ConfigError(f"{command}: {key} is the checkpoint's and cannot be set. What may be set: {', '.join(FREE)}.")
    machine = any_machine()
    path = find(None, source, machine)
    text = on_rank_0(machine, f"{command} {source}", lambda: read_configuration(path))
    config = loads(text, f"the configuration in {path}", overrides)
    return Trained(config, path, choose_machine(Mesh(config.mesh_shape)))

"""Loading: each rank reads its own slices of the one file, whatever mesh, layout or float type saved them.

Invariant: names, shapes and element types are compared, all of them, before the first byte of the state changes; if reading fails
later, the state counts as not complete until it is loaded again.
"""

from __future__ import annotations

import h5py
import numpy as np

from ..compiler.program import Bound
from ..errors import CheckpointError
from ..runtime.agreement import on_every_rank, on_rank_0
from ..runtime.state import State
from .format import Dataset, Description, describe, opened
from .integrity import verify
from .streaming import extent

PARAMETERS = "parameters"


def load(state: State, path, only: str = "all", verified: bool = False) -> dict[str, int | float]:
    """Set the variables of ``state`` from a checkpoint (its folder, its file, or a run's latest) and return its counters, step and seed.

    ``only="parameters"`` sets the parameters and leaves the optimizer as it is (``init_from``). ``verified=True``: every array's
    checksum was compared just now (by ``find``), and is not again. Nothing is returned of the checkpoint's configuration.

    Shape   global shapes must agree; float32 and float64 are converted into one another, other element types must agree.
    Comm    collective: the description comes from rank 0; arrays are read by each rank itself, only its slices.
    Raises  CheckpointError, alike on every rank: damaged, or, naming each variable with both shapes, not of this model.
    """
    machine = state.machine
    if only not in ("all", PARAMETERS):
        raise CheckpointError(f"load {path}: only={only!r} is neither 'all' nor {PARAMETERS!r}. Choose one of these.")
    found = on_rank_0(machine, f"load {path}", lambda: describe(path)) if verified else verify(path, machine)
    if not found.is_checkpoint:
        raise CheckpointError(f"load {path}: {found.path} is a file of tokens. Give a checkpoint.")
    wanted = {name: state.variables[name] for name in state.saved_names if only == "all" or state.variables[name].variable.storage_class == PARAMETERS}
    stored = {d.name: d for d in found.datasets if only == "all" or d.group == PARAMETERS}
    _refuse_differences(found, stored, wanted)
    state.expect_all(wanted, f"load of {path}")
    on_every_rank(machine, f"load {path}", lambda: _read_all(state, found, stored, wanted))
    return dict(found.values)


def _refuse_differences(found: Description, stored: dict[str, Dataset], wanted: dict[str, Bound]) -> None:
    """Raise one CheckpointError that names every variable in which checkpoint and model differ."""
    faults = []
    for name in dict.fromkeys([*wanted, *stored]):
        dataset, b = stored.get(name), wanted.get(name)
        if dataset is None:
            faults.append(f"{name}{_shape(b)} {b.value.dtype} is not in the checkpoint")
        elif b is None:
            faults.append(f"{name}{dataset} {dataset.dtype} is not in the model")
        elif dataset.shape != b.shape or _reordered(dataset.dims, b):
            faults.append(f"{name} is {dataset} in the checkpoint and {_shape(b)} in the model")
        elif dataset.dtype != b.value.dtype and not (_is_float(dataset.dtype) and _is_float(b.value.dtype)):
            faults.append(f"{name}{dataset} is {dataset.dtype} in the checkpoint and {b.value.dtype} in the model")
    if faults:
        raise CheckpointError(f"load {found.path}: {len(faults)} variable{'s differ' if len(faults) > 1 else ' differs'}: {'; '.join(faults)}. "
                              "Use the model's configuration that the checkpoint was saved with (mesh-mpi inspect --config shows it), or another checkpoint.")


def _shape(b: Bound) -> str:
    return f"[{', '.join(map(repr, b.dims))}]"


def _reordered(dims: tuple[str, ...], b: Bound) -> bool:
    """Return whether the same dimensions stand in another order: sizes may agree by chance, meanings do not."""
    names = tuple(d.name for d in b.dims)
    return dims != names and sorted(dims) == sorted(names)


def _is_float(dtype: str) -> bool:
    return np.dtype(dtype).kind == "f"


def _read_all(state: State, found: Description, stored: dict[str, Dataset], wanted: dict[str, Bound]) -> None:
    with opened(found.path) as file:
        for name, b in wanted.items():
            state.assign(name, _Reader(file[stored[name].path], found, name, b.value.dtype))


class _Reader:
    """What ``State.assign`` asks for slices; ranks of one process that hold the same slices share one reading."""

    def __init__(self, item: h5py.Dataset, found: Description, name: str, dtype: str):
        self.item, self.found, self.name, self.dtype = item, found, name, np.dtype(dtype)
        self._last: tuple = (None, None)

    def __call__(self, slices: tuple[slice, ...]) -> np.ndarray:
        key = [(s.start, s.stop) for s in slices]
        if self._last[0] != key:
            self._last = (key, self._read(slices))
        return self._last[1]

    def _read(self, slices) -> np.ndarray:
        array = np.empty(extent(slices), self.item.dtype)
        if slices:
            self.item.read_direct(array, slices)
        else:
            array[...] = self.item[()]
        try:
            with np.errstate(over="raise"):
                return array.astype(self.dtype, copy=False)
        except FloatingPointError:
            raise CheckpointError(f"load {self.found.path}: {self.name} holds numbers of {self.item.dtype} beyond the largest {self.dtype}. "
                                  f"Train in {self.item.dtype}.") from None

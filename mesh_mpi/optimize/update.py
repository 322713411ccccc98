"""What every optimizer is given besides variables and gradients, and how it names its slots.

Invariant: slots are variables ``<variable>/<slot>`` of the storage class ``optimizer``, made under that class's rules.
"""

from __future__ import annotations

import contextlib
from typing import NamedTuple

from ..graph.scope import inside, rules_of
from ..graph.tensor import Tensor
from ..graph.variable import Variable


class UpdateInputs(NamedTuple):
    """Scalars: ``learning_rate`` (floating), ``step`` (int64, from 1), ``scale`` (what the gradient is multiplied by), ``apply`` (int32; 0: change nothing)."""

    learning_rate: Tensor
    step: Tensor
    scale: Tensor
    apply: Tensor


def slot(variable: Variable, name: str, dims=None) -> Variable:
    """Make the slot ``<variable>/<name>``, zeros, with the variable's dimensions unless others are given."""
    return Variable(name, variable.shape if dims is None else dims, dtype=variable.dtype, storage_class="optimizer", trainable=False)


@contextlib.contextmanager
def of_optimizer(variable: Variable):
    """Name what is made inside after ``variable`` and place it by the optimizer's rules."""
    with inside(variable.full_name), rules_of("optimizer"):
        yield


def decays(variable: Variable) -> bool:
    """Tell whether weight decay applies: to variables of two dimensions or more that are no bias."""
    return len(variable.shape) > 1 and variable.full_name.rsplit("/", 1)[-1] != "bias"

"""Every operation against the five oracles of docs/architecture.md section 6."""

from __future__ import annotations

import pytest
from oracles import harness
from oracles.harness import graph_of, legal_layouts, rng_of
from oracles.samples import SAMPLES, TRIED, kinds_without_samples, named

from mesh_mpi.graph.operation import NO_GRADIENT, REGISTRY

every_sample = pytest.mark.parametrize("sample", SAMPLES, ids=named)


def show(faults: list[str]) -> None:
    """Fail with the first faults."""
    if faults:
        pytest.fail(f"{len(faults)} faults:\n  " + "\n  ".join(faults[:12]), pytrace=False)


def test_every_registered_operation_has_a_sample():
    assert not kinds_without_samples(), "write samples for these in tests/oracles/"


def test_inputs_called_constant_have_no_gradient_and_samples_have_distinct_names():
    assert len({sample.name for sample in SAMPLES}) == len(SAMPLES)
    for sample in SAMPLES:
        graph = graph_of(sample, "float64")
        if sample.constants and len(sample.constants) == sum(g.dtype == "float" for g in sample.inputs.values()):
            assert any(REGISTRY[kind].vjp is NO_GRADIENT for kind in graph.kinds), sample.name


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@every_sample
def test_one_rank_gives_what_the_formula_gives(sample, dtype):
    show(harness.against_reference(sample, dtype))


@every_sample
def test_gradients_are_the_slopes_of_the_formula(sample):
    show(harness.against_differences(sample))


@every_sample
def test_every_legal_layout_gives_the_answer_of_one_rank_and_moves_the_bytes_it_states(sample):
    legal = legal_layouts(sample)
    TRIED[sample.name] = (len(legal.small), len(legal.large), legal.n_illegal, legal.n_all)
    assert legal.small, "no layout is legal"
    faults = []
    for layout in [*legal.small, *legal.large]:
        faults += harness.against_one_rank(sample, "float64", layout)
    for layout in _some(sample, legal, 24):
        faults += harness.against_one_rank(sample, "float32", layout)
    show(faults)


@every_sample
def test_memory_that_is_reused_gives_the_same_bits_as_memory_that_is_not(sample):
    legal = legal_layouts(sample)
    show([fault for layout in [harness.WHOLE, *_some(sample, legal, 3)] for fault in harness.against_no_reuse(sample, "float32", layout)])


def _some(sample, legal, n):
    """Return a fixed-seed choice of n legal layouts."""
    every = [*legal.small, *legal.large]
    return [every[i] for i in sorted(rng_of(sample.name, "some", n).permutation(len(every))[:n])]

"""Every communication of a training step is needed: taken out, or done twice, the step comes out different.

A small Transformer with dropout, clipping and Adam, in float64, two steps. A group of reductions is taken apart, so that each of its
members is taken out and doubled alone. What changes nothing is listed below, with the reason.
"""

from __future__ import annotations

import numpy as np
import pytest
from oracles.mutate import collectives_of, doubled, removed, replaced

import mesh_mpi as mm
from mesh_mpi.config import parse
from mesh_mpi.spmd.instruction import Instruction
from mesh_mpi.training.step import build

MODEL = {"d_model": 8, "d_ff": 16, "heads": 4, "d_kv": 2, "layers": 1, "vocab_size": 14, "vocab_multiple": 16, "length": 4, "dropout": 0.1}
LAYOUTS = {
    "data and model": ("batch:data;d_ff:model;heads:model;vocab:model", {}),
    "slots split": ("batch:data;d_ff:model;heads:model;vocab:model", {"optimizer": "d_model:data"}),
    "parameters and slots split": ("batch:data;d_ff:model;heads:model;vocab:model", {"optimizer": "d_model:data", "parameters": "d_model:data"}),
    "sequence split too": ("batch:data;d_ff:model;heads:model;length:model;loss_length:model", {}),
}
HARMLESS = {"a maximum taken twice is the same maximum": lambda mutation, i: mutation is doubled and i.params.get("reduce") == "max",
            "what is gathered or exchanged twice from the same operand is the same": lambda mutation, i: mutation is doubled and i.name in (
                "allgather", "alltoall", "swap")}
TOLERANCE = 1e-9


def step_program(name):
    """Compile the step under one of the layouts, its groups taken apart."""
    layout, storage = LAYOUTS[name]
    program = build(parse({"model": MODEL, "mesh_shape": "data:2;model:2", "layout": layout, "storage": storage, "sequences_per_batch": 4,
                           "float_type": "float64", "optimizer": {"name": "adam", "clip_norm": 0.5}})).step_program
    for position in reversed(collectives_of(program)):
        i = program.instructions[position]
        if len(i.outputs) > 1:
            program = replaced(program, position, [Instruction(i.name, [out], [source], i.params, f"{i.origin}, member {k}", i.axes)
                                                   for k, (out, source) in enumerate(zip(i.outputs, i.inputs))])
    return program


def two_steps(program) -> list[np.ndarray]:
    """Run two steps and return every output of both and every variable, as every rank holds them."""
    state = mm.State([program], seed=3)
    rng = np.random.default_rng(5)
    found = []
    for step in (1, 2):
        tokens = rng.integers(1, 14, (4, 5)).astype(np.int32)
        targets = np.where(rng.random((4, 4)) < 0.3, -1, tokens[:, 1:])  # rows with different numbers of targets
        state.run(program, inputs=tokens[:, :-1], targets=targets, learning_rate=0.05, step=step, row_offset=0)
        for b in program.outputs.values():
            found += [m.view(program.plan, b.value).astype(np.float64) for m in state.memories]
    return found + [piece.array.astype(np.float64) for name in program.variables for piece in state.pieces(name)]


def largest_difference(a, b) -> float:
    """Return the largest relative difference between two lists of arrays; infinite where a number is lost."""
    worst = 0.0
    for x, y in zip(a, b, strict=True):
        with np.errstate(all="ignore"):
            off = np.max(np.abs(x - y)) / max(float(np.max(np.abs(x))), 1e-12)
        worst = max(worst, float(off) if np.isfinite(off) else np.inf)
    return worst


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_communication_of_a_training_step_is_needed_and_needed_once(name):
    program = step_program(name)
    right = two_steps(program)
    assert largest_difference(right, two_steps(program)) == 0.0
    harmless, found = [], dict.fromkeys(HARMLESS, 0)
    for position in collectives_of(program):
        instruction = program.instructions[position]
        for mutation in (removed, doubled):
            reason = next((r for r, applies in HARMLESS.items() if applies(mutation, instruction)), None)
            changed = largest_difference(right, two_steps(mutation(program, position))) > TOLERANCE
            if reason is not None:
                found[reason] += 1
            if changed == (reason is not None):
                harmless.append(f"{mutation.__name__} {instruction.name} over {'*'.join(instruction.axes)} for {instruction.origin}: "
                                + ("changes something, though listed as harmless" if changed else "changes nothing"))
    assert not harmless, "\n".join(harmless)
    assert sum(found.values()) < 2 * len(collectives_of(program)), "not everything is harmless"


def test_the_four_layouts_reduce_scatter_and_gather():
    kinds = {program.instructions[i].name for program in map(step_program, LAYOUTS) for i in collectives_of(program)}
    assert kinds == {"allreduce", "reduce_scatter", "allgather"}, "exchanges are taken out in test_the_checks.py"


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_takes_the_steps_of_one_rank(name):
    layout, storage = LAYOUTS[name]
    settings = {"model": MODEL, "sequences_per_batch": 4, "float_type": "float64", "optimizer": {"name": "adam", "clip_norm": 0.5}}
    one = build(parse(settings)).step_program
    program = step_program(name)
    rng = np.random.default_rng(5)
    tokens = rng.integers(1, 14, (4, 5)).astype(np.int32)
    results = []
    for p in (one, program):
        state = mm.State([p], seed=3, poison=p is one)
        outputs = [state.run(p, inputs=tokens[:, :-1], targets=tokens[:, 1:], learning_rate=0.05, step=step, row_offset=0) for step in (1, 2, 3)]
        results.append(([out["loss_sum"] for out in outputs], {v: state.read(v) for v in p.variables}))
    assert np.allclose(results[0][0], results[1][0], rtol=1e-11), "the losses"
    for variable, value in results[0][1].items():
        assert np.max(np.abs(value - results[1][1][variable])) <= 1e-9 * np.max(np.abs(value)), f"{variable}: Adam divides rounding by rounding, so 1e-9"

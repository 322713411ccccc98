"""The memory plan: in place where that is proved, never over something still needed, close to the least that is possible."""

from __future__ import annotations

import numpy as np
import pytest
from oracles.harness import WHOLE, compiled, legal_layouts
from oracles.memory_check import clobbered, written_once
from oracles.samples import SAMPLES

import mesh_mpi as mm
from mesh_mpi import Dimension
from mesh_mpi.compiler import memory
from mesh_mpi.config import parse
from mesh_mpi.training.step import build

A, B = Dimension("a", 4), Dimension("b", 4)
MODEL = {"d_model": 64, "d_ff": 256, "heads": 4, "d_kv": 16, "layers": 4, "vocab_size": 500, "length": 32, "dropout": 0.1}
MIXED = "batch:data;d_ff:model;heads:model;vocab:model"
PLACES = {"one rank": ("", "", {}), "data": ("data:4", "batch:data", {}), "mixed": ("data:2;model:2", MIXED, {}),
          "slots split": ("data:2;model:2", MIXED, {"optimizer": "d_model:data"}),
          "all split": ("data:4", "batch:data", {"optimizer": "d_model:data", "parameters": "d_model:data"})}


def transformer(place, **changes):
    """Compile the training step of a small language model."""
    mesh_shape, layout, storage = PLACES[place]
    return build(parse({"model": {**MODEL, **changes}, "mesh_shape": mesh_shape, "layout": layout, "storage": storage, "sequences_per_batch": 8,
                        "optimizer": {"name": "adam", "clip_norm": 1.0}})).step_program


def mlp(n_layers=6, mesh_shape="", layout=""):
    """Compile an SGD step of a deep network."""
    batch, d, f = Dimension("batch", 64), Dimension("d", 32), Dimension("f", 64)
    x, variables = mm.placeholder("x", [batch, d]), []
    y = x
    for i in range(n_layers):
        variables += [mm.Variable(f"w{i}", [d, f], mm.normal(0.1)), mm.Variable(f"v{i}", [f, d], mm.normal(0.1))]
        y = mm.einsum([mm.relu(mm.einsum([y, variables[-2]], [batch, f])), variables[-1]], [batch, d])
    grads = mm.gradients(mm.reduce_mean(mm.square(y)), variables)
    return mm.compile(updates=[(w, w - g * 0.1) for w, g in zip(variables, grads)], mesh_shape=mesh_shape, layout=layout)


def copies(program) -> list:
    """Return the copy instructions of a program."""
    return [i for i in program.instructions if i.name == "copy"]


@pytest.mark.parametrize("place", PLACES)
def test_the_arena_of_the_transformer_is_hardly_larger_than_what_is_alive(place):
    program = transformer(place)
    assert program.live_bytes <= program.arena_bytes <= 1.10 * program.live_bytes


@pytest.mark.parametrize("mesh_shape, layout", [("", ""), ("p:2", "batch:p"), ("p:2;q:2", "batch:p;f:q")])
def test_the_arena_of_a_deep_network_is_hardly_larger_than_what_is_alive(mesh_shape, layout):
    program = mlp(12, mesh_shape, layout)
    assert program.live_bytes <= program.arena_bytes <= 1.10 * program.live_bytes


@pytest.mark.parametrize("place", PLACES)
def test_nothing_in_the_transformers_step_reads_what_was_written_over(place):
    program = transformer(place)
    assert clobbered(program) == [] and written_once(program) == []


def test_nothing_in_any_sample_reads_what_was_written_over():
    for sample in SAMPLES:
        legal = legal_layouts(sample)
        for layout in [WHOLE, *legal.small[:3], *legal.large[:1]]:
            program = compiled(sample, "float32", layout)
            assert clobbered(program) == [] and written_once(program) == [], (sample.name, layout)


def test_the_second_opinion_finds_a_plan_that_is_wrong(monkeypatch):
    assert clobbered(mlp()) == []
    right = memory._lay_out

    def short(plan, reuse):
        for block in plan.blocks:
            block.end = max(block.start, block.end - 1)
        right(plan, reuse)
    monkeypatch.setattr(memory, "_lay_out", short)
    assert clobbered(mlp())


def test_without_reuse_no_two_values_share_memory():
    x = mm.placeholder("x", [A, B])
    y = mm.einsum([mm.tanh(mm.einsum([x, x], [A])) * 2.0, x], [B])
    program, shared = (mm.compile({"y": y}, reuse_memory=reuse) for reuse in (False, True))
    starts = [program.plan.address(v.root) for i in program.instructions for v in i.outputs]
    assert len(set(starts)) == len(starts) and program.arena_bytes >= shared.arena_bytes


def test_every_buffer_is_aligned_and_within_the_arena():
    program = transformer("mixed")
    members = {v.root.number for i in program.instructions if len(i.outputs) > 1 for v in i.outputs}
    for block in program.plan.blocks:
        assert block.offset % 64 == 0 and 0 <= block.offset and block.offset + block.size <= program.arena_bytes
    assert members, "groups lie in blocks of their own"


def test_an_update_is_written_in_place():
    w, g = mm.Variable("w", [A, B]), mm.placeholder("g", [A, B])
    program = mm.compile(updates=[(w, w - g * 0.1)])
    assert copies(program) == [] and len(program.instructions) == 1
    assert program.plan.address(program.instructions[0].outputs[0].root) == ("w", 0)


def test_adam_writes_three_variables_in_place_and_a_whole_training_step_copies_no_variable():
    program = transformer("one rank", dropout=0.0)
    written = set(program.written)
    assert not [i for i in copies(program) if i.outputs[0].root.name in written]


def run_twice(updates, **start):
    """Run updates twice and return the variables, by name, after each run."""
    program = mm.compile(updates=updates)
    state = mm.State([program], poison=True)
    for name, value in start.items():
        state.assign(name, value)
    found = []
    for _ in range(2):
        state.run(program)
        found.append({name: state.read(name).tolist() for name in start})
    return program, found


def test_variables_that_change_places_change_places():
    a, b = mm.Variable("a", [A]), mm.Variable("b", [A])
    _, found = run_twice([(a, b), (b, a)], a=np.arange(4.0), b=-np.arange(4.0))
    assert found[0] == {"a": [-0.0, -1, -2, -3], "b": [0, 1, 2, 3]} and found[1] == {"a": [0, 1, 2, 3], "b": [-0.0, -1, -2, -3]}


def test_three_variables_that_rotate_rotate():
    a, b, c = (mm.Variable(n, [A]) for n in "abc")
    _, found = run_twice([(a, b), (b, c), (c, a)], a=np.full(4, 1.0), b=np.full(4, 2.0), c=np.full(4, 3.0))
    assert [found[0][n][0] for n in "abc"] == [2, 3, 1] and [found[1][n][0] for n in "abc"] == [3, 1, 2]


def test_all_updates_see_the_values_at_entry():
    a, b = mm.Variable("a", []), mm.Variable("b", [])
    _, found = run_twice([(a, b * 1.0), (b, a + b)], a=np.float32(0), b=np.float32(1))
    assert found == [{"a": 1, "b": 1}, {"a": 1, "b": 2}]
    a, b = mm.Variable("a", []), mm.Variable("b", [])
    _, found = run_twice([(b, a + b), (a, b * 1.0)], a=np.float32(0), b=np.float32(1))
    assert found == [{"a": 1, "b": 1}, {"a": 1, "b": 2}]


def test_two_variables_may_take_the_same_new_value():
    a, b = mm.Variable("a", [A]), mm.Variable("b", [A])
    new = a + b
    _, found = run_twice([(a, new), (b, new)], a=np.full(4, 1.0), b=np.full(4, 2.0))
    assert found == [{"a": [3.0] * 4, "b": [3.0] * 4}, {"a": [6.0] * 4, "b": [6.0] * 4}]


def test_a_square_variable_is_transposed_right():
    w = mm.Variable("w", [A, B])
    values = np.arange(16.0).reshape(4, 4)
    _, found = run_twice([(w, mm.rename(w, {"a": "b", "b": "a"}))], w=values)
    assert found[0]["w"] == values.T.tolist() and found[1]["w"] == values.tolist()
    w = mm.Variable("w", [A, B])
    _, found = run_twice([(w, w + mm.rename(w, {"a": "b", "b": "a"}))], w=values)
    assert found[0]["w"] == (values + values.T).tolist()


def test_a_variable_that_moves_along_itself_moves_right():
    w, five, four = mm.Variable("w", [Dimension("n", 5)]), Dimension("n", 5), Dimension("n", 4)
    _, found = run_twice([(w, mm.pad(mm.slice(w, "n", 0, four), "n", 1, five))], w=np.arange(1.0, 6.0))
    assert found == [{"w": [0, 1, 2, 3, 4]}, {"w": [0, 0, 1, 2, 3]}]


def test_an_output_is_the_value_before_the_update_or_the_one_after_it_as_asked():
    w = mm.Variable("w", [A])
    new = w * 2.0
    program = mm.compile({"old": w, "new": new, "sum": mm.reduce_sum(w)}, [(w, new)])
    state = mm.State([program], poison=True)
    state.assign("w", np.full(4, 3.0))
    out = state.run(program, whole=True)
    assert out["old"].tolist() == [3.0] * 4 and out["new"].tolist() == [6.0] * 4 and out["sum"] == 12.0 and state.read("w").tolist() == [6.0] * 4


def test_a_cache_is_written_in_place():
    cache, x, at = mm.Variable("cache", [Dimension("length", 512), A]), mm.placeholder("x", [A]), mm.placeholder("at", [], "int64")
    program = mm.compile(updates=[(cache, mm.write(cache, {"length": at}, x))])
    assert [i.name for i in program.instructions] == ["write_at"] and program.arena_bytes < 1024


def test_a_gradient_kept_in_an_accumulator_and_used_at_once_is_kept_right():
    batch = Dimension("batch", 8)
    x = mm.placeholder("x", [batch, A])
    sums = [mm.reduce_sum(x, "batch"), mm.reduce_sum(x * x, "batch")]
    kept = [mm.Accumulator(f"kept{i}", [A]) for i in range(2)]
    used = [mm.Variable(f"used{i}", [A]) for i in range(2)]
    settings = {"mesh_shape": "data:2", "layout": "batch:data"}
    first = mm.compile(updates=[*zip(kept, sums), *zip(used, sums)], **settings)
    second = mm.compile({"kept0": kept[0] * 1.0, "kept1": kept[1] * 1.0}, like=first, **settings)
    state, values = mm.State([first, second]), np.arange(32.0, dtype=np.float32).reshape(8, 4)
    state.run(first, x=values)
    out = state.run(second, whole=True)
    for i, expected in enumerate((values.sum(0), (values * values).sum(0))):
        assert out[f"kept{i}"].tolist() == state.read(f"used{i}").tolist() == expected.tolist()


def test_gradients_die_as_soon_as_they_are_applied():
    n = 12
    one = 32 * 64 * 4
    program = mlp(n)
    activations = n * 64 * (64 + 32) * 4
    assert program.arena_bytes < activations + 8 * one, "the gradients together are 24 times one"


def test_what_is_alive_is_what_is_needed_at_once():
    x = mm.placeholder("x", [Dimension("n", 1024)])
    for _ in range(40):
        x = mm.softmax(mm.tanh(x), "n")
    assert mm.compile({"y": x}).arena_bytes <= 3 * 4096

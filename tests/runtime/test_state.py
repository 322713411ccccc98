"""State on the simulated machine: runs, feeds, variables that programs share, memory."""

from __future__ import annotations

import time
import tracemalloc

import numpy as np
import pytest
from runtime.two_layers import BATCH, D_FF, D_MODEL, batch_of, reference, training_step

import mesh_mpi as mm
from mesh_mpi.errors import DtypeError, GraphError, MeshError, ShapeError
from mesh_mpi.runtime.banner import banner
from mesh_mpi.runtime.recorder import Recorder
from mesh_mpi.runtime.simulated import SimulatedMachine
from mesh_mpi.runtime.state import Slice

LAYOUTS = [("", ""), ("data:2", "batch:data"), ("model:4", "d_ff:model"), ("model:2", "d_model:model"),
           ("data:2;model:2", "batch:data;d_ff:model"), ("data:2;model:2", "batch:data;d_model:model"),
           ("data:2;model:2", "d_ff:data;d_model:model"), ("data:2;model:3", "batch:data;d_model:model"), ("data:4;model:2", "batch:data;d_ff:model")]


@pytest.mark.parametrize("mesh_shape, layout", LAYOUTS)
def test_every_mesh_and_layout_trains_as_the_formulas_do(mesh_shape, layout):
    step = training_step(mesh_shape, layout, "float64")
    state = mm.State([step], seed=3)
    x, w, v = batch_of(0, "float64"), state.read("w"), state.read("v")
    losses, w, v = reference(4, w, v, x)
    got = [state.run(step, x=x)["loss"] for _ in range(4)]
    np.testing.assert_allclose(got, losses, rtol=1e-12)
    np.testing.assert_allclose(state.read("w"), w, rtol=1e-11, atol=1e-14)
    np.testing.assert_allclose(state.read("v"), v, rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("mesh_shape, layout", LAYOUTS[1:])
def test_initial_values_do_not_depend_on_mesh_or_layout_to_the_bit(mesh_shape, layout):
    one, many = mm.State([training_step()], seed=5), mm.State([training_step(mesh_shape, layout)], seed=5)
    for name in ("w", "v"):
        np.testing.assert_array_equal(one.read(name), many.read(name))
    assert np.abs(mm.State([training_step()], seed=6).read("w") - one.read("w")).max() > 0.1


@pytest.mark.parametrize("mesh_shape, layout", LAYOUTS)
def test_what_a_recorder_sees_is_what_the_program_predicts(mesh_shape, layout):
    step = training_step(mesh_shape, layout)
    machine = SimulatedMachine(step.mesh)
    state = mm.State([step], machine=machine)
    machine.recorder = Recorder()
    state.run(step, x=batch_of())
    assert machine.recorder.calls == [(c.name, c.axes, c.payload_bytes) for c in step.collectives()]


@pytest.mark.parametrize("mesh_shape, layout", LAYOUTS)
def test_poisoned_memory_and_memory_without_reuse_give_the_same_bits(mesh_shape, layout):
    step, roomy = training_step(mesh_shape, layout), training_step(mesh_shape, layout, reuse_memory=False)
    states = [mm.State([step]), mm.State([step], poison=True), mm.State([roomy])]
    for i in range(3):
        outs = [s.run(p, x=batch_of(i), whole=True) for s, p in zip(states, (step, step, roomy))]
        for out in outs[1:]:
            assert out["loss"] == outs[0]["loss"]
            np.testing.assert_array_equal(out["y"], outs[0]["y"])
    for s in states[1:]:
        for name in ("w", "v"):
            np.testing.assert_array_equal(s.read(name), states[0].read(name))


def test_poison_shows_a_block_that_ends_too_early():
    step = training_step()
    product = next(i for i, x in enumerate(step.instructions) if x.name == "matmul")
    block = step.plan.place[step.instructions[product].outputs[0].root.number][0]
    block.end = product  # a plan that lets go of the first product before its reader
    assert np.isnan(mm.State([step], poison=True).run(step, x=batch_of())["loss"])


def test_a_scalar_comes_back_as_a_number_others_as_slices_or_whole():
    step = training_step("data:2;model:2", "batch:data;d_model:model")
    state = mm.State([step])
    out = state.run(step, x=batch_of())
    assert isinstance(out["loss"], np.float32) and isinstance(out["y"], Slice)
    assert out["y"].array.shape == (BATCH // 2, D_MODEL // 2) and out["y"].slices == (slice(0, BATCH // 2), slice(0, D_MODEL // 2))
    again = mm.State([step]).run(step, x=batch_of(), whole="y")["y"]
    assert again.shape == (BATCH, D_MODEL)
    np.testing.assert_array_equal(again[out["y"].slices], out["y"].array)
    before = out["y"].array.copy()
    state.run(step, x=batch_of(9))
    np.testing.assert_array_equal(out["y"].array, before)


def test_a_callable_is_asked_once_for_each_slice():
    step = training_step("data:2;model:2", "batch:data;d_ff:model")
    x, asked = batch_of(), []

    def rows(slices):
        asked.append(slices)
        return x[slices]

    loss = mm.State([step]).run(step, x=rows)["loss"]
    half = BATCH // 2
    assert asked == [(slice(0, half), slice(0, D_MODEL)), (slice(half, BATCH), slice(0, D_MODEL))]
    assert loss == mm.State([step]).run(step, x=x)["loss"]


@pytest.mark.parametrize("feeds, error, words", [
    ({}, GraphError, "no feed for x[batch=8/data, d_model=12]"),
    ({"x": batch_of(), "y": 1}, GraphError, "no placeholder 'y'"),
    ({"x": batch_of()[:4]}, ShapeError, r"shape [4, 12] was given, and x[batch=8, d_model=12] takes [8, 12]"),
    ({"x": batch_of().astype(complex)}, DtypeError, "complex128 was given for float32"),
    ({"x": lambda slices: batch_of()}, ShapeError, r"feed x, slice [0:4, 0:12]: an array of shape [8, 12]"),
    ({"x": [["a"] * 12] * 8}, DtypeError, "float32"),
])
def test_a_wrong_feed_is_an_error_before_anything_runs(feeds, error, words):
    step = training_step("data:2", "batch:data")
    state = mm.State([step])
    with pytest.raises(error) as raised:
        state.run(step, **feeds)
    assert words in str(raised.value) and state.usable
    state.assert_complete()


def test_whole_numbers_are_fed_only_if_they_fit():
    n = mm.Dimension("n", 3)
    ids, k = mm.placeholder("ids", [n], "int32"), mm.placeholder("k", (), "float32")
    program = mm.compile(outputs={"y": mm.cast(ids, "float32") * k})
    state = mm.State(program)
    np.testing.assert_array_equal(state.run(program, ids=np.array([1, 2, 2**31 - 1]), k=2, whole=["y"])["y"], [2, 4, 2.0**32])
    with pytest.raises(DtypeError, match="from 0 to 2147483648 do not fit int32"):
        state.run(program, ids=np.array([0, 1, 2**31]), k=2)
    with pytest.raises(DtypeError, match="float64 was given for int32"):
        state.run(program, ids=np.array([0.5, 1, 2]), k=2)
    with pytest.raises(ShapeError):
        state.run(program, ids=np.array([0, 1, 2]), k=[2.0])


def test_the_seed_feeds_itself_and_must_be_a_64_bit_number():
    step = training_step()
    mm.State([step], seed=2**64 - 1)
    with pytest.raises(GraphError, match="seed"):
        mm.State([step], seed=-1)


def test_two_programs_share_variables_and_one_arena():
    step, other = training_step("data:2", "batch:data"), training_step("data:2", "batch:data", name="slow", rate=0.0)
    state = mm.State([step, other])
    assert state.arena_bytes == max(step.arena_bytes, other.arena_bytes)
    assert state.variable_bytes == 2 * D_MODEL * D_FF * 4 and state.peak_bytes == state.arena_bytes + state.variable_bytes
    w = state.read("w")
    first = state.run(other, x=batch_of())["loss"]
    np.testing.assert_array_equal(state.read("w"), w)
    assert state.run(step, x=batch_of())["loss"] == first
    assert state.run(other, x=batch_of())["loss"] < first


@pytest.mark.parametrize("options, error, words", [
    (("data:4", "batch:data"), MeshError, "mesh [data=2;"[:12]),
    (("data:2", "d_ff:data"), GraphError, "variable 'w'"),
    (("data:2", "batch:data", "float64"), GraphError, "float64"),
])
def test_programs_that_do_not_agree_about_variables_are_refused(options, error, words):
    with pytest.raises(error) as raised:
        mm.State([training_step("data:2", "batch:data"), training_step(*options, name="other")])
    assert words in str(raised.value) and "other" in str(raised.value)


def test_variables_are_read_whole_and_assigned_by_slices():
    step = training_step("data:2;model:2", "batch:data;d_ff:model")
    state = mm.State([step])
    new = np.arange(D_MODEL * D_FF, dtype=np.float32).reshape(D_MODEL, D_FF)
    state.assign("w", new)
    np.testing.assert_array_equal(state.read("w"), new)
    state.assign("w", lambda slices: -new[slices])
    np.testing.assert_array_equal(state.read("w"), -new)
    assert state.slices("w") == (slice(0, D_MODEL), slice(0, D_FF // 2))
    assert [p.is_owner for p in state.pieces("w")] == [True, True, False, False]
    with pytest.raises(ShapeError, match="Give the global array"):
        state.assign("w", new[:, :3])
    with pytest.raises(GraphError, match="Did you mean 'w'"):
        state.read("ww") if "ww" in state.variables else state.read("w_")


def test_a_run_that_fails_makes_the_state_refuse_to_be_saved_until_all_is_assigned():
    step = training_step("data:2", "batch:data")
    state = mm.State([step])
    ready = state._ready[id(step)]

    def broken():
        raise RuntimeError("in the middle")

    state._ready[id(step)] = ready._replace(calls=(*ready.calls[:5], broken))
    with pytest.raises(RuntimeError):
        state.run(step, x=batch_of())
    assert not state.usable
    with pytest.raises(GraphError, match="'step' did not finish"):
        state.assert_complete()
    with pytest.raises(GraphError, match="did not finish"):
        state.read("w")
    state._ready[id(step)] = ready
    state.run(step, x=batch_of())
    assert not state.usable
    state.assign("w", np.zeros((D_MODEL, D_FF), np.float32))
    assert not state.usable
    state.assign("v", np.zeros((D_FF, D_MODEL), np.float32))
    state.assert_complete()


def test_an_accumulator_starts_at_zero_and_is_not_saved():
    n = mm.Dimension("n", 4)
    x, w, total = mm.placeholder("x", [n]), mm.Variable("w", [n]), mm.Accumulator("total", [n])
    program = mm.compile(outputs={"w": w + total}, updates=[(total, total + x)])
    state = mm.State(program)
    assert state.saved_names == ["w"]
    np.testing.assert_array_equal(state.run(program, x=np.ones(4), whole=True)["w"], np.zeros(4))
    np.testing.assert_array_equal(state.run(program, x=np.ones(4), whole=True)["w"], np.ones(4))


def test_every_buffer_is_aligned_and_written_once_before_the_first_run():
    step = training_step("data:2", "batch:data")
    state = mm.State([step])
    for memory in state.memories:
        for buffer in (memory.arena, *memory.variables.values()):
            assert buffer.ctypes.data % 64 == 0


def test_a_step_allocates_nothing_and_costs_little_beside_its_kernels():
    step, x = training_step("data:2;model:2", "batch:data;d_ff:model"), batch_of()
    state = mm.State([step])
    state.run(step, x=x)
    tracemalloc.start()
    state.run(step, x=x)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 18
    times = []
    for _ in range(20):
        start = time.perf_counter()
        state.run(step, x=x)
        times.append(time.perf_counter() - start)
    assert min(times) < 0.02  # four ranks of some twenty kernels of microseconds each


def test_the_banner_says_what_runs_where():
    text = banner(mm.State([training_step("data:2", "batch:data")]))
    assert "mesh [data=2]: simulated, 2 ranks in one process" in text and "mesh_mpi 0." in text and "program step" in text


def test_a_program_of_another_state_and_an_unknown_output_are_refused():
    step = training_step()
    state = mm.State([step])
    with pytest.raises(GraphError, match="not of this state"):
        state.run(training_step(), x=batch_of())
    with pytest.raises(GraphError, match="no output 'z'"):
        state.run(step, x=batch_of(), whole=["z"])
    with pytest.raises(MeshError):
        mm.State([step], machine=SimulatedMachine(mm.Mesh("data:2")))


@pytest.mark.parametrize("mesh_shape, layout", LAYOUTS)
def test_a_step_in_microbatches_equals_the_step_in_one_program(mesh_shape, layout):
    """{first, more, apply}: the accumulator holds the unreduced gradient, and apply reduces it once."""
    batch, d_model, d_ff = mm.Dimension("batch", BATCH), mm.Dimension("d_model", D_MODEL), mm.Dimension("d_ff", D_FF)
    x = mm.placeholder("x", [batch, d_model], "float64")
    w = mm.Variable("w", [d_model, d_ff], init=mm.normal(stddev=0.4), dtype="float64")
    total = mm.Accumulator("total", [d_model, d_ff], "float64")
    (dw,) = mm.gradients(mm.reduce_sum(mm.reduce_sum(mm.square(mm.relu(mm.einsum([x, w], [batch, d_ff]))), batch), d_ff), [w])
    where = {"mesh_shape": mesh_shape, "layout": layout}
    whole = mm.compile(updates=[(w, w - 0.01 * dw)], name="whole", **where)
    first = mm.compile(updates=[(total, dw)], name="first", **where)
    more = mm.compile(updates=[(total, total + dw)], name="more", like=first, **where)
    last = mm.compile(updates=[(w, w - 0.01 * total)], name="apply", like=first, **where)
    one, parts = mm.State([whole], seed=2), mm.State([first, more, last], seed=2, poison=True)
    data = batch_of(4, "float64")
    for _ in range(2):
        one.run(whole, x=data)
        parts.run(first, x=data * (np.arange(BATCH) < 4)[:, None])
        parts.run(more, x=data * (np.arange(BATCH) >= 4)[:, None])
        parts.run(last)
    np.testing.assert_allclose(parts.read("w"), one.read("w"), rtol=1e-11, atol=1e-14)
    assert not [c for c in first.collectives() if c.axes == ("data",) and c.payload_bytes >= total.shape.size * 8]

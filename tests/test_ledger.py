"""Communication against closed formulas that are typed in here: payload bytes of one rank, by the set of mesh axes."""

from __future__ import annotations

import numpy as np
import pytest
from oracles.harness import Watch

import mesh_mpi as mm
from mesh_mpi import Dimension
from mesh_mpi.config import parse
from mesh_mpi.optimize import Adafactor, UpdateInputs
from mesh_mpi.training.step import build

F32 = 4  # bytes


def payloads(program) -> dict[tuple[str, ...], int]:
    """Return the payload bytes of one rank by the axes of the collective."""
    found: dict[tuple[str, ...], int] = {}
    for c in program.collectives():
        found[c.axes] = found.get(c.axes, 0) + c.payload_bytes
    return found


def watched(programs, seed=0):
    """Return a simulated state and its watching machine."""
    machine = Watch(programs[0].mesh)
    return mm.State(programs, seed=seed, machine=machine), machine


# -- the two-layer network of the paper --------------------------------------------------------

B, DX, DH = 8, 4, 6
BATCH, IO, HIDDEN = Dimension("batch", B), Dimension("io", DX), Dimension("hidden", DH)


def two_layers(mesh_shape, layout):
    """Compile loss = mean y^2 of relu(x w) v and the gradients of w and v."""
    x, w, v = mm.placeholder("x", [BATCH, IO]), mm.Variable("w", [IO, HIDDEN], mm.normal()), mm.Variable("v", [HIDDEN, IO], mm.normal())
    y = mm.einsum([mm.relu(mm.einsum([x, w], [BATCH, HIDDEN])), v], [BATCH, IO])
    loss = mm.reduce_mean(mm.square(y))
    dw, dv = mm.gradients(loss, [w, v])
    return mm.compile({"loss": loss, "dw": dw, "dv": dv}, mesh_shape=mesh_shape, layout=layout)


TWO_LAYERS = {  # mesh, layout, bytes by axes; the weights' gradients are dw and dv, of DX DH elements each; the loss is one number
    "none": ("", "", {}),
    "data parallel": ("all:2", "batch:all", {("all",): (2 * DX * DH + 1) * F32}),
    "model parallel": ("all:2", "hidden:all", {("all",): B * DX * F32}),
    "mixed": ("r:2;c:2", "batch:r;hidden:c", {("c",): B // 2 * DX * F32, ("r",): (2 * DX * DH // 2 + 1) * F32}),
    "io and hidden": ("r:2;c:2", "io:r;hidden:c", {("r",): (2 * B * DH // 2 + 1) * F32, ("c",): B * DX // 2 * F32}),
    "batch, io and hidden": ("p:2;r:2;c:2", "batch:p;io:r;hidden:c", {
        ("r",): 2 * B // 2 * DH // 2 * F32, ("c",): B // 2 * DX // 2 * F32, ("p",): 2 * DX // 2 * DH // 2 * F32, ("p", "r"): F32}),
}


@pytest.mark.parametrize("name", TWO_LAYERS)
def test_the_two_layer_network_costs_what_the_papers_table_says(name):
    mesh_shape, layout, expected = TWO_LAYERS[name]
    program = two_layers(mesh_shape, layout)
    assert payloads(program) == expected
    assert {c.name for c in program.collectives()} <= {"allreduce"}
    state, machine = watched([program])
    found = state.run(program, whole=True, x=np.linspace(-1, 1, B * DX, dtype=np.float32).reshape(B, DX))
    assert machine.seen == [(c.name, c.axes, c.payload_bytes) for c in program.collectives()]
    one = two_layers("", "")
    expected_values = mm.State([one]).run(one, whole=True, x=np.linspace(-1, 1, B * DX, dtype=np.float32).reshape(B, DX))
    for key, value in expected_values.items():
        assert np.max(np.abs(found[key] - value)) <= 1e-6 * np.max(np.abs(value)), key


def test_the_elements_summed_over_processors_are_those_counted_on_the_reference_system():
    counted = {"data parallel": {("all",): 96 + 2}, "model parallel": {("all",): 64}, "mixed": {("c",): 64, ("r",): 96 + 4},
               "io and hidden": {("r",): 192 + 4, ("c",): 64}, "batch, io and hidden": {("r",): 192, ("c",): 64, ("p",): 96, ("p", "r"): 8}}
    for name, expected in counted.items():
        program = two_layers(*TWO_LAYERS[name][:2])
        assert {axes: n * program.mesh.size // F32 for axes, n in payloads(program).items()} == expected, name


def test_wire_bytes_are_those_of_a_ring():
    n, payload = 4, B * DX * F32
    c, = [c for c in two_layers("all:2", "hidden:all").collectives()]
    assert c.wire_bytes == 2 * payload * 1 // 2
    x = mm.placeholder("x", [BATCH, IO])
    gathered, = mm.compile({"y": mm.rename(x, {"batch": "n"}) * 1.0}, mesh_shape="p:4", layout="batch:p").collectives()
    assert (gathered.name, gathered.payload_bytes, gathered.wire_bytes) == ("allgather", payload, payload * (n - 1) // n)


# -- moves ---------------------------------------------------------------------------------------

A4, B4 = Dimension("a", 4), Dimension("b", 4)
MOVES = {  # what is moved, mesh, layout, the collectives as (kind, axes, elements summed over processors)
    "split to whole": (lambda x: mm.rename(x, {"a": "n"}), "p:2", "a:p", [("allgather", ("p",), 32)]),
    "whole to split": (lambda x: mm.rename(x, {"a": "n"}), "p:2", "n:p", []),
    "split on another dimension": (lambda x: mm.rename(x, {"a": "n", "b": "m"}), "p:2", "a:p;m:p", [("alltoall", ("p",), 16)]),
    "two dimensions merged, the outer one split": (lambda x: mm.reshape(x, [Dimension("c", 16)]), "p:2", "a:p;c:p", []),
    "4 and 4 to 8 and 2": (lambda x: mm.reshape(x, [Dimension("y", 8), Dimension("z", 2)]), "p:2", "a:p;y:p", []),
    "4 and 4 to 8 and 2, the inner one split": (lambda x: mm.reshape(x, [Dimension("y", 8), Dimension("z", 2)]), "p:2", "a:p;z:p",
                                                [("alltoall", ("p",), 16)]),
    "another axis of the same size": (lambda x: mm.rename(x, {"a": "n"}), "p:2;q:2", "a:p;n:q", [("swap", ("p", "q"), 32)]),
    "two axes crossed": (lambda x: mm.rename(x, {"a": "n", "b": "m"}), "p:2;q:2", "a:p;b:q;n:q;m:p", [("swap", ("p", "q"), 16)]),
    "renamed with the rules agreeing": (lambda x: mm.rename(x, {"a": "n"}), "p:2", "a:p;n:p", []),
}


@pytest.mark.parametrize("name", MOVES)
def test_moving_a_matrix_costs_what_the_cheapest_move_costs(name):
    move, mesh_shape, layout, expected = MOVES[name]
    program = mm.compile({"y": move(mm.placeholder("x", [A4, B4])) * 1.0}, mesh_shape=mesh_shape, layout=layout)
    assert [(c.name, c.axes, c.payload_bytes * program.mesh.size // F32) for c in program.collectives()] == expected


def test_a_sum_that_is_to_be_split_where_it_is_partial_is_scattered_and_not_gathered_first():
    x = mm.placeholder("x", [A4, B4])
    program = mm.compile({"y": mm.rename(mm.reduce_sum(x, "a"), {"b": "n"}) * 1.0}, mesh_shape="p:2", layout="a:p;n:p")
    assert [(c.name, c.payload_bytes) for c in program.collectives()] == [("reduce_scatter", 4 * F32)]


# -- sums that meet ------------------------------------------------------------------------------


def test_two_sums_that_are_added_are_reduced_once():
    x, y = mm.placeholder("x", [A4, B4]), mm.placeholder("y", [A4, B4])
    total = (mm.reduce_sum(x, "b") + mm.reduce_sum(y, "b")) * 1.0
    c, = mm.compile({"y": total}, mesh_shape="p:2", layout="b:p").collectives()
    assert (c.name, c.payload_bytes * 2 // F32) == ("allreduce", 8)


@pytest.mark.parametrize("mesh_shape, layout, ranks", [("model:2", "heads:model", 1), ("data:2;model:2", "batch:data;heads:model", 2)])
def test_the_input_gradients_of_queries_keys_and_values_cost_one_reduction(mesh_shape, layout, ranks):
    batch, length, d_model, heads, d_kv = (Dimension(n, s) for n, s in (("batch", 4), ("length", 2), ("d_model", 8), ("heads", 4), ("d_kv", 2)))
    x = mm.placeholder("x", [batch, length, d_model])
    q, k, v = (mm.einsum([x, mm.Variable(n, [d_model, heads, d_kv])], [batch, length, heads, d_kv]) for n in "qkv")
    dx, = mm.gradients(mm.reduce_sum(mm.square(q) * k * mm.tanh(v)), [x])
    c, = mm.compile({"dx": dx}, mesh_shape=mesh_shape, layout=layout).collectives()
    assert (c.name, c.axes, c.payload_bytes) == ("allreduce", ("model",), 4 * 2 * 8 * F32 // ranks)


# -- microbatches and sharded slots -----------------------------------------------------------------

W = DX * DH * F32


def accumulating(k: int):
    """Compile {first, more, apply} of SGD on x w with loss y^2, for k microbatches, and the whole step."""
    def loss_of(n):
        batch = Dimension("batch", n)
        x, w = mm.placeholder("x", [batch, IO]), mm.Variable("w", [IO, HIDDEN], mm.normal())
        return w, mm.gradients(mm.reduce_sum(mm.square(mm.einsum([x, w], [batch, HIDDEN]))), [w])[0]
    settings = {"mesh_shape": "data:2", "layout": "batch:data"}
    w, g = loss_of(B // k)
    acc = mm.Accumulator("acc", w.shape)
    first = mm.compile(updates=[(acc, g)], name="first", **settings)
    more = mm.compile(updates=[(acc, acc + g)], name="more", like=first, **settings)
    apply = mm.compile(updates=[(w, w - acc * 0.01)], name="apply", like=first, **settings)
    w, g = loss_of(B)
    return [first, more, apply], mm.compile(updates=[(w, w - g * 0.01)], name="step", **settings)


def test_microbatches_cost_one_reduction_of_the_gradient():
    k = 4
    (first, more, apply), step = accumulating(k)
    assert payloads(first) == payloads(more) == {} and payloads(apply) == payloads(step) == {("data",): W}
    x = np.random.default_rng(0).standard_normal((B, DX)).astype(np.float32)
    state, machine = watched([first, more, apply])
    for m in range(k):
        state.run(more if m else first, x=x[m * B // k:(m + 1) * B // k])
    state.run(apply)
    assert machine.seen == [("allreduce", ("data",), W)]
    whole = mm.State([step])
    whole.run(step, x=x)
    assert np.allclose(state.read("w"), whole.read("w"), rtol=1e-5, atol=1e-6)


def test_a_second_step_begins_its_accumulator_anew():
    (first, more, apply), step = accumulating(2)
    x = np.random.default_rng(0).standard_normal((B, DX)).astype(np.float32)
    state, whole = mm.State([first, more, apply]), mm.State([step])
    for _ in range(2):
        state.run(first, x=x[:B // 2])
        state.run(more, x=x[B // 2:])
        state.run(apply)
        whole.run(step, x=x)
    assert np.allclose(state.read("w"), whole.read("w"), rtol=1e-5, atol=1e-6)


def adam_step(storage):
    """Compile one Adam step of the two-layer network, data parallel over 4 ranks."""
    x, w, v = mm.placeholder("x", [BATCH, IO]), mm.Variable("w", [IO, HIDDEN], mm.normal()), mm.Variable("v", [HIDDEN, IO], mm.normal())
    y = mm.einsum([mm.relu(mm.einsum([x, w], [BATCH, HIDDEN])), v], [BATCH, IO])
    updates = []
    scalars = [mm.full([], 0.1), mm.full([], 1, "int64"), mm.full([], 1.0), mm.full([], 1, "int32")]
    for t, g in zip((w, v), mm.gradients(mm.reduce_sum(mm.square(y)), [w, v])):
        with mm.rules_of("optimizer"):
            slots = [mm.Variable(f"{t.full_name}_{n}", t.shape, storage_class="optimizer", trainable=False) for n in "mv"]
            updates += list(zip((t, *slots), mm.adam_update(t, g, *slots, *scalars)))
    return mm.compile(updates=updates, mesh_shape="data:4", layout="batch:data", storage=storage)


ZERO_1, ZERO_3 = {"optimizer": "io:data"}, {"optimizer": "io:data", "parameters": "io:data"}


def test_sharded_slots_cost_a_reduce_scatter_and_an_allgather_of_each_variable_and_a_quarter_of_the_memory():
    plain, sharded = adam_step({}), adam_step(ZERO_1)
    assert [(c.name, c.payload_bytes) for c in plain.collectives()] == [("allreduce", 2 * W)]
    assert sorted((c.name, c.payload_bytes) for c in sharded.collectives()) == [("allgather", W)] * 2 + [("reduce_scatter", W)] * 2
    wire = {p: sum(c.wire_bytes for c in p.collectives()) for p in (plain, sharded)}
    assert wire[plain] == wire[sharded] == 2 * 2 * W * 3 // 4, "a ring sends as much for either"
    assert plain.variable_bytes == 2 * W * 3 and sharded.variable_bytes == 2 * W + 2 * W * 2 // 4


def test_sharded_parameters_are_gathered_where_they_are_used_and_take_a_quarter_of_the_memory():
    sharded = adam_step(ZERO_3)
    assert sorted((c.name, c.payload_bytes) for c in sharded.collectives()) == [("allgather", W)] * 2 + [("reduce_scatter", W)] * 2
    assert sharded.variable_bytes == 2 * W * 3 // 4


@pytest.mark.parametrize("storage", [ZERO_1, ZERO_3], ids=["slots", "slots and parameters"])
def test_where_variables_are_stored_changes_no_result(storage):
    x = np.random.default_rng(1).standard_normal((B, DX)).astype(np.float32)
    states = []
    for program in (adam_step({}), adam_step(storage)):
        state, machine = watched([program])
        state.run(program, x=x)
        assert machine.seen == [(c.name, c.axes, c.payload_bytes) for c in program.collectives()]
        states.append(state)
    for name in ("w", "v", "w_m", "v_v"):
        assert np.allclose(*(s.read(name) for s in states), rtol=1e-6, atol=1e-7), name
    sizes = {p.array.size for p in states[1].pieces("w_m")}
    assert sizes == {DX * DH // 4}


# -- the Transformer -----------------------------------------------------------------------------

MODEL = {"d_model": 16, "d_ff": 32, "heads": 4, "d_kv": 4, "layers": 2, "vocab_size": 30, "vocab_multiple": 32, "length": 8}
N_SEQUENCES = 4
LARGE = {"d_ff": "d_ff:model", "heads": "heads:model", "vocab": "vocab:model"}
MIXED = "batch:data;" + ";".join(LARGE.values())


def transformer(mesh_shape, layout, storage=None):
    """Compile the training step of a small language model with Adam and clipping."""
    return build(parse({"model": MODEL, "mesh_shape": mesh_shape, "layout": layout, "storage": storage or {}, "sequences_per_batch": N_SEQUENCES,
                        "optimizer": {"name": "adam", "clip_norm": 1.0}})).step_program


def sizes(n_model: int) -> tuple[int, int]:
    """Return the elements of the variables that the model axis splits, on one of its ranks, and of those it does not."""
    m = MODEL
    attention, ffn = 4 * m["d_model"] * m["heads"] * m["d_kv"], 2 * m["d_model"] * m["d_ff"]
    split = m["layers"] * (attention + ffn) + m["vocab_multiple"] * m["d_model"]
    return split // n_model, m["length"] * m["d_model"] + (2 * m["layers"] + 1) * m["d_model"]


def model_axis_bytes(n_data: int) -> int:
    """Return what one rank passes over the model axis for forward and backward of its sequences.

    The residual's size once for the embedding, twice a layer forwards, twice a layer and once for the softmax backwards;
    the loss's maximum and its three sums of a number a position.
    """
    positions = N_SEQUENCES // n_data * MODEL["length"]
    return ((2 + 4 * MODEL["layers"]) * positions * MODEL["d_model"] + 4 * positions) * F32


def test_the_transformer_has_the_parameters_of_the_formula():
    assert transformer("", "").n_parameters == sum(sizes(1))


@pytest.mark.parametrize("mesh_shape, n_data", [("data:2", 2), ("data:4", 4)])
def test_data_parallel_the_transformer_reduces_its_gradients_and_two_scalars(mesh_shape, n_data):
    program = transformer(mesh_shape, "batch:data")
    assert payloads(program) == {("data",): (sum(sizes(1)) + 2) * F32}
    assert len(program.collectives()) == 1, "all in one group"


@pytest.mark.parametrize("n", [2, 4])
def test_model_parallel_the_transformer_reduces_activations_and_the_norms_scalar(n):
    program = transformer(f"model:{n}", ";".join(LARGE.values()))
    assert payloads(program) == {("model",): model_axis_bytes(1) + F32}


@pytest.mark.parametrize("n_data, n_model", [(2, 2), (4, 2), (2, 4)])
def test_mixed_the_transformer_costs_both_each_divided_by_the_others_ranks(n_data, n_model):
    split, replicated = sizes(n_model)
    program = transformer(f"data:{n_data};model:{n_model}", MIXED)
    assert payloads(program) == {("data",): (split + replicated + 2) * F32, ("model",): model_axis_bytes(n_data) + F32}


def test_the_transformer_with_sharded_slots_scatters_and_gathers_each_variable_once():
    program = transformer("data:2;model:2", MIXED, {"optimizer": "d_model:data"})
    kinds = {}
    for c in program.collectives():
        kinds[c.name] = kinds.get(c.name, 0) + (c.payload_bytes if c.axes == ("data",) else 0)
    n = sum(sizes(2)) * F32
    assert kinds["reduce_scatter"] == kinds["allgather"] == n and kinds["allreduce"] <= 4 * F32, "else scalars only"
    plain = transformer("data:2;model:2", MIXED)
    assert program.variable_bytes == n + 2 * n // 2 and plain.variable_bytes == 3 * n


def test_adafactor_split_on_a_factored_dimension_scatters_gathers_and_reduces_one_vector_and_two_scalars():
    """w[a=8, b=6]: the row moments are means over a, which is split; the column moments lie split with a; RMS of weight and update are scalars."""
    a, b, batch = Dimension("a", 8), Dimension("b", 6), Dimension("batch", 4)
    w = mm.Variable("w", [a, b], mm.normal(0.5))
    x, y = mm.placeholder("x", [batch, a]), mm.placeholder("y", [batch, b])
    dw, = mm.gradients(mm.reduce_sum(mm.einsum([x, w], [batch, b]) * y), [w])
    one = mm.full((), 1.0)
    inputs = UpdateInputs(one * 0.1, mm.placeholder("step", (), "int64"), one, mm.full((), 1, "int32"))
    updates = Adafactor(min_dim_size_to_factor=2).update(w, dw, inputs)
    feeds = {"x": np.arange(32, dtype=np.float32).reshape(4, 8) % 5, "y": np.arange(24, dtype=np.float32).reshape(4, 6) % 7, "step": 1}
    results = {}
    for mesh_shape, layout, storage in (("", "", {}), ("data:2", "batch:data", {"optimizer": "a:data"})):
        program = mm.compile({}, updates, mesh_shape, layout, storage)
        state = mm.State([program], seed=3)
        state.run(program, **feeds)
        results[mesh_shape] = {v.full_name: state.read(v) for v, _ in updates}
    by_name = {}
    for c in program.collectives():
        by_name[c.name] = by_name.get(c.name, 0) + c.payload_bytes
    assert by_name == {"reduce_scatter": F32 * 8 * 6, "allgather": F32 * 8 * 6, "allreduce": F32 * (6 + 1 + 1)}
    held = {name: bound.value.n_bytes for name, bound in program.variables.items()}
    assert held == {"w": F32 * 48, "w/adafactor_vr": F32 * 6, "w/adafactor_vc": F32 * 8 // 2}
    for name, value in results[""].items():
        np.testing.assert_allclose(results["data:2"][name], value, rtol=1e-6)

"""The oracles are themselves checked: faults are planted, and each must be found."""

from __future__ import annotations

import numpy as np
import pytest
from oracles import harness
from oracles.draw import A, B, C, floats
from oracles.harness import Layout, against_differences, against_no_reuse, against_one_rank, against_reference, compiled
from oracles.mutate import collectives_of, doubled, removed
from oracles.samples import kinds_without_samples, sample_called

import mesh_mpi as mm
from mesh_mpi.compiler import lower, memory
from mesh_mpi.graph.operation import REGISTRY
from mesh_mpi.kernels.cpu import KERNELS
from mesh_mpi.spmd.builder import Builder

GRADIENTS = {"tanh": "tanh", "mul": "mul of equal shapes in another order", "einsum": "einsum projection to heads", "softmax": "softmax",
             "layer_norm": "layer_norm", "rms_norm": "rms_norm", "cross_entropy": "cross_entropy plain", "embedding": "embedding",
             "attention": "attention, causal", "reduce_max": "reduce_max", "reshape": "reshape that splits", "add_n": "add_n of sums, partial and whole"}


@pytest.mark.parametrize("kind", GRADIENTS)
def test_a_gradient_that_is_a_thousandth_too_large_is_found(kind, monkeypatch):
    right = REGISTRY[kind].vjp
    sample = sample_called(GRADIENTS[kind])
    assert against_differences(sample) == []
    monkeypatch.setattr(REGISTRY[kind], "vjp", lambda op, douts: [g * 1.001 if g is not None and g.dtype.startswith("float") else g for g in right(op, douts)])
    assert against_differences(sample._replace())


def test_a_gradient_that_forgets_the_dimensions_it_was_broadcast_along_is_found(monkeypatch):
    """The reference system's maximum returns such a gradient; here even the graph refuses it."""
    sample = sample_called("maximum with fewer dimensions on the right")
    monkeypatch.setattr(REGISTRY["maximum"], "_vjp", None)
    monkeypatch.setattr(REGISTRY["maximum"], "vjp", lambda op, douts: [douts[0], douts[0]])
    with pytest.raises(Exception, match="gave .* as gradient of"):
        against_differences(sample)


@pytest.mark.parametrize("name, kernel", [("tanh", "elementwise"), ("einsum matrix product", "matmul"), ("layer_norm", "layer_norm"), ("softmax", "softmax"),
                                          ("attention, causal", "attention"), ("embedding", "embedding"), ("reduce_sum", "reduce")])
def test_a_kernel_that_is_a_thousandth_wrong_is_found(name, kernel, monkeypatch):
    right = KERNELS[kernel]

    def wrong(outs, ins, scratch, **params):
        call = right(outs, ins, scratch, **params)

        def faulty():
            call()
            outs[0][...] = outs[0] * 1.001
        return faulty
    sample = sample_called(name)
    assert against_reference(sample, "float64") == []
    monkeypatch.setitem(KERNELS, kernel, wrong)
    assert against_reference(sample, "float64")


REDUCTIONS = {
    "einsum matrix product": Layout("all:2", "b:all"), "reduce_sum": Layout("all:2", "b:all"), "reduce_max": Layout("all:2", "b:all"),
    "softmax": Layout("all:2", "columns:all"), "log_softmax": Layout("all:2", "columns:all"), "layer_norm": Layout("p:2;q:2", "d_model:p;batch:q"),
    "rms_norm": Layout("all:2", "d_model:all"), "cross_entropy plain": Layout("all:4", "vocab:all"), "embedding": Layout("p:2;q:2", "vocab:p;batch:q"),
    "attention, causal": Layout("all:2", "query_length:all"), "two layers and a residual": Layout("p:2;q:2", "d_model:p;b:q"),
    "three projections of one tensor": Layout("p:2;q:2", "batch:p;heads:q"), "add_n of sums, partial and whole": Layout("p:2;q:2", "b:p;c:q"),
    "reshape to other names, the rules crossed": Layout("p:2;q:2", "a:p;x:q"), "reduce_sum_squares": Layout("all:2", "a:all"),
    "adafactor, factored True": Layout("p:2;q:2", "d0:p;d1:q"), "slice": Layout("all:2", "c:all"),
    "rename that exchanges two": Layout("all:2", "m:all"),  # an all-to-all
}
HARMLESS_TWICE = ("max", "min", "")  # maxima are idempotent, and copying twice copies; a swap done twice from its operand is a swap


@pytest.mark.parametrize("name", REDUCTIONS)
def test_each_communication_that_is_missing_or_doubled_is_found(name):
    sample, layout = sample_called(name), REDUCTIONS[name]
    assert against_one_rank(sample, "float64", layout) == []
    program = compiled(sample, "float64", layout)
    positions = collectives_of(program)
    assert positions, "this layout was to communicate"
    for position in positions:
        def values(change, position=position):
            return [f for f in against_one_rank(sample, "float64", layout, lambda p: change(p, position)) if "communicator saw" not in f]
        assert values(removed), f"without {program.instructions[position]} of {program.instructions[position].origin}"
        if program.instructions[position].params.get("reduce", "") not in HARMLESS_TWICE:
            assert values(doubled), f"twice {program.instructions[position]} of {program.instructions[position].origin}"


def test_a_partial_sum_multiplied_by_an_operand_that_is_split_there_is_found(monkeypatch):
    sample = sample_called("two layers with squares")
    layouts = [Layout("p:2;q:2", "d_model:p;b:q"), Layout("all:2", "d_model:all")]
    assert [f for layout in layouts for f in against_one_rank(sample, "float64", layout)] == []
    monkeypatch.setattr(lower.Lowering, "_passes", lambda self, op, i, axis, local, target: op.definition.passes_partial(op, i))
    for layout in layouts:
        assert any(" d_w " in fault for fault in against_one_rank(sample, "float64", layout)), "the gradient was to be silently wrong"


def _of_sum(function) -> harness.Sample:
    """A function of a sum; without gradients, so that the sum has no other user that needs it whole."""
    return harness.Sample("of a sum", {"x": floats(A, B, C)}, lambda t: {"y": function(mm.reduce_sum(t["x"], "b"))}, lambda a: {"y": a["x"]}, ("x",))


NOT_LINEAR = {"tanh": mm.tanh, "square": mm.square, "exp": mm.exp, "maximum": lambda x: mm.maximum(x, 0.5), "reduce_max": lambda x: mm.reduce_max(x, "c"),
              "softmax": lambda x: mm.softmax(x, "c"), "rms_norm": lambda x: mm.rms_norm(x, "c", mm.full([C], 1.0, x.dtype)),
              "less": lambda x: mm.less(x, 0.0), "div": lambda x: 1.0 / x}


@pytest.mark.parametrize("kind", NOT_LINEAR)
def test_a_partial_sum_that_passes_a_function_that_is_not_linear_is_found(kind, monkeypatch):
    sample, layout = _of_sum(NOT_LINEAR[kind]), Layout("all:2", "b:all")
    assert against_one_rank(sample, "float64", layout) == []
    monkeypatch.setattr(REGISTRY[kind], "passes_partial", lambda op, i: True)
    assert any(" off by " in fault or " instead of " in fault for fault in against_one_rank(sample, "float64", layout))


MEMORY = ("a chain of pointwise functions with a value used twice", "einsum projection to heads", "two layers and a residual", "layer_norm", "attention, causal",
          "cross_entropy plain", "embedding", "softmax", "reduce_mean")


@pytest.mark.parametrize("name", MEMORY)
def test_a_view_that_outlives_its_buffer_is_found(name, monkeypatch):
    sample, layout = sample_called(name), Layout("", "")
    assert against_no_reuse(sample, "float32", layout) == []
    right = memory._lay_out

    def short(plan, reuse):
        for block in plan.blocks if reuse else ():
            block.end = max(block.start, block.end - 1)
        right(plan, reuse)
    monkeypatch.setattr(memory, "_lay_out", short)
    assert against_no_reuse(sample, "float32", layout)


def test_two_values_that_are_alive_together_in_one_place_are_found_without_poison(monkeypatch):
    right_run = harness.run
    monkeypatch.setattr(harness, "run", lambda program, arrays, poison=True: right_run(program, arrays, poison=False))
    right = memory._lay_out

    def overlapping(plan, reuse):
        right(plan, reuse)
        for block in plan.blocks if reuse else ():
            block.offset = 0
    sample = sample_called("two layers and a residual")
    assert against_no_reuse(sample, "float32", Layout("", "")) == []
    monkeypatch.setattr(memory, "_lay_out", overlapping)
    assert against_no_reuse(sample, "float32", Layout("", ""))


def test_a_result_in_the_place_of_an_operand_that_is_read_again_is_found(monkeypatch):
    sample = sample_called("a chain of pointwise functions with a value used twice")
    monkeypatch.setattr(memory, "_reusable", lambda plan, instruction, i_out, position, last: next(
        (plan.place[v.root.number][0] for v in instruction.inputs if v.root.kind == "temporary" and memory._same_view(v, instruction.outputs[i_out])), None))
    monkeypatch.setattr(memory, "_donor", lambda instruction, i_out, plan, block: next(
        v.root.number for v in instruction.inputs if plan.place[v.root.number][0] is block))
    assert against_no_reuse(sample, "float32", Layout("", ""))


@pytest.mark.parametrize("factor", [0, 2])
def test_a_payload_that_is_stated_wrong_is_found(factor, monkeypatch):
    right = Builder.collective

    def wrong(self, *args, **params):
        right(self, *args, **params)
        self.instructions[-1].payload_bytes *= factor
    monkeypatch.setattr(Builder, "collective", wrong)
    faults = against_one_rank(sample_called("einsum matrix product"), "float64", Layout("all:2", "b:all"))
    assert any("communicator saw" in fault for fault in faults)


def test_a_collective_that_happens_without_being_stated_is_found():
    layout = Layout("all:2", "b:all")
    sample = sample_called("reduce_max")
    faults = against_one_rank(sample, "float64", layout, lambda p: doubled(p, next(i for i in collectives_of(p) if p.instructions[i].params["reduce"] == "max")))
    assert len(faults) == 1 and "communicator saw" in faults[0], "values are right, the traffic is not"


def test_a_slice_that_is_wrong_on_the_last_rank_only_is_found(monkeypatch):
    right = KERNELS["iota"]

    def wrong(outs, ins, scratch, **params):
        call = right(outs, ins, scratch, **params)
        if not params["start"]:
            return call

        def faulty():
            call()
            outs[0].flat[-1] += 1
        return faulty
    monkeypatch.setitem(KERNELS, "iota", wrong)
    sample = sample_called("full and range")
    assert against_reference(sample, "float64") == [] and against_one_rank(sample, "float64", Layout("all:4", "c:all"))


def test_an_operation_without_a_sample_is_found(monkeypatch):
    assert kinds_without_samples() == []
    monkeypatch.setitem(REGISTRY, "planted", REGISTRY["tanh"].__class__("planted", "no gradient"))
    assert kinds_without_samples() == ["planted"]


def test_infinities_and_other_shapes_do_not_pass_as_equal():
    one = np.array([1.0, 2.0])
    assert harness.differences("x", one, np.array([1.0, np.inf]), 1.0) and harness.differences("x", np.array([1.0, np.nan]), one, 1.0)
    assert harness.differences("x", one, np.array([[1.0, 2.0]]), 1.0) and harness.differences("x", np.array([np.inf]), np.array([-np.inf]), 1.0)
    assert harness.differences("x", np.array([1, 2]), np.array([1, 3]), 1.0), "whole numbers are compared exactly"
    assert harness.differences("x", one * 1.001, one, 1e-4) and harness.differences("x", one, one, 0.0) == []

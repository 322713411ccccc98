"""The passes: what is fused, grouped, moved and dropped, and that the same graph gives the same program everywhere."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from mpi_runner import import_path
from oracles.harness import Watch
from oracles.memory_check import written_once

import mesh_mpi as mm
from mesh_mpi import Dimension
from mesh_mpi.errors import GraphError, RegistryError
from mesh_mpi.graph.operation import NO_GRADIENT, OperationDef, register

A, B, N = Dimension("a", 4), Dimension("b", 6), Dimension("n", 8)


def chain(n_layers: int, **settings):
    """Compile an SGD step of a deep residual network."""
    batch, d, f = Dimension("batch", 8), Dimension("d", 8), Dimension("f", 16)
    x = y = mm.placeholder("x", [batch, d])
    variables = []
    for i in range(n_layers):
        variables += [mm.Variable(f"w{i}", [d, f], mm.normal(0.1)), mm.Variable(f"v{i}", [f, d], mm.normal(0.1))]
        y = y + mm.einsum([mm.relu(mm.einsum([y, variables[-2]], [batch, f])), variables[-1]], [batch, d])
    loss = mm.reduce_mean(mm.square(y - x))
    updates = [(w, w - g * 0.1) for w, g in zip(variables, mm.gradients(loss, variables))]
    return mm.compile({"loss": loss}, updates, **settings)


MIXED = {"mesh_shape": "data:2;model:2", "layout": "batch:data;f:model"}


def names(program) -> list[str]:
    """Return the names of a program's instructions."""
    return [i.name for i in program.instructions]


def run(program, **feeds):
    """Run a program on the simulated machine and return its outputs."""
    return mm.State([program], poison=True).run(program, whole=True, **feeds)


# -- the same program everywhere -------------------------------------------------------------------

DIGESTS = """
import sys
sys.path.insert(0, {tests!r})
import test_compiler
from test_memory import transformer
print(test_compiler.chain(5, **test_compiler.MIXED).digest, transformer("slots split").digest)
"""


def test_the_digest_does_not_depend_on_the_process_or_its_hash_seed():
    code = DIGESTS.format(tests=str(Path(__file__).parent))
    seen = set()
    for seed in ("0", "1", "4711"):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120,
                              env={**os.environ, **import_path(), "PYTHONHASHSEED": seed})
        assert done.returncode == 0, done.stderr
        seen.add(done.stdout)
    assert len(seen) == 1 and seen.pop().split()[0] == chain(5, **MIXED).digest


def test_the_digest_is_of_the_program_and_not_of_what_was_built_before():
    first = chain(3, **MIXED)
    [mm.placeholder("other", [A]) + 1.0 for _ in range(7)]
    again = chain(3, **MIXED)
    assert first.digest == again.digest and first.listing() == again.listing()


def test_the_digest_tells_programs_apart():
    programs = [chain(3, **MIXED), chain(4, **MIXED), chain(3), chain(3, mesh_shape="data:2;model:2", layout="batch:data"),
                chain(3, mesh_shape="data:4;model:2", layout="batch:data;f:model"), chain(3, **MIXED, name="other"), chain(3, **MIXED, group_bytes=0),
                chain(3, **MIXED, reuse_memory=False)]
    assert len({p.digest for p in programs}) == len(programs)
    x = mm.placeholder("x", [A])
    assert len({mm.compile({"y": x * number}).digest for number in (2.0, 3.0, 2)}) >= 2


# -- groups ------------------------------------------------------------------------------------------


def groups(program):
    """Return the reductions of a program that have several members."""
    return [i for i in program.instructions if i.is_collective and len(i.outputs) > 1]


def test_gradients_are_reduced_in_one_group_in_place_side_by_side():
    program = chain(4, **MIXED)
    group, = groups(program)
    assert group.axes == ("data",) and len(group.outputs) == 2 * 4 + 1
    at = None
    for out, source in zip(group.outputs, group.inputs):
        address = program.plan.address(out.root)
        assert address == program.plan.address(source.root), "in place"
        assert at is None or address == ("", at), "one behind the other"
        at = address[1] + out.n_bytes
    assert group.payload_bytes == sum(v.n_bytes for v in group.outputs)


@pytest.mark.parametrize("bound", [0, 300, 1000, 1 << 20])
def test_a_group_is_closed_at_its_bound(bound):
    program = chain(4, **MIXED, group_bytes=bound)
    data = [i for i in program.instructions if i.axes == ("data",)]
    assert sum(i.payload_bytes for i in data) == (2 * 4 * 8 * 8 + 1) * 4
    for i in data:
        assert i.payload_bytes <= bound or len(i.outputs) == 1
    assert len(data) >= -(-(2 * 4 * 8 * 8 + 1) * 4 // max(bound, 256))
    assert written_once(program) == []


def test_the_size_of_groups_changes_no_bit_of_groups_of_two():
    feeds = np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8)
    variables = []
    for bound in (0, 300, 1 << 20):
        program = chain(3, mesh_shape="data:2", layout="batch:data", group_bytes=bound)
        state = mm.State([program], poison=True)
        state.run(program, x=feeds)
        variables.append([state.read(name).tobytes() for name in program.variables])
    assert variables[0] == variables[1] == variables[2]


def test_a_group_ends_before_the_first_reader_of_a_member():
    x, y = mm.placeholder("x", [N, A]), mm.placeholder("y", [N, A])
    first = mm.tanh(mm.reduce_sum(x, "n"))
    second = mm.reduce_sum(y * mm.broadcast(first, [N, A]), "n")
    program = mm.compile({"first": first, "second": second}, mesh_shape="p:2", layout="n:p")
    assert len([i for i in program.instructions if i.is_collective]) == 2 and groups(program) == [] and written_once(program) == []


def test_sums_over_other_axes_and_of_other_element_types_are_groups_of_their_own():
    x, y, z = mm.placeholder("x", [N, A]), mm.placeholder("y", [N, A], "float64"), mm.placeholder("z", [B, A])
    outputs = {"x1": mm.reduce_sum(x, "n"), "x2": mm.reduce_sum(x * x, "n"), "y1": mm.reduce_sum(y, "n"), "y2": mm.reduce_sum(y * y, "n"),
               "z1": mm.reduce_sum(z, "b"), "z2": mm.reduce_sum(z * z, "b")}
    program = mm.compile(outputs, mesh_shape="p:2;q:2", layout="n:p;b:q")
    assert sorted((g.axes, g.outputs[0].dtype, len(g.outputs)) for g in groups(program)) == [
        (("p",), "float32", 2), (("p",), "float64", 2), (("q",), "float32", 2)]


# -- fusion, order, dead code ------------------------------------------------------------------------


def test_a_chain_of_pointwise_functions_is_one_kernel():
    x, s = mm.placeholder("x", [A, B]), mm.placeholder("s", [B])
    program = mm.compile({"y": mm.sigmoid(mm.tanh(x * s) + 1.0) / 3.0 - s})
    assert names(program) == ["elementwise"] and len(program.instructions[0].params["steps"]) == 6


def test_a_value_that_is_used_twice_or_asked_for_is_not_fused_away():
    x = mm.placeholder("x", [A, B])
    y = mm.tanh(x)
    assert len(mm.compile({"z": mm.exp(y) * 2.0, "y": y}).instructions) == 2
    program = mm.compile({"z": mm.exp(y), "u": mm.sin(y)})
    assert len(program.instructions) == 3


def test_a_fused_kernel_has_at_most_sixteen_steps_and_the_answer_is_that_of_single_steps():
    x = mm.placeholder("x", [A, B], "float64")
    y = x
    for i in range(40):
        y = mm.sin(y) * 1.1 + 0.01 * i
    program = mm.compile({"y": y})
    assert max(len(i.params["steps"]) for i in program.instructions) <= 16 and len(program.instructions) < 12
    values = expected = np.linspace(-1, 1, 24).reshape(4, 6)
    for i in range(40):
        expected = np.sin(expected) * 1.1 + 0.01 * i
    assert np.allclose(run(program, x=values)["y"], expected, rtol=1e-14, atol=1e-15)


def test_a_value_seen_transposed_is_not_fused_as_if_it_were_not():
    a, b = Dimension("a", 4), Dimension("b", 4)
    x = mm.placeholder("x", [a, b], "float64")
    y = mm.tanh(x)
    program = mm.compile({"z": mm.rename(y, {"a": "b", "b": "a"}) * x})
    values = np.arange(16.0).reshape(4, 4) / 16
    assert np.array_equal(run(program, x=values)["z"], np.tanh(values) * values.T), "z is [b, a], as its first operand"


def test_updates_come_as_soon_as_they_can():
    program = chain(6)
    last_gradient = max(i for i, x in enumerate(program.instructions) if x.name == "matmul")
    early = [i for i, x in enumerate(program.instructions) if any(program.plan.address(v.root)[0] for v in x.outputs)]
    assert sum(i < last_gradient for i in early) >= 2 * 6 - 3, "all but the last few are applied before the backward pass ends"


def test_what_nobody_asks_for_is_not_computed():
    x, w = mm.placeholder("x", [A, B]), mm.Variable("w", [B])
    y = mm.rms_norm(x, "b", w)
    mm.gradients(mm.reduce_sum(y), [x, w])
    program = mm.compile({"y": y})
    assert names(program) == ["rms_norm"]
    dw, = mm.gradients(mm.reduce_sum(mm.einsum([x, w], [A])), [w])
    program = mm.compile({"dw": dw})
    assert "matmul" not in names(program) or len(program.instructions) <= 4, "the forward product is not needed for it"


def test_one_sources_memory_is_its_feed_and_unused_feeds_are_no_feeds():
    x, unused = mm.placeholder("x", [A]), mm.placeholder("unused", [A])
    assert unused.name == "unused"
    assert list(mm.compile({"y": x * 2.0}).feeds) == ["x"]


def test_an_output_that_is_a_feed_or_a_variable_is_copied():
    x, w = mm.placeholder("x", [A]), mm.Variable("w", [A], mm.ones())
    program = mm.compile({"x": x, "w": w})
    out = run(program, x=np.arange(4, dtype=np.float32))
    assert names(program) == ["copy", "copy"] and out["x"].tolist() == [0, 1, 2, 3] and out["w"].tolist() == [1] * 4


def test_a_program_of_nothing_does_nothing():
    program = mm.compile()
    assert program.instructions == [] and run(program) == {} and program.peak_bytes >= 0


# -- accumulators ---------------------------------------------------------------------------------------


def test_a_whole_value_is_refused_where_partial_sums_are_kept():
    x = mm.placeholder("x", [N, A])
    kept = mm.Accumulator("kept", [A])
    settings = {"mesh_shape": "p:2", "layout": "n:p"}
    first = mm.compile(updates=[(kept, mm.reduce_sum(x, "n"))], **settings)
    with pytest.raises(GraphError, match=r"accumulator 'kept' holds sums that are partial over p, and tanh\[a=4\] is \[a=4\]"):
        mm.compile(updates=[(kept, mm.tanh(mm.reduce_sum(x, "n")))], like=first, **settings)


# -- the registry ---------------------------------------------------------------------------------------


def test_an_operation_with_a_part_missing_is_refused():
    class Incomplete(OperationDef):
        """No gradient is said, not even that there is none."""

        kind = "incomplete"

        def infer(self, inputs, attributes):
            """Nothing."""

        def space(self, op):
            """Nothing."""

    with pytest.raises(RegistryError, match="operation 'incomplete': vjp, lower missing"):
        register(Incomplete())

    class Doubled(Incomplete):
        """A name that is taken."""

        kind, vjp, lower = "tanh", NO_GRADIENT, lambda self, op, inputs, b: inputs
    with pytest.raises(RegistryError, match="operation 'tanh': registered twice"):
        register(Doubled())


# -- how long it takes ------------------------------------------------------------------------------------


def calls_of(n_layers: int) -> int:
    """Count the Python calls that building and compiling take: a measure of time that no other process disturbs."""
    count = 0

    def profile(frame, event, argument):
        nonlocal count
        count += 1
    sys.setprofile(profile)
    try:
        chain(n_layers, **MIXED)
    finally:
        sys.setprofile(None)
    return count


def test_compilation_is_nearly_linear_in_the_number_of_layers():
    small, middle, large = (calls_of(n) for n in (25, 50, 100))
    assert (large - middle) < 2.2 * (middle - small), (small, middle, large)


def test_two_hundred_layers_compile():
    start = time.perf_counter()
    program = chain(200, **MIXED)
    print(f"200 residual layers: {len(program.instructions)} instructions in {time.perf_counter() - start:.2f} s")
    assert program.arena_bytes <= 1.10 * program.live_bytes


def test_the_same_program_runs_on_a_watched_machine():
    program = chain(2, **MIXED)
    machine = Watch(program.mesh)
    mm.State([program], machine=machine).run(program, x=np.ones((8, 8), np.float32))
    assert machine.seen == [(c.name, c.axes, c.payload_bytes) for c in program.collectives()]

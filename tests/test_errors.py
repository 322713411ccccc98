"""What a user gets wrong while building or compiling a graph: one clear message, with every number and what to do."""

from __future__ import annotations

import pytest

import mesh_mpi as mm
from mesh_mpi import Dimension
from mesh_mpi.errors import DimensionError, DtypeError, GraphError, LayoutError, MeshError, ShapeError

BATCH, IO, HIDDEN = Dimension("batch", 8), Dimension("io", 4), Dimension("hidden", 6)


def compile_product(**settings):
    """Compile x[batch, io] . w[io, hidden]."""
    x, w = mm.placeholder("x", [BATCH, IO]), mm.Variable("w", [IO, HIDDEN])
    return mm.compile({"y": mm.einsum([x, w], [BATCH, HIDDEN])}, **settings)


def message(kind, action) -> str:
    """Return the text of the error of exactly this kind that ``action`` raises."""
    with pytest.raises(kind) as caught:
        action()
    assert type(caught.value) is kind
    return str(caught.value)


LAYOUT_FAULTS = {
    "an unknown dimension, with the nearest name": (
        {"mesh_shape": "data:2", "layout": "bacth:data"},
        "layout: rule bacth:data names dimension 'bacth', which no tensor has. Did you mean 'batch'?"),
    "an unknown axis, with the nearest name": (
        {"mesh_shape": "data:2", "layout": "batch:dta"},
        "layout: rule batch:dta names axis 'dta', but the mesh is [data=2]. Did you mean 'data'?"),
    "any rule without a mesh": (
        {"mesh_shape": "", "layout": "batch:data"},
        "layout: rule batch:data names axis 'data', but the mesh is []. Rules belong to a mesh: change layout together with mesh_shape."),
    "two axes for one dimension": (
        {"mesh_shape": "data:2;model:2", "layout": "batch:data;batch:model"},
        "layout: dimension 'batch' stands in two rules, batch:data and batch:model. Keep one of them."),
    "the same rule twice": (
        {"mesh_shape": "data:2", "layout": "batch:data;batch:data"}, "layout: rule batch:data stands twice. Delete one."),
    "two dimensions of one tensor on an axis": (
        {"mesh_shape": "data:2", "layout": "batch:data;io:data"},
        "layout: tensor x[batch=8, io=4] has two dimensions on axis 'data', batch=8 and io=4. "
        "Split only one of them there, or rename one (mm.rename) around this operation."),
    "a size that does not divide, with the sizes that do": (
        {"mesh_shape": "data:3", "layout": "batch:data"},
        "layout: dimension batch=8 is split over data=3 ranks and does not divide. Sizes of the axis that do: 1, 2, 4, 8; or make batch a multiple of 3."),
    "a storage class that does not exist": (
        {"mesh_shape": "data:2", "storage": {"params": "io:data"}}, "storage: there is no class of variables 'params'. Did you mean 'parameters'?"),
    "an unknown dimension in a storage rule": (
        {"mesh_shape": "data:2", "storage": {"parameters": "hiden:data"}},
        "storage of parameters: rule hiden:data names dimension 'hiden', which no tensor has. Did you mean 'hidden'?"),
    "two dimensions of a stored variable on an axis": (
        {"mesh_shape": "data:2;model:2", "layout": "hidden:model", "storage": {"parameters": "io:model"}},
        "storage of parameters: variable w[io=4, hidden=6] has two dimensions on axis 'model', io=4 and hidden=6. Split only one of them there."),
}


@pytest.mark.parametrize("case", LAYOUT_FAULTS)
def test_the_compiler_refuses(case):
    settings, text = LAYOUT_FAULTS[case]
    assert message(LayoutError, lambda: compile_product(**settings)) == text


def test_two_dimensions_that_meet_on_an_axis_only_inside_an_operation_are_refused():
    a, k, c = Dimension("a", 4), Dimension("k", 4), Dimension("c", 4)
    u, v = mm.placeholder("u", [a, k]), mm.placeholder("v", [k, c])
    text = message(LayoutError, lambda: mm.compile({"y": mm.reduce_sum(mm.einsum([u, v], [a, c]))}, mesh_shape="m:2", layout="a:m;c:m"))
    assert "tensor einsum[a=4, c=4] has two dimensions on axis 'm', a=4 and c=4" in text
    text = message(LayoutError, lambda: mm.compile({"y": mm.einsum([u, v], [])}, mesh_shape="m:2", layout="a:m;c:m"))
    assert text == ("layout: operation einsum einsum of u[a=4, k=4], v[k=4, c=4] has two dimensions on axis 'm', a=4 and c=4. "
                    "Split only one of them there, or rename one (mm.rename) around this operation.")


def test_two_dimensions_that_meet_in_many_tensors_are_one_fault():
    x = mm.placeholder("x", [BATCH, IO])
    w = mm.Variable("w", [IO, HIDDEN])
    y = mm.einsum([mm.relu(x) * 2.0, w], [BATCH, HIDDEN])
    text = message(LayoutError, lambda: mm.compile({"y": y}, mesh_shape="m:2;n:2", layout="batch:m;io:m;hidden:m"))
    assert [line.partition(". ")[0] for line in text.splitlines()] == [
        "layout: tensor x[batch=8, io=4] and 2 more have two dimensions on axis 'm', batch=8 and io=4",
        "layout: tensor w[io=4, hidden=6] has two dimensions on axis 'm', io=4 and hidden=6",
        "layout: tensor einsum[batch=8, hidden=6] has two dimensions on axis 'm', batch=8 and hidden=6"]


def test_two_dimensions_that_never_meet_may_share_an_axis():
    assert compile_product(mesh_shape="model:2", layout="batch:model").collectives() == []
    a, b = mm.placeholder("a", [BATCH]), mm.placeholder("b", [IO])
    program = mm.compile({"a": a * 2.0, "b": b * 2.0}, mesh_shape="model:2", layout="batch:model;io:model")
    assert program.collectives() == []


def test_an_axis_of_one_rank_splits_nothing_and_conflicts_with_nothing():
    program = compile_product(mesh_shape="data:1", layout="batch:data;io:data")
    assert program.collectives() == []


@pytest.mark.parametrize("mesh_shape, text", [
    ("data:0", "mesh: axis 'data' has size '0'. Write mesh_shape as \"data:2;model:2\", sizes at least 1."),
    (":2", "mesh: ':2' in ':2' is no axis:size. Write mesh_shape as \"data:2;model:2\"."),
    ("data:", "mesh: 'data:' in 'data:' is no axis:size. Write mesh_shape as \"data:2;model:2\"."),
    ("data:2;data:2", "mesh: axis 'data' stands twice in 'data:2;data:2'. Give each axis one size."),
    ("data:two", "mesh: axis 'data' has size 'two' in 'data:two'. Sizes are whole numbers of at least 1."),
])
def test_a_malformed_mesh_is_refused(mesh_shape, text):
    assert message(MeshError, lambda: compile_product(mesh_shape=mesh_shape)) == text


def test_a_rule_without_a_colon_is_refused():
    assert message(LayoutError, lambda: compile_product(mesh_shape="data:2", layout="batch")) == (
        "layout: 'batch' in 'batch' is no dimension:axis. Write layout as \"batch:data;d_ff:model\".")


def test_every_fault_of_a_configuration_comes_at_once():
    text = message(LayoutError, lambda: compile_product(
        mesh_shape="data:3;m:2", layout="bacth:data;batch:dta;io:m;io:data", storage={"params": "io:data", "optimizer": "q:r"}))
    assert text.splitlines() == [
        "layout: rule bacth:data names dimension 'bacth', which no tensor has. Did you mean 'batch'?",
        "layout: rule batch:dta names axis 'dta', but the mesh is [data=3, m=2]. Did you mean 'data'?",
        "layout: dimension 'io' stands in two rules, io:m and io:data. Keep one of them.",
        "storage: there is no class of variables 'params'. Did you mean 'parameters'?",
        "storage of optimizer: rule q:r names axis 'r', but the mesh is [data=3, m=2]. Known: data, m. "
            "Rules belong to a mesh: change layout together with mesh_shape.",
        "storage of optimizer: rule q:r names dimension 'q', which no tensor has. Known: batch, hidden, io."]
    text = message(LayoutError, lambda: compile_product(mesh_shape="data:3;m:2", layout="batch:data;io:m;hidden:m"))
    assert [line.split(" ", 3)[1] for line in text.splitlines()] == ["dimension", "tensor"], "indivisible and doubled together"


def test_strict_layout_refuses_what_would_be_gathered_and_otherwise_the_listing_says_so():
    def shortened(strict):
        x = mm.placeholder("x", [BATCH, IO])
        return mm.compile({"y": mm.slice(x, "batch", 2, Dimension("short", 4))}, mesh_shape="data:2", layout="batch:data", strict_layout=strict)
    assert message(LayoutError, lambda: shortened(True)) == (
        "strict_layout: slice slice needs batch of x[batch=8, io=4] whole, and the layout splits it. "
        "Drop that rule, rename the dimension around the operation, or set strict_layout: false.")
    program = shortened(False)
    assert program.notes == ["gathered: slice slice needs batch of x[batch=8, io=4] whole, and the layout splits it."]
    assert [(c.name, c.axes) for c in program.collectives()] == [("allgather", ("data",))]
    assert program.notes[0] in program.listing()


def test_an_axis_that_no_rule_uses_is_a_warning():
    assert compile_product(mesh_shape="data:2;model:2", layout="batch:data").warnings == [
        "no rule uses axis 'model' of mesh [data=2, model=2]: its 2 ranks do the same work."]


X, Y, ODD, INTEGERS = (mm.placeholder("x", [BATCH, IO]), mm.placeholder("y", [IO, HIDDEN]), mm.placeholder("odd", [Dimension("io", 5), HIDDEN]),
                       mm.placeholder("n", [BATCH, IO], "int32"))
BUILDING_FAULTS = {
    "an output dimension that no operand of a contraction has": (
        DimensionError, lambda: mm.einsum([X, Y], [BATCH, Dimension("z", 3)]),
        "einsum: output dimension z=3 is in none of the operands [batch=8, io=4], [io=4, hidden=6]. Remove it, or broadcast the result (mm.broadcast)."),
    "one name with two sizes in a contraction": (
        DimensionError, lambda: mm.einsum([X, ODD], [BATCH, HIDDEN]),
        "einsum: dimension 'io' has two sizes, 4 and 5, among [batch=8, io=4], [io=5, hidden=6], [batch=8, hidden=6]. Rename one, or slice or pad it."),
    "one name with two sizes between operand and output": (
        DimensionError, lambda: mm.einsum([X, Y], [BATCH, Dimension("hidden", 7)]),
        "einsum: dimension 'hidden' has two sizes, 6 in an operand and 7 in the output. Make them equal."),
    "one name with two sizes in a sum, where the reference system made an outer sum": (
        DimensionError, lambda: mm.placeholder("a", [Dimension("a", 2)]) + mm.placeholder("b", [Dimension("a", 3)]),
        "dimension 'a' has two sizes, 2 and 3, among [a=2], [a=3]"),
    "one name twice in a shape": (
        DimensionError, lambda: mm.Shape([Dimension("a", 2), Dimension("a", 3)]), "Shape: [a=2, a=3] holds 'a' twice. Rename one of the two."),
    "an outer sum by accident": (
        DimensionError, lambda: X + Y, "neither of [batch=8, io=4] and [io=4, hidden=6] holds all dimensions of the other. "
        "Broadcast one first (mm.broadcast), or use mm.einsum for an outer product."),
    "a reduced dimension that is absent": (
        DimensionError, lambda: mm.reduce_sum(X, "hidden"), "reduce_sum: there is no dimension 'hidden' in [batch=8, io=4]. Use one of these."),
    "a dimension of another size than the tensor's": (
        DimensionError, lambda: mm.reduce_sum(X, Dimension("io", 5)),
        "reduce_sum: io=5 does not fit io=4 of [batch=8, io=4]. Same-named dimensions must agree in size."),
    "a reshape to another number of elements": (
        ShapeError, lambda: mm.reshape(mm.placeholder("m", [Dimension("a", 4), Dimension("b", 4)]), [Dimension("a", 5), Dimension("b", 3)]),
        "reshape: [a=4, b=4] has 16 elements and [a=5, b=3] has 15. The products of the sizes must agree."),
    "mixed element types in a contraction": (
        DtypeError, lambda: mm.einsum([INTEGERS, Y], [BATCH, HIDDEN]), "einsum: operands have element types int32, float32. Cast them to one (mm.cast)."),
    "mixed element types in a sum": (
        DtypeError, lambda: X + INTEGERS, "operands have element types float32 and int32. Cast one of them (mm.cast)."),
    "the gradient of whole numbers": (
        GraphError, lambda: mm.gradients(INTEGERS, [X]), "gradients: n[batch=8, io=4] has element type int32. Differentiate a floating tensor."),
    "a slice beyond the end": (
        DimensionError, lambda: mm.slice(X, "io", 3, Dimension("io", 2)), "slice: indices 3 to 5 leave io=4 of [batch=8, io=4]. Choose a range within it."),
    "a size of zero": (
        DimensionError, lambda: Dimension("batch", 0), "Dimension: batch has size 0. Sizes are whole numbers of at least 1."),
    "a mean of whole numbers": (
        DtypeError, lambda: mm.reduce_mean(INTEGERS), "reduce_mean: n[batch=8, io=4] has element type int32. Cast it to a floating type first."),
    "two sources of one name": (
        GraphError, lambda: mm.compile({"y": X + mm.placeholder("x", [BATCH, IO])}),
        "compile: two sources are called 'x', x[batch=8, io=4] and x[batch=8, io=4]. Use mm.scope, or another name."),
    "a variable that is updated twice": (
        GraphError, lambda: (lambda w: mm.compile(updates=[(w, w * 2.0), (w, w * 3.0)]))(mm.Variable("w", [IO])),
        "compile: variable 'w' is updated twice. Give it one new value."),
    "a new value of another shape": (
        DimensionError, lambda: mm.compile(updates=[(mm.Variable("w", [IO]), X)]),
        "compile: the new value of w[io=4] of float32 is x[batch=8, io=4] of float32. Dimensions and element type must be the same."),
    "an output that is no tensor": (
        GraphError, lambda: mm.compile({"y": 3}), "compile: output 'y' is 3, not a tensor."),
}


@pytest.mark.parametrize("case", BUILDING_FAULTS)
def test_building_a_graph_refuses(case):
    kind, action, text = BUILDING_FAULTS[case]
    assert text in message(kind, action)


def test_a_symbolic_tensor_has_no_truth():
    with pytest.raises(TypeError, match="is symbolic: it has no value while the graph is built"):
        bool(X < 1.0)


def test_a_relayout_by_rules_that_do_not_fit_is_refused():
    text = message(LayoutError, lambda: mm.compile({"y": mm.relayout(X, "batch:data;io:data")}, mesh_shape="data:2"))
    assert text == "relayout of x[batch=8, io=4]: rules 'batch:data;io:data' put two dimensions on one axis."
    text = message(LayoutError, lambda: mm.compile({"y": mm.relayout(X, "io:data")}, mesh_shape="data:3"))
    assert text == "relayout of x[batch=8, io=4]: io=4 does not divide over data=3."


def test_a_fraction_beside_whole_numbers_is_refused_when_the_graph_is_built():
    ids = mm.placeholder("ids", [mm.Dimension("batch", 4)], "int32")
    with pytest.raises(mm.MeshMpiError, match="is of int32 and 0.5 is a fraction"):
        ids + 0.5
    assert (ids + 2).dtype == "int32"


def test_a_function_of_a_number_alone_and_outputs_without_names_are_refused():
    with pytest.raises(mm.MeshMpiError, match="relu: 3 holds no tensor"):
        mm.relu(3)
    with pytest.raises(mm.MeshMpiError, match="Give a mapping of names to tensors"):
        mm.compile(outputs=mm.placeholder("x"))

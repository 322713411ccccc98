"""The language: shapes, scopes, operators, gradients on the global graph, the public names."""

from __future__ import annotations

import importlib
import math
import pkgutil
import threading

import numpy as np

import mesh_mpi as mm
import mesh_mpi.ops
from mesh_mpi.graph.gradients import reachable


def test_the_public_names_are_the_operations_whatever_modules_are_loaded():
    for module in pkgutil.walk_packages(mesh_mpi.__path__, "mesh_mpi."):
        if not module.name.startswith(("mesh_mpi.kernels.gpu", "mesh_mpi.jobs", "mesh_mpi.configs")) and module.name.count(".") == 1:
            importlib.import_module(module.name)
    for name in mesh_mpi.ops.__all__:
        assert getattr(mm, name) is getattr(mesh_mpi.ops, name), name


A, B = mm.Dimension("a", 2), mm.Dimension("b", 3)


def kinds(tensor) -> list[str]:
    """Return the kinds of all operations behind a tensor."""
    return [op.definition.kind for op in reachable([tensor])]


def test_a_gradient_has_the_dimensions_of_its_tensor_in_the_same_order():
    x, y = mm.placeholder("x", [A, B]), mm.placeholder("y", [B, A])
    for z in (x + y, y + x, x * y, y * x, mm.maximum(y, x)):
        assert [g.shape for g in mm.gradients(z, [x, y])] == [x.shape, y.shape]


def test_a_number_to_the_power_of_a_tensor_has_a_gradient():
    x = mm.placeholder("x", [])
    program = mm.compile({"d": mm.gradients(mm.pow(2.0, x), [x])[0]})
    assert abs(mm.State([program]).run(program, x=3.0)["d"] - 8 * math.log(2)) < 1e-5


def test_the_sum_of_two_tensors_of_one_shape_is_n_ary_and_others_are_pointwise():
    x, y, row = mm.placeholder("x", [A, B]), mm.placeholder("y", [B, A]), mm.placeholder("row", [B])
    assert kinds(x + y)[-1] == "add_n" and kinds(x + row)[-1] == kinds(x + 1.0)[-1] == "add"


def test_gradients_of_a_tensor_used_many_times_meet_in_one_sum():
    x = mm.placeholder("x", [A])
    gradient, = mm.gradients(mm.reduce_sum(mm.exp(x) + mm.sin(x) + mm.square(x)), [x])
    assert [len(op.inputs) for op in reachable([gradient]) if op.definition.kind == "add_n"][-1] == 3


def test_what_a_loss_does_not_depend_on_has_no_gradient():
    x, y = mm.placeholder("x", [A]), mm.placeholder("y", [A])
    assert mm.gradients(mm.reduce_sum(x), [y]) == [None]
    assert mm.gradients(mm.reduce_sum(mm.stop_gradient(x)), [x]) == [None]


def test_a_tensor_is_its_own_gradient_of_ones_and_intermediate_tensors_have_gradients():
    x = mm.placeholder("x", [A])
    y = mm.exp(x)
    loss = mm.reduce_sum(y * 3.0)
    program = mm.compile(dict(zip(("l", "y", "x"), mm.gradients(loss, [loss, y, x]))))
    out = mm.State([program]).run(program, whole=True, x=np.zeros(2, np.float32))
    assert out["l"] == 1.0 and out["y"].tolist() == out["x"].tolist() == [3.0, 3.0]


def test_second_derivatives_of_functions_with_a_formula_are_right():
    x = mm.placeholder("x", [A], "float64")
    first, = mm.gradients(mm.reduce_sum(mm.exp(x) * mm.sin(x)), [x])
    second, = mm.gradients(mm.reduce_sum(first), [x])
    values = np.array([0.3, -1.2])
    program = mm.compile({"d": second})
    found = mm.State([program]).run(program, whole=True, x=values)["d"]
    assert np.allclose(found, 2 * np.exp(values) * np.cos(values), rtol=1e-13)


def test_given_output_gradients_weigh_the_outputs():
    x, weight = mm.placeholder("x", [A], "float64"), mm.placeholder("weight", [A], "float64")
    program = mm.compile({"d": mm.gradients(mm.square(x), [x], [weight])[0]})
    found = mm.State([program]).run(program, whole=True, x=np.array([1.0, 2.0]), weight=np.array([10.0, 100.0]))["d"]
    assert found.tolist() == [20.0, 400.0]


def test_names_come_from_the_enclosing_scopes():
    with mm.scope("encoder"), mm.scope("layer_0"):
        w = mm.Variable("w", [A])
    assert w.full_name == "encoder/layer_0/w"
    assert mm.Variable("w", [A]).full_name == "w"


def test_scopes_of_other_threads_do_not_meddle():
    names = []

    def other():
        with mm.scope("thread"):
            names.append(mm.Variable("w", [A]).full_name)

    with mm.scope("main"):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        names.append(mm.Variable("w", [A]).full_name)
    assert names == ["thread/w", "main/w"]


def test_ranks_and_coordinates_are_row_major_and_groups_are_those_of_the_reference():
    mesh = mm.Mesh("rows:2;cols:4")
    assert mesh.groups(["cols"]) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert mesh.groups(["rows"]) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert mesh.coordinate(6) == {"rows": 1, "cols": 2} and mesh.rank({"rows": 1, "cols": 3}) == 7


def test_slices_of_an_image_on_a_mesh_of_eight_are_those_of_the_reference():
    dims = [mm.Dimension(n, s) for n, s in (("batch", 100), ("rows", 28), ("cols", 28), ("channels", 3))]
    mesh_shape = "processor_rows:2;processor_cols:4"

    def begins(layout):
        program = mm.compile({"y": mm.placeholder("image", dims) * 1.0}, mesh_shape=mesh_shape, layout=layout)
        feed = program.feeds["image"]
        return feed.value.shape, [tuple(s.start for s in feed.slices(program.mesh, program.mesh.coordinate(r))) for r in range(8)]
    shape, starts = begins("rows:processor_rows;cols:processor_cols")
    assert shape == (100, 14, 7, 3) and starts[1] == (0, 0, 7, 0) and starts[6] == (0, 14, 14, 0)
    shape, starts = begins("batch:processor_cols")
    assert shape == (25, 28, 28, 3) and starts[3] == starts[7] == (75, 0, 0, 0) and 8 * math.prod(shape) == 470_400


def value(tensor, **feeds):
    """Compile and run one output on one rank."""
    program = mm.compile({"y": tensor})
    return mm.State([program]).run(program, whole=True, **feeds)["y"]


def test_a_contraction_and_its_gradients_are_those_of_the_reference():
    c = mm.Dimension("c", 2)
    x, w = mm.placeholder("x", [A, B], "float64"), mm.placeholder("w", [B, c], "float64")
    y = mm.einsum([x, w], [A, c])
    dx, dw = mm.gradients(mm.reduce_sum(mm.square(y)), [x, w])
    feeds = {"x": np.array([[1., 2, 3], [4, 5, 6]]), "w": np.array([[1., 0], [2, 1], [0, 3]])}
    assert value(y, **feeds).tolist() == [[5, 11], [14, 23]]
    assert value(dx, **feeds).tolist() == [[10, 42, 66], [28, 102, 138]]
    assert value(dw, **feeds).tolist() == [[122, 206], [160, 274], [198, 342]]


def test_slices_pads_and_their_gradient_are_those_of_the_reference():
    long, short, longer = mm.Dimension("d", 4), mm.Dimension("d", 2), mm.Dimension("d", 5)
    x, dy = mm.placeholder("x", [long]), mm.placeholder("dy", [longer])
    y = mm.pad(mm.slice(x, "d", 1, short), "d", 1, longer)
    feeds = {"x": np.array([1, 2, 3, 4], np.float32)}
    assert value(y, **feeds).tolist() == [0, 2, 3, 0, 0]
    assert value(mm.gradients(y, [x], [dy])[0], dy=np.array([1, 2, 3, 4, 5], np.float32)).tolist() == [0, 2, 3, 0]


def test_pointwise_functions_have_the_values_of_the_reference():
    d = mm.Dimension("d", 7)
    x = mm.placeholder("x", [d], "float64")
    at = np.array([-3, -1, -.5, 0, .5, 1, 3])
    assert np.allclose(value(mm.gelu(x), x=at), [-.0036375, -.1588080, -.1542860, 0, .3457140, .8411920, 2.9963626], atol=2e-7)  # they ran in float32
    ends = {mm.silu: (-.2689414, .7310586), mm.elu: (-.6321206, 1), mm.selu: (-1.1113307, 1.0507010), mm.softplus: (.3132617, 1.3132617),
            mm.leaky_relu: (-.2, 1)}
    for f, expected in ends.items():
        assert np.allclose(value(f(x), x=at)[[1, 5]], expected, atol=5e-8), f.__name__


def test_whole_number_division_rounds_down_for_every_sign():
    d = mm.Dimension("d", 4)
    x, y = mm.placeholder("x", [d], "int32"), mm.placeholder("y", [d], "int32")
    feeds = {"x": np.array([-7, 7, -7, 7]), "y": np.array([2, -2, 3, -3])}
    assert value(x // y, **feeds)[:2].tolist() == [-4, -4] and value(x % y, **feeds)[2:].tolist() == [2, -2]


def test_corners_have_the_documented_subgradients():
    d = mm.Dimension("d", 3)
    x, y = mm.placeholder("x", [d]), mm.placeholder("y", [d])
    feeds = {"x": np.array([1, 2, 3], np.float32), "y": np.array([2, 2, 2], np.float32)}
    dx, dy = mm.gradients(mm.maximum(x, y), [x, y])
    assert value(dx, **feeds).tolist() == [0, 1, 1] and value(dy, **feeds).tolist() == [1, 1, 0], "a tie goes to both"
    assert value(mm.gradients(mm.abs(x), [x])[0], x=np.array([-2, 0, 3], np.float32)).tolist() == [-1, 0, 1]
    assert value(mm.gradients(mm.relu(x), [x])[0], x=np.array([-2, 0, 3], np.float32)).tolist() == [0, 0, 1]
    matrix = mm.placeholder("m", [A, B])
    rows = np.array([[1, 3, 3], [2, 0, 2]], np.float32)
    assert value(mm.reduce_max(matrix, "b"), m=rows).tolist() == [3, 2]
    assert value(mm.gradients(mm.reduce_max(matrix, "b"), [matrix])[0], m=rows).tolist() == [[0, 1, 1], [1, 0, 1]]
    scalar = mm.placeholder("s", [])
    assert mm.gradients(mm.maximum(matrix, scalar), [scalar])[0].shape == scalar.shape, "the reference system returns the matrix's shape"


def test_normalisations_and_losses_have_the_values_of_the_reference():
    d, four = mm.Dimension("d", 3), mm.Dimension("d", 4)
    x, targets = mm.placeholder("x", [d], "float64"), mm.placeholder("t", [], "int32")
    at = np.array([1., 2, 3])
    assert np.allclose(value(mm.reduce_logsumexp(x, "d"), x=at), 3.407606, atol=5e-7)
    assert np.allclose(value(mm.reduce_logsumexp(mm.placeholder("x", [A], "float64"), "a"), x=np.array([1000., 1000.])), 1000.693176, atol=1e-3)
    assert np.allclose(value(mm.softmax(x, "d"), x=at), [.0900306, .2447285, .6652410], atol=5e-8)
    z = mm.placeholder("z", [four], "float64")
    normed = mm.layer_norm(z, "d", mm.full([four], 1.0, "float64"), mm.full([four], 0.0, "float64"), eps=0.0)
    assert np.allclose(value(normed, z=np.array([1., 2, 3, 4])), [-1.3416404, -.4472136, .4472136, 1.3416404], atol=5e-8)
    for settings, expected in (({}, .4076059), ({"label_smoothing": .1}, .5076059), ({"z_loss": .1}, 1.5687838)):
        assert np.allclose(value(mm.cross_entropy(x, targets, "d", **settings), x=at, t=2), expected, atol=5e-7), settings
    assert np.allclose(value(mm.cross_entropy(x, targets, "d"), x=np.zeros(3), t=0), 1.0986123, atol=5e-8)
    assert np.allclose(value(mm.cross_entropy(x, targets, "d", z_loss=.1), x=np.zeros(3), t=0), 1.2193072, atol=5e-8)

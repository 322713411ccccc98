"""Updates: golden cases, formulas, apply = 0, layouts and storage rules."""

import numpy as np
import pytest
from ops.checks import assert_close, run

import mesh_mpi as mm

W, G = np.float32([[1, 2], [3, 4]]), np.float32([[.1, -.2], [.3, .4]])
SPLITS = [("", "", None), ("a:2", "rows:a", None), ("a:2", "columns:a", None), ("a:2;b:2", "rows:a;columns:b", None),
          ("a:2", "", {"optimizer": "rows:a"}), ("a:2", "batch:a", {"optimizer": "columns:a"}), ("a:2;b:2", "batch:b;rows:a", {"optimizer": "columns:b"})]


class Updates:
    """A variable ``w`` with slots, updated by ``rule(w, g, slots, scalars) -> (w, slots)``; the gradient is a sum over ``batch``."""

    def __init__(self, shape, slots, rule, dtype="float32"):
        dims = [mm.Dimension(n, s) for n, s in zip(("rows", "columns", "depth"), shape)]
        batch = mm.Dimension("batch", 2)
        self.w = mm.Variable("w", dims, dtype=dtype)
        g = mm.reduce_sum(mm.placeholder("g", [batch, *dims], dtype), batch)
        with mm.rules_of("optimizer"):
            self.slots = {n: mm.Variable(n, [d for d in dims if d.name not in gone], dtype=dtype, storage_class="optimizer", trainable=False)
                          for n, gone in slots.items()}
            scalars = {n: mm.placeholder(n, [], {"step": "int64", "apply": "int32"}.get(n, dtype)) for n in ("lr", "step", "scale", "apply", "decay")}
            w, new = rule(self.w, g, self.slots, scalars)
        self.updates = [(self.w, w), *((self.slots[n], new[n]) for n in self.slots)]
        self.dtype = np.dtype(dtype).type

    def step(self, values, g, lr, step=1, scale=1.0, apply=1, decay=0.0, **where):
        """Run one update from ``values`` and return the new ones."""
        halves = np.stack([g * self.dtype(.5)] * 2)
        number = self.dtype
        feeds = {"g": halves, "lr": number(lr), "step": np.int64(step), "scale": number(scale), "apply": np.int32(apply), "decay": number(decay)}
        return run({}, feeds, self.updates, values, **where)[0]

    def start(self, w):
        """Return the value w and slots of zeros."""
        return {"w": w, **{n: np.zeros(v.shape.sizes, v.dtype) for n, v in self.slots.items()}}


def adam(shape=(2, 2), dtype="float32", **options):
    """Adam with its slots."""
    def rule(w, g, slots, s):
        w, m, v = mm.adam_update(w, g, slots["m"], slots["v"], s["lr"], s["step"], s["scale"], s["apply"], **options)
        return w, {"m": m, "v": v}
    return Updates(shape, {"m": (), "v": ()}, rule, dtype)


def sgd(shape=(2, 2), dtype="float32", **options):
    """SGD, with its slot if there is momentum."""
    def rule(w, g, slots, s):
        w, v = mm.sgd_update(w, g, slots.get("v"), s["lr"], s["scale"], s["apply"], **options)
        return w, {"v": v}
    return Updates(shape, {"v": ()} if options.get("momentum") else {}, rule, dtype)


def adafactor(shape, dtype="float32", min_size=128, beta1=0.0, **options):
    """Adafactor with the slots that its sizes ask for."""
    dims = mm.factored_dims(mm.Shape(mm.Dimension(n, s) for n, s in zip(("rows", "columns", "depth"), shape)), min_size)
    slots = {"v": ()} if dims is None else {"vr": (dims[0].name,), "vc": (dims[1].name,)}
    slots |= {"m": ()} if beta1 else {}

    def rule(w, g, slots, s):
        return mm.adafactor_update(w, g, slots, s["lr"], s["decay"], s["scale"], s["apply"], dims, beta1=beta1, **options)
    return Updates(shape, slots, rule, dtype)


@pytest.mark.parametrize("mesh, layout, storage", SPLITS)
def test_sgd_and_adam_with_weight_decay_of_the_reference(mesh, layout, storage):
    where = {"mesh": mesh, "layout": layout, "storage": storage}
    plain = sgd()
    assert_close(plain.step(plain.start(W), G, .1, **where)["w"], np.float32([[.99, 2.02], [2.97, 3.96]]), 1e-6)
    rule = adam(eps=1e-6, weight_decay=.01, bias_correction=False)
    one = rule.step(rule.start(W), G, .1, step=1, **where)
    assert_close(one["w"], np.float32([[.6828722, 2.3141778], [2.6808057, 3.6797972]]), 1e-6)
    two = rule.step(one, G, .1, step=2, **where)
    assert_close(two["w"], np.float32([[.2573252, 2.7367752], [2.2531974, 3.2511818]]), 1e-6)


def test_adam_with_bias_correction_and_momentum_with_nesterov_are_the_textbooks():
    rng = np.random.default_rng(11)
    w, g, m, v = rng.standard_normal((4, 4, 6))
    v = v**2
    found = adam((4, 6), "float64", weight_decay=.1).step({"w": w, "m": m, "v": v}, g, .01, step=7, scale=.5)
    m1, v1 = .9 * m + .1 * g * .5, .999 * v + .001 * (g * .5)**2
    step = (m1 / (1 - .9**7)) / (np.sqrt(v1 / (1 - .999**7)) + 1e-8) + .1 * w
    for name, expected in {"w": w - .01 * step, "m": m1, "v": v1}.items():
        assert_close(found[name], expected, 1e-12, name)
    for nesterov in (False, True):
        found = sgd((4, 6), "float64", momentum=.9, nesterov=nesterov, weight_decay=.1).step({"w": w, "v": v}, g, .01, scale=.5)
        g1 = .5 * g + .1 * w
        v1 = .9 * v + g1
        assert_close(found["v"], v1, 1e-12)
        assert_close(found["w"], w - .01 * (g1 + .9 * v1 if nesterov else v1), 1e-12)


@pytest.mark.parametrize("mesh, layout, storage", SPLITS)
def test_adafactor_of_small_variables_keeps_whole_moments(mesh, layout, storage):
    where, rule = {"mesh": mesh, "layout": layout, "storage": storage}, adafactor((2, 2))
    one = rule.step(rule.start(W), G, .01, decay=0.0, **where)
    assert_close(one["w"], np.float32([[.9726139, 2.0273862], [2.9726138, 3.9726140]]), 1e-6)
    assert_close(one["v"], G**2, 1e-6)
    two = rule.step(one, G, .01, decay=1 - 2**-.8, **where)
    assert_close(two["w"], np.float32([[.9453768, 2.0546234], [2.9453766, 3.9453769]]), 1e-6)


@pytest.mark.parametrize("mesh, layout, storage", SPLITS)
@pytest.mark.parametrize("clip, first, second", [
    (None, [[.8267949, 2.2449489], [2.7676210, 3.7809107]], [[.6976955, 2.4275231], [2.5944159, 3.6176116]]),
    (1.0, [[.9209431, 2.1118033], [2.8939340, 3.9]], [[.8418862, 2.2236066], [2.7878680, 3.8]])])
def test_adafactor_factored(clip, first, second, mesh, layout, storage):
    where = {"mesh": mesh, "layout": layout, "storage": storage}
    rule = adafactor((2, 2), min_size=2, clipping_threshold=clip, parameter_scale=False)
    one = rule.step(rule.start(W), G, .1, decay=.8, **where)
    assert_close(one["w"], np.float32(first), 1e-6)
    assert_close(one["vr"], np.float32([.01, .02]), 1e-6)
    assert_close(one["vc"], np.float32([.005, .025]), 1e-6)
    two = rule.step(one, G, .1, decay=.8, **where)
    assert_close(two["w"], np.float32(second), 1e-6)
    assert_close(two["vr"], np.float32([.018, .036]), 1e-6)
    assert_close(two["vc"], np.float32([.009, .045]), 1e-6)


@pytest.mark.parametrize("mesh, layout, storage", [
    *[s for s in SPLITS if "columns" not in s[1] + str(s[2])], ("a:3", "columns:a", None), ("a:2;b:3", "rows:a;columns:b", None)])
def test_adafactor_with_scale_clip_and_momentum(mesh, layout, storage):
    where, rule = {"mesh": mesh, "layout": layout, "storage": storage}, adafactor((2, 3), min_size=2, beta1=.9)
    g = np.float32([[.1, -.2, .3], [.4, .5, -.6]])
    one = rule.step(rule.start(np.float32([[1, 2, 3], [4, 5, 6]])), g, .1, decay=.8, **where)
    assert_close(one["w"], np.float32([[.9751962, 2.0379817, 2.9542639], [3.9576943, 4.9595113, 6.0390038]]), 1e-6)
    assert_close(one["vr"], np.float32([.0093333, .0513333]), 1e-5)
    assert_close(one["vc"], np.float32([.017, .029, .045]), 1e-6)
    two = rule.step(one, g, .1, decay=.8, **where)
    assert_close(two["w"], np.float32([[.9281287, 2.1100554, 2.8674757], [3.8774159, 4.8826804, 6.1130170]]), 1e-6)


def test_which_dimensions_are_factored():
    def dims(**sizes):
        found = mm.factored_dims(mm.Shape(mm.Dimension(n, s) for n, s in sizes.items()))
        return found and tuple(d.name for d in found)
    assert dims(a=128, b=128) == ("a", "b")
    assert dims(a=127, b=1024) is None
    assert dims(a=256, b=128, c=512) == ("c", "a")
    assert dims(a=4, b=256, c=512) == ("c", "b")
    assert dims(a=512) is None


def test_three_dimensions_are_factored_over_two_and_no_layout_changes_a_step():
    rng = np.random.default_rng(12)
    w, g = rng.standard_normal((2, 4, 6, 2))
    rule = adafactor((4, 6, 2), "float64", min_size=3, beta1=.9, weight_decay=.1)
    start = {n: np.abs(rng.standard_normal(x.shape)) for n, x in rule.start(w).items()} | {"w": w}
    one = rule.step(start, g, .1, decay=.8, scale=.5)
    u = (g * .5)**2 + 1e-30
    vr, vc = .8 * start["vr"] + .2 * u.mean(1), .8 * start["vc"] + .2 * u.mean(0)  # columns=6 is the largest, then rows=4
    assert_close(one["vr"], vr, 1e-12)
    assert_close(one["vc"], vc, 1e-12)
    x = g * .5 / np.sqrt(vr / vr.mean(0))[:, None] / np.sqrt(vc)[None]
    m = .9 * start["m"] + .1 * .1 * np.sqrt((w**2).mean()) * x / max(1, np.sqrt((x**2).mean()))
    assert_close(one["w"], w - m - .01 * w, 1e-12)
    for mesh, layout, storage in [*SPLITS, ("a:2", "depth:a", None), ("a:3", "columns:a", None), ("a:3", "", {"optimizer": "columns:a"})]:
        found = rule.step(start, g, .1, decay=.8, scale=.5, mesh=mesh, layout=layout, storage=storage)
        for name, value in one.items():
            assert_close(found[name], value, 1e-12, f"{name} under {mesh} {layout} {storage}")


RULES = [lambda: sgd(momentum=.9), adam, lambda: adafactor((2, 2), beta1=.9), lambda: adafactor((2, 2), min_size=2, beta1=.9)]


@pytest.mark.parametrize("make", RULES)
@pytest.mark.parametrize("mesh, layout, storage", SPLITS)
def test_apply_0_changes_no_bit_even_if_the_gradient_is_not_finite(make, mesh, layout, storage):
    rule = make()
    start = {n: np.abs(np.random.default_rng(13).standard_normal(x.shape)).astype(np.float32) for n, x in rule.start(W).items()}
    for g in (G, np.float32([[np.nan, np.inf], [1, 1]])):
        found = rule.step(start, g, .1, apply=0, mesh=mesh, layout=layout, storage=storage)
        for name, value in start.items():
            assert found[name].tobytes() == value.tobytes(), name


@pytest.mark.parametrize("make", [lambda: sgd(momentum=.9), adam])
def test_an_update_is_one_operation_in_place(make):
    rule = make()
    program = mm.compile({}, rule.updates)
    kinds = [i.name for i in program.instructions]
    assert kinds == ["reduce", kinds[-1]] and kinds[-1] in ("sgd", "adam")
    last = program.instructions[-1]
    assert [program.plan.address(v.root)[0] for v in last.outputs] == ["w", *rule.slots]


def test_slots_that_are_split_take_the_gradient_scattered():
    rule = adam((4, 6))
    program = mm.compile({}, rule.updates, mesh_shape="a:2", layout="batch:a", storage={"optimizer": "rows:a"})
    assert [c.name for c in program.collectives()] == ["reduce_scatter", "allgather"]


def test_faults_are_named():
    d, e = mm.Dimension("d", 4), mm.Dimension("e", 4)
    w, lr, apply = mm.Variable("w", [d]), mm.placeholder("lr", []), mm.placeholder("apply", [], "int32")
    with pytest.raises(mm.MeshMpiError, match=r"sgd_update: g is .*\[e=4\]"):
        mm.sgd_update(w, mm.placeholder("g", [e]), None, lr, lr, apply)
    with pytest.raises(mm.MeshMpiError, match="momentum is 0.9 and v is None"):
        mm.sgd_update(w, w, None, lr, lr, apply, momentum=.9)
    with pytest.raises(mm.MeshMpiError, match="apply is .* of float32. Give a scalar tensor of int32"):
        mm.sgd_update(w, w, None, lr, lr, lr)
    with pytest.raises(mm.MeshMpiError, match=r"slots \['m'\] were given .* \['v'\] are needed"):
        mm.adafactor_update(w, w, {"m": w}, lr, lr, lr, apply)

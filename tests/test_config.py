"""The configuration: what is accepted, what is refused with which line, and how files and overrides combine."""

import pytest

from mesh_mpi import config as cfg
from mesh_mpi.errors import ConfigError

MODEL = {"d_model": 8, "d_ff": 16, "heads": 2, "d_kv": 4, "layers": 1, "vocab_size": 300, "length": 4}
LEAST = {"model": MODEL, "sequences_per_batch": 8}
TEXT = """\
mesh_shape: "data:2;model:2"
layout: "batch:data;d_ff:model;heads:model;vocab:model"
sequences_per_batch: 8
model: {d_model: 8, d_ff: 16, heads: 2, d_kv: 4, layers: 1, vocab_size: 300, length: 4}
"""


@pytest.fixture
def write(tmp_path):
    """Write files of this test's folder; return the path of one."""
    def write(text: str, name: str = "run.yaml"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path
    return write


def refused(call, *words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        call()
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in:\n{caught.value}"
    return str(caught.value)


def test_the_least_configuration_has_the_documented_defaults():
    config = cfg.parse(LEAST)
    assert (config.optimizer.name, config.schedule.name, config.train.steps, config.seed) == ("adam", "constant", 1000, 0)
    assert (config.mesh_shape, config.layout, config.storage, config.strict_layout) == ("", "", {}, False)
    assert config.model.padded_vocab_size == 384 and config.model.activations == ("relu",)
    assert config.n_sequences == 8 and config.n_tokens == 32
    assert config.model.attention_dropout_rate == config.model.dropout == 0.0


def test_what_is_written_out_is_read_back_equal(write):
    for text in ("1e-3", "no", "true", "null", "~", "12", "a: b", " x", "#1", "", "0x10", ".inf"):
        config = cfg.parse({**LEAST, "run_dir": text, "optimizer": {"name": "adafactor", "clipping_threshold": None},
                            "schedule": {"name": "noam", "learning_rate": 1e-7}, "storage": {"optimizer": ""}})
        assert cfg.load(write(cfg.to_yaml(config))) == config
    assert "clipping_threshold: null" in cfg.to_yaml(config)


def test_numbers_and_words_follow_yaml_1_2(write):
    config = cfg.load(write(TEXT + "schedule: {name: constant, learning_rate: 1e-3}\nrun_dir: no\nseed: 010\n"))
    assert config.schedule.learning_rate == 1e-3 and config.run_dir == "no" and config.seed == 10
    refused(lambda: cfg.load(write(TEXT + "strict_layout: yes\n")), "run.yaml:5", "strict_layout is 'yes'", "true or false")
    refused(lambda: cfg.load(write(TEXT + "schedule: {name: constant, learning_rate: .nan}\n")), "learning_rate is nan")


@pytest.mark.parametrize("line, words", [
    ("modle: {}", ["unknown key 'modle'", "'model'"]),
    ("train: {stpes: 3}", ["unknown key 'train.stpes'", "'train.steps'"]),
    ("optimizer: {name: sgd, beta1: 0.9}", ["unknown key 'optimizer.beta1'", "momentum"]),
    ("optimizer: {name: adm}", ["optimizer.name is 'adm'", "'adam'"]),
    ("optimizer: {beta1: 0.5}", ["optimizer.name is missing", "sgd, adam, adafactor"]),
    ("optimizer: adam", ["optimizer is 'adam'", "mapping"]),
    ("train: 3", ["train is 3", "mapping"]),
    ("train: {steps: ten}", ["train.steps is 'ten'", "a whole number of at least 1"]),
    ("train: {steps: 0}", ["train.steps is 0"]),
    ("train: {steps: 1.5}", ["train.steps is 1.5"]),
    ("train: {steps: true}", ["train.steps is True"]),
    ("seed: -1", ["seed is -1", "of at least 0"]),
    ("seed: 99999999999999999999", ["seed is 99999999999999999999"]),
    ("float_type: float16", ["float_type is 'float16'", "one of float32, float64"]),
    ("optimizer: {name: adam, beta2: 1.0}", ["optimizer.beta2 is 1.0", "below 1"]),
    ("storage: [a]", ["storage is ['a']", "mapping of text to text"]),
    ("storage: {parameter: 'd_model:data'}", ["storage has no class 'parameter'", "'parameters'"]),
    ("storage: {optimizer: 'd_model:dat'}", ["axis 'dat'", "'data'"]),
    ("tokens_per_batch: 32", ["sequences_per_batch", "run.yaml:3", "tokens_per_batch", "run.yaml:5", "exactly one"]),
])
def test_a_fault_is_named_with_its_line_its_key_and_the_nearest_right_one(write, line, words):
    path = write(TEXT + f"{line}\n")
    text = refused(lambda: cfg.load(path), *words)
    assert f"{path}:5" in text


@pytest.mark.parametrize("old, new, words", [
    ("data:2;model:2", "data:2;model:x", [":1", "'x'"]),
    ("data:2;model:2", "data:2;data:2", [":1", "'data'", "twice"]),
    ("batch:data", "batch:dta", [":2", "'dta'", "'data'"]),
    ("d_ff:model", "d_ff", [":2", "'d_ff'"]),
    ("d_ff: 16, ", "", [":4", "model.d_ff is missing"]),
    ("length: 4", "length: 4, activation: 'rleu'", [":4", "'rleu'", "'relu'"]),
    ("sequences_per_batch: 8", "tokens_per_batch: 30", [":3", "30 tokens", "length 4"]),
    ("sequences_per_batch: 8", "sequences_per_batch: 7", [":3", "7 sequences", "2 slices", "multiple of 2"]),
    ("sequences_per_batch: 8", "seed: 0", ["none of them", "exactly one"]),
])
def test_values_that_do_not_fit_one_another_are_refused_at_their_line(write, old, new, words):
    assert old in TEXT
    path = write(TEXT.replace(old, new))
    refused(lambda: cfg.load(path), str(path), *words)


def test_all_faults_of_all_files_come_in_one_message(write):
    write("sede: 1\ntrain: {steps: -1}\n", "base.yaml")
    text = refused(lambda: cfg.load(write("include: base.yaml\n" + TEXT + "seed: x\n"), ["model.nrom=rms", "=3"]), "5 faults")
    for word in ("base.yaml:1: unknown key 'sede'", "base.yaml:2: train.steps is -1", "seed is 'x'", "override 'model.nrom=rms'", "override '=3'"):
        assert word in text


def test_a_key_that_stands_twice_is_refused_with_both_lines(write):
    path = write(TEXT + "seed: 1\nseed: 2\n")
    refused(lambda: cfg.load(path), f"{path}:6", f"{path}:5", "'seed'")
    refused(lambda: cfg.load(write(TEXT.replace("{d_model: 8", "{d_model: 8, d_model: 8"))), "'d_model'")


@pytest.mark.parametrize("text, words", [("a: [1", [":1", "no YAML"]), ("- 1\n- 2\n", ["[1, 2]", "mapping"]), ("a: &x {b: *x}\n", ["alias"]),
                                         ("a: 1\n---\nb: 2\n", ["no YAML"]), ("", ["model is missing"]), ("model: !!python/object:x {}\n", [])])
def test_what_is_no_single_mapping_is_refused(write, text, words):
    refused(lambda: cfg.load(write(text)), *words)


def test_aliases_of_aliases_and_endless_nesting_are_refused_in_no_time(write):
    lines = ["a0: &a0 [x]"] + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    refused(lambda: cfg.load(write("\n".join(lines))), "run.yaml:", "more than 100000 values, aliases written out")
    refused(lambda: cfg.load(write("[" * 5000 + "]" * 5000)), "no YAML", "recursion")


def test_a_message_shows_no_more_of_a_wrong_value_than_helps(write):
    text = refused(lambda: cfg.load(write("word " * 10_000)), "the file holds 'word word", "... Write a mapping of keys to values.")
    assert len(text) < 500
    refused(lambda: cfg.load(write("include: {a: b}\n")), "include holds {'a': 'b'}.")
    refused(lambda: cfg.load(write("? [1, 2]\n: 3\n")), ":1: a key is a list or a mapping. Keys are words.")


def test_an_unreadable_or_missing_file_is_refused(tmp_path):
    (tmp_path / "latin.yaml").write_bytes(b"a: \xff\n")
    refused(lambda: cfg.load(tmp_path / "latin.yaml"), "latin.yaml", "UTF-8")
    refused(lambda: cfg.load(tmp_path / "nowhere.yaml"), "nowhere.yaml", "runs/bench_lm.yaml")


def test_overrides_lie_on_top_and_later_ones_win(write):
    config = cfg.load(write(TEXT), ["train.steps=5", "train.steps=6", "model.dropout=1e-1", "optimizer={name: sgd, momentum: 0.5}", "optimizer.momentum=0.25",
                                    "mesh_shape=data:4", "layout=batch:data"])
    assert (config.train.steps, config.model.dropout, config.optimizer.name, config.optimizer.momentum) == (6, 0.1, "sgd", 0.25)
    assert config.mesh_shape == "data:4"
    refused(lambda: cfg.load(write(TEXT), ["train.steps=x"]), "override 'train.steps=x': train.steps is 'x'")
    refused(lambda: cfg.load(write(TEXT), ["seed.x=1"]), "override 'seed.x=1': seed is {'x': 1}")


def test_an_override_that_looks_like_a_mapping_without_braces_is_text(write):
    refused(lambda: cfg.load(write(TEXT), ["layout=batch:"]), "override 'layout=batch:': layout: 'batch:' in 'batch:' is no dimension:axis")
    assert cfg.load(write(TEXT), ["model={d_model: 16}"]).model.d_model == 16


def test_null_and_an_empty_override_mean_the_default(write):
    config = cfg.load(write(TEXT), ["mesh_shape=", "layout=null", "model.norm="])
    assert (config.mesh_shape, config.layout, config.model.norm) == ("", "", "rms")
    refused(lambda: cfg.load(write(TEXT), ["model.d_ff="]), "model.d_ff is missing")


def test_includes_lie_underneath_relative_to_their_file_and_merge_deeply(write):
    write("model: {layers: 1, length: 4}\nseed: 3\ntrain: {steps: 7}\n", "base/deep/one.yaml")
    write("include: deep/one.yaml\nmodel: {d_model: 8, d_ff: 16, heads: 2, d_kv: 4, vocab_size: 10, layers: 2}\n", "base/two.yaml")
    write("mesh_shape: data:2\nlayout: batch:data\n", "layout.yaml")
    config = cfg.load(write("include: [base/two.yaml, layout.yaml]\nmodel: {layers: 3}\nsequences_per_batch: 2\n"))
    assert (config.model.layers, config.model.d_ff, config.seed, config.train.steps, config.mesh_shape) == (3, 16, 3, 7, "data:2")


def test_an_include_that_does_not_lie_beside_its_file_is_the_packages_own(write):
    for name in ("runs/quickstart.yaml", "configs/runs/quickstart.yaml"):
        assert cfg.load(write(f"include: {name}\nseed: 7\n")).model.d_model == 128
    write("seed: 3\n", "runs/quickstart.yaml")
    assert cfg.load(write("include: runs/quickstart.yaml\n" + TEXT)).seed == 3
    refused(lambda: cfg.load(write("include: runs/quick.yaml\n")), "one of the package's own", "runs/quickstart.yaml")


def test_a_circle_of_includes_and_a_missing_one_are_refused(write):
    write("include: run.yaml\n", "other.yaml")
    refused(lambda: cfg.load(write("include: other.yaml\n")), "run.yaml -> other.yaml -> run.yaml")
    refused(lambda: cfg.load(write("seed: 1\ninclude: none.yaml\n")), "run.yaml:2", "'none.yaml'")
    refused(lambda: cfg.load(write(f"include: {'x' * 5000}\n")), "run.yaml:1", "there is no file")
    refused(lambda: cfg.load("x" * 5000), "there is no file")
    refused(lambda: cfg.load(write("include: 3\n")), "run.yaml:1", "include holds 3")


def test_a_changed_name_replaces_a_section_and_an_unchanged_one_is_merged(write):
    write(TEXT + "optimizer: {name: adam, beta1: 0.5, beta2: 0.9}\n", "base.yaml")
    assert cfg.load(write("include: base.yaml\noptimizer: {name: adam, beta1: 0.6}\n")).optimizer.beta2 == 0.9
    assert cfg.load(write("include: base.yaml\noptimizer: {name: sgd}\n")).optimizer == cfg.parse({**LEAST, "optimizer": {"name": "sgd"}}).optimizer
    assert cfg.load(write("include: base.yaml\noptimizer: {beta1: 0.6}\n")).optimizer.beta1 == 0.6


def test_one_form_of_the_batch_takes_the_place_of_another_underneath(write):
    write(TEXT, "base.yaml")
    assert cfg.load(write("include: base.yaml\ntokens_per_batch: 16\n")).n_sequences == 4
    assert cfg.load(write(TEXT), ["sequences_per_replica=3"]).n_sequences == 6
    assert cfg.load(write(TEXT), ["sequences_per_batch=4"]).n_sequences == 4


@pytest.mark.parametrize("form, given, n", [("sequences_per_batch", 64, 64), ("tokens_per_batch", 65536, 128),
                                            ("sequences_per_replica", 4, 64), ("tokens_per_replica", 2048, 64)])
def test_the_four_forms_of_the_batch_are_mesh_tensorflow_s(form, given, n):
    config = cfg.parse({"model": {**MODEL, "length": 512}, "mesh_shape": "batch:16", "layout": "batch:batch", form: given})
    assert config.n_sequences == n


def test_a_batch_divides_into_microbatches_over_the_replicas():
    fits = {"model": MODEL, "mesh_shape": "data:2", "layout": "batch:data", "train": {"microbatches": 2}}
    assert cfg.parse({**fits, "sequences_per_batch": 8}).n_sequences == 8
    refused(lambda: cfg.parse({**fits, "sequences_per_batch": 6}), "6 sequences", "2 microbatches", "multiple of 4")


def test_activations_are_a_product_of_known_ones():
    assert cfg.parse({**LEAST, "model": {**MODEL, "activation": "gelu, linear"}}).model.activations == ("gelu", "linear")


def test_a_configuration_cannot_be_changed():
    with pytest.raises(AttributeError):
        cfg.parse(LEAST).seed = 1


SHIPPED = sorted(str(path.relative_to(cfg.find("runs/quickstart.yaml").parents[1])) for path in cfg.find("runs/quickstart.yaml").parents[1].rglob("*.yaml"))


LAYOUTS = [name for name in SHIPPED if name.startswith("layouts/") and "/paper/" not in name]  # the paper's are for its sizes only


@pytest.mark.parametrize("name", [name for name in SHIPPED if not name.startswith("layouts/")])
def test_every_configuration_that_is_shipped_loads_from_any_folder(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert cfg.load(name) == cfg.load(f"configs/{name}")
    for layout in LAYOUTS:
        (tmp_path / "run.yaml").write_text(f"include: [{cfg.find(name)}, {cfg.find(layout)}]\n")
        assert cfg.load("run.yaml").n_sequences


@pytest.mark.parametrize("name, billions, n_ranks", [("nhalf", 0.14, 32), ("n1", 0.22, 32), ("n2", 0.37, 32), ("n4", 0.67, 32), ("n8", 1.28, 128),
                                                     ("n16", 2.48, 512), ("n32", 4.90, 512)])
def test_the_paper_s_series_has_the_paper_s_sizes(name, billions, n_ranks):
    config = cfg.load(f"models/lm_{name}.yaml")
    m = config.model
    n = m.layers * (4 * m.d_model * m.heads * m.d_kv + 2 * m.d_model * m.d_ff) + 2 * m.padded_vocab_size * m.d_model + m.length * m.d_model
    assert round(n / 1e9, 2) == billions and config.n_tokens == 65536
    assert cfg.Mesh(config.mesh_shape).size == n_ranks
    assert (config.schedule.name, config.schedule.decay_steps, config.train.steps) == ("warmup_rsqrt_decay", 13600, 136000)


@pytest.mark.parametrize("name, layout, n_ranks", [("nhalf", "batch32", 32), ("n1", "batch32", 32), ("n2", "model4_batch8", 32), ("n4", "model4_batch8", 32),
                                                   ("n8", "model8_batch16", 128), ("n16", "model32_batch16", 512), ("n32", "model32_batch16", 512)])
def test_the_paper_s_series_compiles_on_the_paper_s_meshes(name, layout, n_ranks, write):
    from mesh_mpi.training.step import build

    config = cfg.load(write(f"include: [{cfg.find(f'models/lm_{name}.yaml')}, {cfg.find(f'layouts/paper/{layout}.yaml')}]\n"))
    program = build(config).step_program
    assert program.mesh.size == n_ranks and not program.warnings
    assert {c.axes for c in program.collectives()} <= {("model",), ("batch",)}


def test_the_yardstick_s_configuration_is_the_yardstick_s_model():
    config = cfg.load("runs/bench_lm.yaml")
    m = config.model
    assert (m.vocab_size, m.d_model, m.d_ff, m.heads, m.d_kv, m.layers, m.length, config.n_sequences) == (8192, 512, 2048, 8, 64, 6, 256, 8)
    assert (m.norm, m.norm_eps, m.activation, m.tied_embedding, m.biases, m.dropout) == ("layer", 1e-5, "relu", True, False, 0.0)
    o = config.optimizer
    assert (o.name, o.beta1, o.beta2, o.eps, o.weight_decay, o.clip_norm, config.schedule.learning_rate) == ("adam", 0.9, 0.999, 1e-8, 0.0, None, 1e-3)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_that_is_shipped_is_legal_for_the_first_run_and_gives_its_losses(layout, write):
    from mesh_mpi.training.measure import MeasuredStep
    from mesh_mpi.training.step import build

    run, one = cfg.find("runs/quickstart.yaml"), ["mesh_shape=", "layout="]
    laid_out = MeasuredStep(build(cfg.load(write(f"include: [{run}, {cfg.find(layout)}]\n"))))
    single = MeasuredStep(build(cfg.load(run, one)))
    for _ in range(2):
        assert laid_out.run().loss == pytest.approx(single.run().loss, rel=1e-5)

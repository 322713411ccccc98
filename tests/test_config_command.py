"""``mesh-mpi config``: what it prints loads again to the same configuration, and says what every key means."""

import re

import pytest

from mesh_mpi import config as cfg
from mesh_mpi import config_schema as schema
from mesh_mpi.jobs.config import EXAMPLE, documentation
from mesh_mpi.jobs.main import main


def run(capsys, *words) -> tuple[int, str, str]:
    code = main(["config", *words])
    return code, *capsys.readouterr()


def test_the_defaults_load_to_the_defaults(capsys, tmp_path):
    code, out, err = run(capsys, "--defaults")
    assert code == 0 and not err
    (tmp_path / "run.yaml").write_text(out)
    example = cfg.load(EXAMPLE)
    keys, _ = documentation(schema)
    required = {name: getattr(example.model, name) for name, key in keys["Model"].items() if key.required}
    assert set(required) == {"d_model", "d_ff", "heads", "d_kv", "layers", "vocab_size", "length"}
    assert cfg.load(tmp_path / "run.yaml") == cfg.parse({"model": required, "sequences_per_batch": example.sequences_per_batch})


def test_every_key_of_the_schema_has_a_line_with_a_comment(capsys):
    _, out, _ = run(capsys, "--defaults")
    keys, docs = documentation(schema)
    without = [f"{section}.{name}" for section, its in keys.items() for name, key in its.items() if not key.comment
               and not (section == "Config" and isinstance(getattr(cfg.load(EXAMPLE), name), schema.Section)) and name != "name"]
    assert not without
    for section, its in keys.items():
        for name, key in its.items():
            if key.comment and name != "name":
                assert re.search(rf"^(# )?( )*{name}:.*# .*{re.escape(key.comment)}", out, re.M), f"{section}.{name}"
    assert all(docs[section] for section in keys)


@pytest.mark.parametrize("kind", [*schema.Optimizer.__args__, *schema.Schedule.__args__])
def test_every_optimizer_and_schedule_is_shown_and_its_lines_work_without_the_hash(kind, capsys, tmp_path):
    _, out, _ = run(capsys, "--defaults")
    lines = out.splitlines()
    at = next(i for i, line in enumerate(lines) if re.fullmatch(rf"(# )?  name: {kind.name}", line))
    key = lines[at - 1].strip("# :")
    block = [line.removeprefix("# ") for line in lines[at - 1:at + 1 + len(kind.__struct_fields__)]]
    rest = re.sub(rf"^{key}:\n(  .*\n)+", "", out, flags=re.M)
    (tmp_path / "run.yaml").write_text(rest + "\n".join(block) + "\n")
    assert getattr(cfg.load(tmp_path / "run.yaml"), key) == kind()


@pytest.mark.parametrize("name", ["runs/quickstart.yaml", "models/lm_n4.yaml"])
def test_a_resolved_configuration_loads_to_the_same(name, capsys, tmp_path):
    overrides = ["mesh_shape=data:2", "layout=batch:data", "optimizer={name: adafactor}", "train.steps=7"]
    code, out, err = run(capsys, name, *overrides)
    assert code == 0 and not err
    (tmp_path / "run.yaml").write_text(out)
    config = cfg.load(tmp_path / "run.yaml")
    assert config == cfg.load(name, overrides) and config.train.steps == 7
    assert run(capsys, str(tmp_path / "run.yaml"))[1] == out


def test_a_faulty_file_ends_with_its_message_and_exit_code_2(capsys, tmp_path):
    (tmp_path / "run.yaml").write_text("sede: 1\n")
    code, out, err = run(capsys, str(tmp_path / "run.yaml"))
    assert code == 2 and not out and "unknown key 'sede'" in err and "Traceback" not in err
    assert run(capsys, "runs/quickstart.yaml", "train.stpes=3")[0] == 2


def test_neither_a_file_nor_defaults_or_both_are_refused(capsys):
    for words, found in (([], "neither a file nor --defaults"), (["runs/quickstart.yaml", "--defaults"], "--defaults and runs/quickstart.yaml")):
        code, out, err = run(capsys, *words)
        assert code == 2 and not out and found in err


def test_the_data_section_names_what_is_read(capsys):
    data = cfg.load(EXAMPLE, ["data.train=train.h5", "data.valid=bundled:sotu", "data.prefetch=0", "data.shuffle=false"]).data
    assert (data.train, data.valid, data.prefetch, data.shuffle) == ("train.h5", "bundled:sotu", 0, False)
    model = {"d_model": 8, "d_ff": 8, "heads": 1, "d_kv": 8, "layers": 1, "vocab_size": 8, "length": 4}
    default = cfg.parse({"model": model, "sequences_per_batch": 1}).data
    assert (default.train, default.valid, default.shuffle) == ("synthetic", None, True) and default.prefetch > 0

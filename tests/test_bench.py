"""The measurement: its formulas, what counts as a step's time, and the alternation with a peer."""

import json
import sys

import pytest
from mpi_runner import import_path, run_group

from mesh_mpi.config import load
from mesh_mpi.errors import LaunchError
from mesh_mpi.jobs import bench, main
from mesh_mpi.training.rate import product_parameters


class FakeStep:
    """A step that takes no time on two ranks, the other of which is three times as slow as this one."""

    n_ranks, peak_bytes, comm_bytes, resident_before_bytes = 2, 2**30, 12345, 2**20

    def __init__(self):
        self.n_steps = 0

    def run(self):
        self.n_steps += 1

    def comm_s(self):
        return 0.5 * self.n_steps

    def maxima(self, values):
        return [3 * value for value in values]


def figures(monkeypatch, *overrides):
    clock = iter(range(1000))
    monkeypatch.setattr(bench.time, "perf_counter", lambda: float(next(clock)))
    monkeypatch.setattr(bench, "product_rate", lambda maxima: 50.0)
    step, config = FakeStep(), load("runs/bench_lm.yaml", overrides)
    return bench.measure(step, config), step


def test_a_step_counts_as_long_as_on_the_slowest_rank_and_warm_up_does_not_count(monkeypatch):
    found, step = figures(monkeypatch, "bench.steps=4", "bench.warmup=3")
    assert step.n_steps == 7
    assert (found["step_s"], found["tokens_per_s"]) == (3.0, round(8 * 256 / 3, 1))
    assert (found["comm_s"], found["comm_fraction"], found["comm_bytes"]) == (1.5, 0.5, 12345)
    assert found["peak_bytes"] == 3 * 2**30 and found["resident_bytes"] > 2**20
    assert found["resident_growth_bytes"] == found["resident_bytes"] - 3 * 2**20


def test_the_operations_of_the_yardstick_s_step_are_those_of_the_formula(monkeypatch):
    found, _ = figures(monkeypatch)
    products = 6 * (4 * 512 * 8 * 64 + 2 * 512 * 2048) + 8192 * 512
    assert found["flops"] == 6 * products * 2048 + 12 * 6 * 8 * 256**2 * 512
    assert found["gflops_per_s"] == round(found["flops"] / 3 / 1e9, 2)
    assert found["sgemm_fraction"] == round(found["flops"] / 3 / 1e9 / 100, 4)


def test_a_product_of_activations_counts_each_of_its_projections():
    plain, gated = (load("runs/bench_lm.yaml", [f"model.activation={a}"]) for a in ("relu", "gelu,linear"))
    assert product_parameters(gated) - product_parameters(plain) == 6 * 512 * 2048


def test_the_line_for_people_has_the_tokens_a_second(monkeypatch):
    found, _ = figures(monkeypatch)
    text = bench.describe(found)
    assert "682.7 tokens/s" in text and "on 2 ranks" in text and "50.0% " not in text.split(";")[0] and "\n" not in text
    json.dumps(found)


def test_the_rate_of_products_is_positive_and_that_of_the_slowest_rank():
    one = bench.product_rate(list, size=64, repeats=3)
    assert 0 < one and bench.product_rate(lambda values: [1e3 * v for v in values], size=64, repeats=3) < one


def test_this_and_the_peer_run_in_turn_and_the_ratio_is_that_of_the_medians(tmp_path, capsys):
    def command(name, rates):
        script = tmp_path / f"{name}.py"
        script.write_text(f"""
import json, pathlib
log = pathlib.Path({str(tmp_path / 'order')!r})
order = log.read_text() if log.exists() else ""
rate = {rates}[order.count({name[0]!r})]
log.write_text(order + {name[0]!r})
print("hello")
print(json.dumps(dict(tokens_per_s=rate)))
print("bye")
""")
        return [sys.executable, str(script)]
    assert bench.in_turn(command("this", [10, 30, 20]), " ".join(command("peer", [10, 8, 12])), 3) == 0
    assert (tmp_path / "order").read_text() == "tptptp"
    said = capsys.readouterr().out
    assert "this: median 20.0 tokens/s (10.0 - 30.0)" in said and "peer: median 10.0 tokens/s (8.0 - 12.0)" in said
    assert "ratio of the medians: 2.000; round by round 1.000 - 3.750" in said
    assert json.loads(said.splitlines()[-1])["ratio"] == 2.0


@pytest.mark.parametrize("command, word", [("exit 3", "exit code 3"), ("echo lost >&2; exit 1", "lost"), ("echo 12", "no line of JSON")])
def test_a_peer_that_fails_or_says_nothing_is_an_error_with_its_words(command, word):
    with pytest.raises(LaunchError, match=word):
        bench.tokens_per_s(command, "the peer")


@pytest.mark.parametrize("words, expected", [
    ([], ["-m", "mesh_mpi.jobs.main", "bench", "c.yaml", "a=1"]),
    (["-n", "2", "--steps", "3"], ["-m", "mesh_mpi.jobs.main", "launch", "-n", "2", "--", "bench", "c.yaml", "a=1", "--steps", "3"]),
])
def test_its_own_part_of_the_alternation_goes_through_launch_when_ranks_are_asked_for(words, expected, monkeypatch):
    seen = []
    monkeypatch.setattr(bench, "in_turn", lambda own, peer, rounds: seen.append((own[1:], peer, rounds)) or 0)
    assert main.main(["bench", "c.yaml", *words, "a=1", "--in-turn-with", "python peer.py", "--rounds", "2"]) == 0
    assert seen == [(expected, "python peer.py", 2)]


def test_requests_without_meaning_are_refused_with_what_to_do():
    command = [sys.executable, "-m", "mesh_mpi.jobs.main", "bench", "runs/bench_lm.yaml"]
    for words, env, text in [([], {}, "needs 2 ranks"), (["-n", "2"], {"PMI_RANK": "0"}, "already running"), (["--steps", "0"], {}, "bench.steps is 0"),
                             (["--rounds", "0", "--in-turn-with", "x"], {}, "--rounds is 0")]:
        result = run_group([*command, *words], 30, {**import_path(), **env})
        assert result.returncode == 2 and text in result.stderr and "Traceback" not in result.stderr, result


def test_saving_is_measured_in_turn_with_h5py_and_leaves_nothing(tmp_path):
    command = [sys.executable, "-m", "mesh_mpi.jobs.main", "bench", "runs/quickstart.yaml", "mesh_shape=data:2;model:1", "--save", str(tmp_path)]
    said = run_group([*command, "-n", "2", "--rounds", "2"], 120, import_path()).check().stdout.splitlines()
    figures = json.loads(said[-1])
    assert "from 2 ranks written in" in said[0] and figures["n_ranks"] == figures["rounds"] == 2 and list(tmp_path.iterdir()) == []
    assert figures["checkpoint_bytes"] > 12 * 451_200 and figures["ratio"] == pytest.approx(figures["plain_s"] / figures["write_s"], rel=0.01)
    nowhere = run_group([*command[:-1], str(tmp_path / "no"), "mesh_shape=data:1;model:1"], 60, import_path())
    assert nowhere.returncode == 2 and "measuring saves in" in nowhere.stderr and "Traceback" not in nowhere.stderr


def test_explain_prints_every_program_of_a_configuration_for_any_number_of_ranks():
    command = [sys.executable, "-m", "mesh_mpi.jobs.main", "explain", "runs/quickstart.yaml"]
    summary = run_group([*command, "--summary", "mesh_shape=data:4;model:2"], 60, import_path()).check().stdout
    assert "data=4, model=2" in summary and "allreduce" in summary
    listing = run_group(command, 60, import_path()).check().stdout
    assert len(listing.splitlines()) > 10 * len(summary.splitlines()) and "data=2, model=2" in listing
    wrong = run_group([*command, "layout=btch:data"], 60, import_path())
    assert wrong.returncode == 2 and "'btch'" in wrong.stderr and "'batch'" in wrong.stderr and "Traceback" not in wrong.stderr


def test_two_real_ranks_are_measured_in_turn_with_a_peer(tmp_path):
    peer = tmp_path / "peer.py"
    peer.write_text("print('{\"tokens_per_s\": 2.0}')")
    command = [sys.executable, "-m", "mesh_mpi.jobs.main", "bench", "runs/quickstart.yaml", "mesh_shape=data:2;model:1", "--steps", "2"]
    said = run_group([*command, "-n", "2", "--rounds", "1", "--in-turn-with", f"{sys.executable} {peer}"], 240, import_path()).check()
    found = json.loads(said.stdout.splitlines()[-1])
    assert found["peer"] == [2.0] and found["ratio"] == pytest.approx(found["this"][0] / 2.0, rel=1e-4)
    alone = run_group([*command, "-n", "2"], 240, import_path()).check().stdout.splitlines()
    figures = json.loads(alone[-1])
    assert len(alone) == 2 and " tokens/s, " in alone[0] and figures["n_ranks"] == 2 and figures["threads"] == 1
    assert 0 < figures["comm_s"] <= figures["step_s"] and figures["comm_bytes"] > 4 * 442368 and figures["sgemm_fraction"] > 0

"""Pictures of runs: what is read, what is drawn, what is said when it cannot be."""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as xml

import pytest

from mesh_mpi.errors import ConfigError
from mesh_mpi.jobs.main import main
from mesh_mpi.training.curves import draw, read_curves, smoothed


def run_folder(folder, n=200, shift=0.0):
    """Make a run's folder with n steps, two evaluations, a skipped step and half a line."""
    folder.mkdir()
    lines = [{"step": i, "loss": None if i == 7 else 2 + shift + 3 / i, "tokens_per_s": 1000.0 + i} for i in range(1, n + 1)]
    lines += [{"step": n // 2, "valid_loss": 2.5 + shift}, {"step": n, "valid_loss": 2.25 + shift}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 201, "lo')
    return folder


def test_curves_are_what_the_metrics_say(tmp_path):
    curves = read_curves(run_folder(tmp_path / "a"))
    assert len(curves.loss) == 199 and curves.loss[0] == (1, 5.0) and curves.held_out == [(100, 2.5), (200, 2.25)]
    assert curves.throughput[-1] == (200, 1200.0)
    assert read_curves(tmp_path / "a" / "metrics.jsonl").loss == curves.loss


def test_smoothing_keeps_a_line_a_line_and_its_steps():
    points = [(10 * i, 2.0 * i) for i in range(300)]
    found = smoothed(points)
    assert [step for step, _ in found] == [step for step, _ in points]
    assert [value for _, value in found[:296]] == pytest.approx([value for _, value in points[:296]])
    assert smoothed([(1, 5.0)]) == [(1, 5.0)]


def test_the_command_draws_runs_over_one_another_with_labels(tmp_path, capsys):
    a, b = run_folder(tmp_path / "a"), run_folder(tmp_path / "b", 100, 0.5)
    assert main(["plot", str(a), str(b), "--output", str(tmp_path / "both.svg")]) == 0
    texts = ["".join(node.itertext()) for node in xml.parse(tmp_path / "both.svg").getroot().iter("{http://www.w3.org/2000/svg}text")]
    for text in ("loss (nats a token)", "tokens a second", "step", f"{a}: training, smoothed", f"{b}: held out, 2.750 at step 100"):
        assert text in texts
    assert main(["plot", str(a)]) == 0
    assert (a / "curves.png").read_bytes().startswith(b"\x89PNG") and capsys.readouterr().out.split() == [str(tmp_path / "both.svg"), str(a / "curves.png")]


def test_a_run_of_one_step_is_drawn(tmp_path):
    draw([read_curves(run_folder(tmp_path / "a", 1))], tmp_path / "one.png")
    assert (tmp_path / "one.png").stat().st_size > 1000


def test_what_cannot_be_drawn_is_refused(tmp_path, monkeypatch):
    folder = run_folder(tmp_path / "a")
    with pytest.raises(ConfigError, match="nothing/metrics.jsonl|nothing cannot be read"):
        read_curves(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(ConfigError, match="has 1 lines and no step's loss"):
        read_curves(tmp_path / "empty")
    with pytest.raises(ConfigError, match="ends in .png, .svg or .pdf"):
        draw([read_curves(folder)], tmp_path / "a.gif")
    with pytest.raises(ConfigError, match="cannot be written"):
        draw([read_curves(folder)], tmp_path / "no" / "a.png")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"matplotlib is missing .*pip install matplotlib"):
        draw([read_curves(folder)], tmp_path / "a.png")

"""Training under a real Slurm: the batch script that is shipped, on two nodes, to the end and through a requeue."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

import pytest
from mpi_runner import ROOT, import_path
from slurm_cluster import Cluster

OVERRIDES = ("model.d_model=32", "model.d_ff=64", "model.layers=1", "model.d_kv=8", "model.dropout=0.1", "train.evaluate_every=0", "train.log_every=0")


@pytest.fixture(scope="module")
def cluster():
    with tempfile.TemporaryDirectory(prefix="slurm-", ignore_cleanup_errors=True) as folder, Cluster(Path(folder)) as running:
        yield running


def submit(cluster: Cluster, run_dir: Path, steps: int) -> str:
    """Submit the shipped script with this environment's mesh-mpi first on the path; return the job's number."""
    command = run_dir.parent / "bin" / "mesh-mpi"
    command.parent.mkdir(exist_ok=True)
    command.write_text(f"#!/bin/sh\nexec {sys.executable} -m mesh_mpi.jobs.main \"$@\"\n")
    command.chmod(0o755)
    path = f"{command.parent}:{Path(sys.executable).parent}:{cluster.environment['PATH']}"
    exports = ",".join(["ALL", f"PATH={path}", *(f"{k}={v}" for k, v in import_path().items())])
    out = cluster.run("sbatch", "--parsable", f"--export={exports}", f"--output={run_dir.parent}/%j.out", str(ROOT / "slurm" / "train.sbatch"),
                      str(ROOT / "configs" / "runs" / "quickstart.yaml"), f"run_dir={run_dir}", f"train.steps={steps}", *OVERRIDES)
    return out.strip()


def log_of(run_dir: Path, job: str) -> str:
    path = run_dir.parent / f"{job}.out"
    return path.read_text() if path.exists() else "no output"


def steps_of(run_dir: Path) -> list[int]:
    path = run_dir / "metrics.jsonl"
    return [json.loads(line)["step"] for line in path.read_text().splitlines()] if path.exists() else []


def test_the_shipped_script_trains_on_two_nodes_to_the_end(cluster, tmp_path):
    job = submit(cluster, tmp_path / "run", 5)
    fields = cluster.wait_for(job, lambda f: f["JobState"] not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING"))
    log = log_of(tmp_path / "run", job)
    assert fields["JobState"] == "COMPLETED" and fields["ExitCode"] == "0:0", log
    assert "4 ranks, 2 on this node" in log and "on node[1-2], restart 0" in log and "end " in log, log
    assert steps_of(tmp_path / "run") == [1, 2, 3, 4, 5]


def test_a_signalled_job_saves_requeues_itself_and_goes_on_from_there(cluster, tmp_path):
    run_dir, steps = tmp_path / "run", 2000
    job = submit(cluster, run_dir, steps)
    end = time.monotonic() + 60
    while len(steps_of(run_dir)) < 5:
        assert time.monotonic() < end, log_of(run_dir, job)
        time.sleep(0.1)
    cluster.run("scancel", "--signal=USR1", job)
    fields = cluster.wait_for(job, lambda f: f["JobState"] == "PENDING" and f["Restarts"] == "1")
    log = log_of(run_dir, job)
    saved = steps_of(run_dir)[-1]
    assert "asked to stop; saved at step" in log and fields["Requeue"] == "1", log
    assert 5 <= saved < steps and (run_dir / "checkpoints" / f"step_{saved:08}" / "index.h5").exists()
    time.sleep(5)  # a node refuses a restart in the seconds after it revoked the old start's credential; Slurm itself waits two minutes
    cluster.run("scontrol", "update", f"JobId={job}", "StartTime=now")
    end = time.monotonic() + 60
    while len(steps_of(run_dir)) < saved + 5:
        assert time.monotonic() < end, f"{cluster.job(job)}\n{log_of(run_dir, job)}"
        time.sleep(0.2)
    cluster.run("scancel", job)
    cluster.wait_for(job, lambda f: f["JobState"] not in ("RUNNING", "COMPLETING"))
    assert f"going on from step {saved}" in log_of(run_dir, job) and "restart 1" in log_of(run_dir, job)
    found = steps_of(run_dir)
    assert found == list(range(1, len(found) + 1))

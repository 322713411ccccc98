"""Real mounts: a file system that is read-only or full, in a mount namespace of its own; commands end with 2, say so, and lose nothing."""

from __future__ import annotations

import subprocess
import sys

import pytest
from mpi_runner import ROOT

CONFIG = """
mesh_shape: "data:2;model:2"
layout: "batch:data;d_ff:model;heads:model;vocab:model"
sequences_per_batch: 8
model: {d_model: 16, d_ff: 32, heads: 4, d_kv: 4, layers: 1, vocab_size: 258, vocab_multiple: 4, length: 16}
data: {train: "bundled:sotu"}
train: {steps: 2, log_every: 0, checkpoint_every: 1}
"""
NAMESPACES = (["unshare", "--mount", "sh", "-ec"], ["unshare", "--mount", "--map-root-user", "sh", "-ec"])  # for root, and for others
COMMANDS = {1: f"{sys.executable} -m mesh_mpi.jobs.main", 4: f"{sys.executable} -m mesh_mpi.jobs.main launch -n 4 --"}


@pytest.fixture(scope="module")
def namespace():
    """The words that run a shell script where it may mount."""
    said = []
    for words in NAMESPACES:
        done = subprocess.run([*words, "mount -t tmpfs none /mnt"], capture_output=True, text=True)
        if done.returncode == 0:
            return words
        said.append(done.stderr.strip())
    raise AssertionError(f"nothing can be mounted here: {'; '.join(said)}. These tests need util-linux, and root or user namespaces (kernel.unprivileged_userns_clone).")


def commands(namespace: list[str], script: str, n_ranks: int, folder) -> subprocess.CompletedProcess:
    """Run a shell script in a namespace where ``folder/disk`` may be mounted; ``$train`` trains on ranks, ``$simulate`` on simulated ones."""
    (folder / "disk").mkdir()
    (folder / "tiny.yaml").write_text(CONFIG)
    words = f"train='{COMMANDS[n_ranks]} train tiny.yaml'\nsimulate='{COMMANDS[1]} train tiny.yaml'\nmesh_mpi='{COMMANDS[1]}'\nexport PYTHONPATH={ROOT}\n"
    return subprocess.run([*namespace, words + script], cwd=folder, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("n_ranks", [1, 4])
def test_a_run_on_a_read_only_mount_is_refused_and_can_still_be_read(namespace, tmp_path, n_ranks):
    done = commands(namespace, "mount -t tmpfs none disk; $simulate run_dir=disk/run 2> /dev/null; mount -o remount,ro disk\n"
                    "$train run_dir=disk/run train.steps=4 && exit 9 || test $? = 2; $train run_dir=disk/new && exit 9 || test $? = 2\n"
                    "$mesh_mpi inspect disk/run --verify; $mesh_mpi evaluate disk/run --data bundled:sotu --batches 1\n", n_ranks, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("run", "new"):
        assert done.stderr.count(f"ConfigError: run_dir: 'disk/{name}' cannot be written: Read-only file system.") == 1, done.stderr
    assert "Traceback" not in done.stderr and "all checksums agree" in done.stdout and "perplexity" in done.stdout


@pytest.mark.parametrize("n_ranks", [1, 4])
def test_a_full_mount_ends_a_run_with_its_checkpoints_whole(namespace, tmp_path, n_ranks):
    done = commands(namespace, "mount -t tmpfs -o size=1000k none disk; $simulate run_dir=disk/run train.keep_last=1 2> /dev/null\n"
                    "head -c 2000000 /dev/zero > disk/rest 2> /dev/null || true\n"
                    "$train run_dir=disk/run train.steps=3 && exit 9 || test $? = 2\n"
                    "find disk/run; rm disk/rest; $mesh_mpi inspect disk/run --verify; $train run_dir=disk/run train.steps=3\n", n_ranks, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr.count("No space left on device") == 1 and "Traceback" not in done.stderr, done.stderr
    assert "partial" not in done.stdout and "step_00000002/index.h5: whole" in done.stdout and "going on from step 2" in done.stderr

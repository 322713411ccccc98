"""Tiny runs of the training loop, and what their metrics say."""

from __future__ import annotations

import json

from mesh_mpi.config import parse

LAYOUT = "batch:data;d_ff:model;heads:model;vocab:model"
KEYS = ["step", "loss", "tokens", "step_s", "tokens_per_s", "comm_bytes", "comm_s", "grad_norm", "learning_rate"]


def configuration(run_dir, mesh_shape="data:2;model:2", batch=8, steps=6, train=None, **keys):
    """A tiny model with dropout, shuffled rows, microbatches and a warm-up."""
    return parse({
        "mesh_shape": mesh_shape, "layout": ";".join(r for r in LAYOUT.split(";") if r.split(":")[1] in mesh_shape), "sequences_per_batch": batch,
        "run_dir": str(run_dir), "seed": 3,
        "model": {"d_model": 16, "d_ff": 32, "heads": 4, "d_kv": 4, "layers": 1, "vocab_size": 258, "vocab_multiple": 4, "length": 16, "dropout": 0.1},
        "optimizer": {"name": "adam", "clip_norm": 1.0}, "schedule": {"name": "linear_warmup", "learning_rate": 0.01, "warmup_steps": 4},
        "data": {"train": "bundled:sotu", "valid": "bundled:sotu"},
        "train": {"steps": steps, "microbatches": 2, "log_every": 0, "evaluate_every": 3, "evaluate_batches": 2, "checkpoint_every": 2, **(train or {})},
        **keys})


def lines(run_dir, key="loss"):
    """Return the metrics lines that have ``key``, by step; a doubled step fails."""
    found = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    found = [line for line in found if key in line]
    assert len({line["step"] for line in found}) == len(found)
    return {line["step"]: line for line in found}


def losses(run_dir):
    return {step: line["loss"] for step, line in lines(run_dir).items()}

"""Train the model of a finished run again, in PyTorch: from the same initial values, on the same batches, at the same rates.

    mesh-mpi train runs/lm_10m.yaml ... run_dir=RUN                        the run
    mesh-mpi train runs/lm_10m.yaml ... run_dir=INITIAL train.steps=1 schedule.learning_rate=1e-30
                                                                           its initial values, as a checkpoint
    python docs/examples/same_in_pytorch.py RUN INITIAL --threads 2        needs PyTorch, which mesh_mpi itself does not

Every step's loss is compared with the run's metrics.jsonl; after the last step the held-out loss is compared with the run's last
evaluation. The model is PyTorch's own: torch.nn modules, scaled_dot_product_attention, autograd, torch.optim.Adam; from mesh_mpi come the
rows of tokens and the file of initial values only. Models with dropout, biases, other activations or optimizers are refused.
Exits with 1 if one of the first 20 losses differs by more than 1e-4, or the held-out loss by more than 1%.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import h5py
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from mesh_mpi.config import load
from mesh_mpi.training.batches import open_batches, open_held_out

FIRST, FIRST_BOUND, HELD_OUT_BOUND = 20, 1e-4, 0.01


class Block(nn.Module):
    """Pre-norm self-attention and feed-forward; x [batch, length, d_model], visible [batch, 1, length, length] of bool."""

    def __init__(self, m):
        super().__init__()
        norm = nn.LayerNorm if m.norm == "layer" else nn.RMSNorm
        self.heads, inner = m.heads, m.heads * m.d_kv
        self.attention_norm, self.feed_forward_norm = norm(m.d_model, m.norm_eps), norm(m.d_model, m.norm_eps)
        self.q, self.k, self.v = (nn.Linear(m.d_model, inner, bias=False) for _ in range(3))
        self.o = nn.Linear(inner, m.d_model, bias=False)
        self.wi, self.wo = nn.Linear(m.d_model, m.d_ff, bias=False), nn.Linear(m.d_ff, m.d_model, bias=False)

    def forward(self, x, visible):
        y = self.attention_norm(x)
        q, k, v = (of(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for of in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, attn_mask=visible).transpose(1, 2).flatten(2))
        return x + self.wo(F.relu(self.wi(self.feed_forward_norm(x))))


class Model(nn.Module):
    """The language model; returns the summed loss and the number of targets of a batch."""

    def __init__(self, m, n_rows: int):
        super().__init__()
        self.vocab_size = m.vocab_size
        self.table, self.positions = nn.Parameter(torch.zeros(n_rows, m.d_model)), nn.Parameter(torch.zeros(m.length, m.d_model))
        self.blocks = nn.ModuleList(Block(m) for _ in range(m.layers))
        self.final_norm = (nn.LayerNorm if m.norm == "layer" else nn.RMSNorm)(m.d_model, m.norm_eps)

    def forward(self, inputs, targets, segments, positions):
        length = inputs.shape[1]
        visible = (segments[:, :, None] == segments[:, None, :]) & torch.ones(length, length, dtype=torch.bool).tril()
        x = self.table[inputs] + self.positions[positions]
        for block in self.blocks:
            x = block(x, visible[:, None])
        logits = (self.final_norm(x) @ self.table.T)[..., : self.vocab_size]
        counted = targets != 0  # 0 is padding
        return F.cross_entropy(logits[counted], targets[counted], reduction="sum"), counted.sum()


def initial_values(model: Model, path: Path) -> None:
    """Copy the parameters of a checkpoint; dimensions that a matrix product joins are joined, and matrices are transposed for nn.Linear."""
    with h5py.File(path) as file, torch.no_grad():
        read = lambda name: torch.from_numpy(file[f"parameters/{name}"][()])  # noqa: E731
        d = model.table.shape[1]
        model.table.copy_(read("embedding/table"))
        model.positions.copy_(read("positions/table"))
        norms = [(model.final_norm, "final_norm")]
        for i, block in enumerate(model.blocks):
            norms += [(block.attention_norm, f"layer_{i}/attention_norm"), (block.feed_forward_norm, f"layer_{i}/feed_forward_norm")]
            for name, linear in (("q", block.q), ("k", block.k), ("v", block.v)):
                linear.weight.copy_(read(f"layer_{i}/attention/{name}/weight").reshape(d, -1).T)
            block.o.weight.copy_(read(f"layer_{i}/attention/o/weight").reshape(-1, d).T)
            block.wi.weight.copy_(read(f"layer_{i}/feed_forward/in/weight").T)
            block.wo.weight.copy_(read(f"layer_{i}/feed_forward/out/weight").T)
        for norm, name in norms:
            norm.weight.copy_(read(f"{name}/scale"))
            if isinstance(norm, nn.LayerNorm):
                norm.bias.copy_(read(f"{name}/bias"))


def batch(feeds, rows: int, length: int) -> list[torch.Tensor]:
    """Return inputs, targets, segments and positions of a step, each [rows, length]."""
    slices = (slice(0, rows), slice(0, length))
    return [torch.from_numpy(np.array(feeds[name](slices), np.int64)) for name in ("inputs", "targets", "segments", "positions")]


def refuse_what_differs(config) -> None:
    """Refuse a configuration that this file does not express."""
    m, o = config.model, config.optimizer
    plain = dict(activation="relu", biases=False, tied_embedding=True, scale_logits=False, dropout=0.0, label_smoothing=0.0, z_loss=0.0,
                 loss_denominator="targets")
    found = [f"model.{key}={getattr(m, key)!r}" for key, value in plain.items() if getattr(m, key) != value]
    found += [] if type(o).__name__ == "Adam" and o.weight_decay == 0 else [f"optimizer={o!r}"]
    found += [] if config.data.is_packed else [f"data.train={config.data.train!r}"]
    if found:
        sys.exit(f"same_in_pytorch: {', '.join(found)}: not written here. Take a run without.")


def train(model: Model, config, lines: list[dict], log_every: int) -> float:
    """Take the steps of the run's ``lines``; return the largest difference of the first 20 losses."""
    m, o = config.model, config.optimizer
    optimizer = torch.optim.Adam(model.parameters(), betas=(o.beta1, o.beta2), eps=o.eps)
    worst, start = 0.0, time.perf_counter()
    with open_batches(config) as batches:
        for line in lines:
            step = line["step"]
            total, n = model(*batch(batches.feeds(step), config.n_sequences, m.length))
            loss = total / n
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            if o.clip_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), o.clip_norm)
            for group in optimizer.param_groups:
                group["lr"] = line["learning_rate"]
            optimizer.step()
            difference = abs(loss.item() - line["loss"])
            worst = max(worst, difference) if step <= FIRST else worst
            if step <= 3 or step == FIRST or step % log_every == 0:
                rate = step * config.n_sequences * m.length / (time.perf_counter() - start)
                print(f"step {step}  PyTorch {loss.item():.6f}  mesh_mpi {line['loss']:.6f}  difference {difference:.1e}  "
                      f"{rate:,.0f} tokens/s", flush=True)
    return worst


def held_out_loss(model: Model, config) -> float:
    """Return the mean loss of the held-out targets, in nats."""
    total, count = 0.0, 0
    with torch.no_grad():
        for feeds in open_held_out(config).all():
            part, n = model(*batch(feeds, config.n_sequences // config.n_microbatches, config.model.length))
            total, count = total + part.item(), count + n.item()
    return total / count


def main() -> int:
    """Train, compare, return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of the run")
    parser.add_argument("initial", type=Path, help="run whose last checkpoint holds the initial values")
    parser.add_argument("--steps", type=int, metavar="N", help="only the run's first N steps, without the held-out loss")
    parser.add_argument("--threads", type=int, default=1, help="of PyTorch (default 1)")
    a = parser.parse_args()
    torch.set_num_threads(a.threads)
    config = load(a.run / "config.resolved.yaml")
    refuse_what_differs(config)
    metrics = [json.loads(line) for line in (a.run / "metrics.jsonl").read_text().splitlines()]
    checkpoints = a.initial / "checkpoints"
    path = checkpoints / (checkpoints / "latest").read_text().strip() / "index.h5"
    with h5py.File(path) as file:
        n_rows = len(file["parameters/embedding/table"])
    model = Model(config.model, n_rows)
    initial_values(model, path)
    print(f"PyTorch {torch.__version__}, {a.threads} threads, {sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    lines = [line for line in metrics if "grad_norm" in line][: a.steps]
    worst = train(model, config, lines, config.train.log_every)
    print(f"the first {min(FIRST, len(lines))} losses differ by at most {worst:.2e} (bound {FIRST_BOUND:g})")
    if a.steps:
        return int(worst > FIRST_BOUND)
    evaluated = [line for line in metrics if "valid_loss" in line]
    ours, theirs = evaluated[-1]["valid_loss"], held_out_loss(model, config)
    print(f"held-out loss: PyTorch {theirs:.6f}, mesh_mpi {ours:.6f}: {100 * (theirs / ours - 1):+.2f}% (bound 1%)")
    return int(worst > FIRST_BOUND or abs(theirs / ours - 1) > HELD_OUT_BOUND)


if __name__ == "__main__":
    sys.exit(main())

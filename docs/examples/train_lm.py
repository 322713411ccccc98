"""Train a language model over bytes on four ranks: 2 slices of the batch x 2 slices of d_ff, heads and vocabulary.

    mesh-mpi launch -n 4 -- docs/examples/train_lm.py          four MPI ranks, about a minute and a half on two cores
    python docs/examples/train_lm.py                           the same ranks simulated in this process, the same losses to the bit

The text is the bundled one (State of the Union addresses); its last part is held out. Prints the loss every ten steps, the mean of
the last ten losses against the entropy of the bytes' frequencies, and the loss on the held-out part. Exits with 1 if the mean of the
last ten losses is not at least 20% below that entropy.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np

import mesh_mpi as mm
from mesh_mpi.config import parse
from mesh_mpi.log import is_speaker
from mesh_mpi.training.batches import ByteBatches, read_bytes, unigram_entropy
from mesh_mpi.training.step import build

HELD_OUT_BYTES = 40_000
CONFIG = {
    "mesh_shape": "data:2;model:2",
    "layout": "batch:data;d_ff:model;heads:model;vocab:model",
    "sequences_per_batch": 128,
    "model": {"d_model": 128, "d_ff": 512, "heads": 4, "d_kv": 32, "layers": 2, "vocab_size": 256, "length": 32, "dropout": 0.05},
    "optimizer": {"name": "adam", "beta1": 0.9, "beta2": 0.98, "eps": 1e-9, "clip_norm": 1.0},
    "schedule": {"name": "warmup_rsqrt_decay", "learning_rate": 0.03, "warmup_steps": 30},
    "train": {"steps": 150},
}


def report(text: str) -> None:
    """Print a line, on one rank only."""
    if is_speaker():
        print(text, flush=True)


def main() -> int:
    """Train, evaluate, return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=CONFIG["train"]["steps"], metavar="N", help="steps to take (default %(default)s)")
    arguments = parser.parse_args()
    if arguments.steps < 1:
        parser.error(f"--steps is {arguments.steps}. Take at least 1.")
    config = parse(CONFIG)
    text = read_bytes(Path(mm.__file__).parent / "data" / "sotu.txt.gz")
    train, held_out = text[:-HELD_OUT_BYTES], text[-HELD_OUT_BYTES:]
    entropy = unigram_entropy(train)

    training = build(config, evaluation=True)
    state = mm.State(training.programs, seed=config.seed)
    report(f"{state.machine!r}: {training.step_program.n_parameters:,} parameters, {training.describe_batch()}")
    batches = ByteBatches(train, config.model.length, config.n_sequences, config.seed)
    losses, start = [], time.perf_counter()
    for step in range(1, arguments.steps + 1):
        metrics = training.run_step(state, step, batches.feeds(step))
        losses.append(metrics.loss)
        if step % 10 == 0 or step == 1:
            report(f"step {step:4d}  loss {metrics.loss!r}  rate {metrics.learning_rate:.2e}  gradient {metrics.grad_norm:.3f}  {time.perf_counter() - start:.1f} s")

    order = ByteBatches(held_out, config.model.length, config.n_sequences, config.seed)
    held_out_loss = training.evaluate(state, (order.feeds(i) for i in range(1, order.n_windows // order.n_rows + 1)))
    last = float(np.mean(losses[-10:]))
    good = last <= 0.8 * entropy
    report(f"last ten losses {last:.4f} nats a byte, {1 - last / entropy:.1%} below the entropy of the frequencies, {entropy:.4f}"
           f"{'' if good else ': NOT the 20% asked for'}; held-out loss {held_out_loss:.4f}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())

"""Layout invariance through the commands: one configuration trained, continued and scored on many meshes, each as its own MPI job.

    python docs/examples/command_matrix.py FOLDER             7 meshes, and two of them with 2 and 4 microbatches; some minutes
    python docs/examples/command_matrix.py FOLDER --quick     3 of these

For each mesh: ``mesh-mpi launch -n N -- train`` for 30 steps with dropout, shuffled batches and clipping, in float32 with GELU and in float64
with ReLU; then from the checkpoint that one rank saved, ``generate`` in float64 and the logits of a fixed text in float32. Prints a table of
the largest relative differences from one rank. Bounds in float32: the first loss 1e-6, any loss 2e-5, logits 1e-5 of the largest; in float64:
losses 1e-12; texts must be the same. Exits with 1 beyond a bound. FOLDER must not exist; the runs stay there.

Why not ReLU in float32: its derivative jumps at 0, so that an activation within rounding of 0, of which a step of some million has one now
and then, has another gradient under another order of summation; training multiplies that. docs/decisions/rounding-and-relu.md has figures.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np

from mesh_mpi.mesh import Mesh
from mesh_mpi.training.generation import Writer
from mesh_mpi.training.trained import open_trained

MESHES = ("", "data:2", "data:4", "model:2", "model:4", "data:2;model:2", "model:2;data:2")
RUNS = [(mesh, 1) for mesh in MESHES] + [(mesh, n) for mesh in ("data:2", "data:2;model:2") for n in (2, 4)]
QUICK = [("", 1), ("model:2", 1), ("data:2", 2)]
LAYOUT = "batch:data;d_ff:model;heads:model;vocab:model"
FIRST_BOUND, LOSS_BOUND, FLOAT64_BOUND, LOGITS_BOUND = 1e-6, 2e-5, 1e-12, 1e-5
TEXT = b"We the people of the United States, in order to form a more perfect Union"
CONFIG = """\
sequences_per_batch: 16
model: {d_model: 128, d_ff: 512, heads: 4, d_kv: 32, layers: 2, vocab_size: 258, length: 96, dropout: 0.1, activation: gelu}
optimizer: {name: adam, beta2: 0.98, clip_norm: 1.0}
schedule: {name: linear_warmup, learning_rate: 3e-3, warmup_steps: 10}
train: {steps: 30}
data: {train: "bundled:sotu"}
"""


def placed(mesh: str) -> list[str]:
    """Return the overrides of a mesh; the layout keeps the rules whose axis the mesh has."""
    rules = ";".join(rule for rule in LAYOUT.split(";") if rule.split(":")[1] in Mesh(mesh).names)
    return [f"mesh_shape={mesh}", f"layout={rules}"]


def mesh_mpi(n_ranks: int, *words: str) -> str:
    """Run a command on ``n_ranks`` ranks; return its standard output. Ends this process if it fails."""
    command = [sys.executable, "-m", "mesh_mpi.jobs.main"] if n_ranks == 1 else [sys.executable, "-m", "mesh_mpi.jobs.main", "launch", "-n", str(n_ranks), "--"]
    done = subprocess.run([*command, *words], capture_output=True, text=True, timeout=600)
    if done.returncode:
        sys.exit(f"{' '.join(words)} on {n_ranks} ranks: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def losses(run: Path) -> np.ndarray:
    """Return the losses of a run's steps, float64 [steps]."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return np.array([line["loss"] for line in lines if "grad_norm" in line])


def save_logits(run: str, output: str, overrides: list[str]) -> int:
    """Write the logits after TEXT by the run's checkpoint (on this job's ranks) to ``output``."""
    writer = Writer(open_trained(run, overrides, "logits"), 1)
    rows = np.zeros((writer.n_rows, writer.length), np.int32)
    rows[:, 1:len(TEXT) + 1] = writer.vocabulary.encode(TEXT)
    found = []
    for at in range(len(TEXT) + 1):
        found.append(writer.logits(writer.state.run(writer.prefill, whole=["logits"], inputs=rows, at=at))[0])
    if writer.state.machine.rank == 0:
        np.save(output, np.array(found))
    return 0


def trained(folder: Path, name: str, mesh: str, n_micro: int, *more: str) -> np.ndarray:
    """Train as run ``name``; return its losses, float64 [30]."""
    mesh_mpi(math.prod(Mesh(mesh).shape), "train", str(folder / "config.yaml"), f"run_dir={folder / name}", f"train.microbatches={n_micro}",
             *placed(mesh), *more)
    found = losses(folder / name)
    if len(found) != 30:
        sys.exit(f"{folder / name}: {len(found)} losses instead of 30")
    return found


class Comparison:
    """All runs against the first, which is that of one rank."""

    def __init__(self, folder: Path):
        self.folder, self.first, self.verdicts, self.text = folder, None, [], None

    def add(self, mesh: str, n_micro: int) -> None:
        """Run the commands on one mesh, and print how far they are from one rank."""
        name = f"{mesh or 'one_rank'}_{n_micro}".replace(":", "").replace(";", "_")
        first, source = not self.verdicts, str(self.folder / "one_rank_1")
        found = [trained(self.folder, name, mesh, n_micro),
                 trained(self.folder, f"{name}_float64", mesh, n_micro, "float_type=float64", "model.activation=relu"), self.logits(source, name, mesh)]
        text = mesh_mpi(math.prod(Mesh(mesh).shape), "generate", source, "--prompt", "The people ", "--tokens", "60", "--temperature", "0.8",
                        "--samples", "2", "float_type=float64", *placed(mesh))
        if first:
            self.first, self.text = found, text
        ours, in_float64 = (np.abs(a - b) / b for a, b in zip(found[:2], self.first))
        off = np.abs(found[2] - self.first[2]).max() / np.abs(self.first[2]).max()
        ok = bool(ours[0] <= FIRST_BOUND and ours.max() <= LOSS_BOUND and in_float64.max() <= FLOAT64_BOUND and off <= LOGITS_BOUND and text == self.text)
        self.verdicts.append(ok)
        print(f"{mesh or 'one rank':15s} {n_micro} microbatches  losses {ours[0]:.1e} at first, {ours.max():.1e}  float64 {in_float64.max():.1e}  "
              f"logits {off:.1e}  text {'the same' if text == self.text else 'ANOTHER'}  {'ok' if ok else 'BEYOND A BOUND'}", flush=True)

    def logits(self, source: str, name: str, mesh: str) -> np.ndarray:
        """Return the logits after TEXT by the checkpoint of ``source``, computed on a mesh, float64 [positions, symbols]."""
        path, n_ranks = self.folder / f"{name}.npy", math.prod(Mesh(mesh).shape)
        if n_ranks == 1:
            save_logits(source, str(path), placed(mesh))
        else:
            mesh_mpi(n_ranks, __file__, str(self.folder), "--logits", source, str(path), *placed(mesh))
        return np.load(path)


def main() -> int:
    """Run everything, print the table, return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--quick", action="store_true", help="3 runs only")
    parser.add_argument("--logits", nargs="+", help=argparse.SUPPRESS)  # RUN OUTPUT override...: how this file runs itself on several ranks
    a = parser.parse_args()
    if a.logits:
        return save_logits(a.logits[0], a.logits[1], a.logits[2:])
    a.folder.mkdir(parents=True)
    (a.folder / "config.yaml").write_text(CONFIG)
    compared = Comparison(a.folder)
    for mesh, n_micro in QUICK if a.quick else RUNS:
        compared.add(mesh, n_micro)
    print(f"{len(compared.verdicts)} meshes and microbatches, {compared.verdicts.count(False)} beyond a bound; the text of all:\n{compared.text}")
    return int(False in compared.verdicts)


if __name__ == "__main__":
    sys.exit(main())

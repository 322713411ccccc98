"""Measure a training step: tokens a second, time and bytes of communication, share of the matrix-product rate.

    mesh-mpi bench runs/bench_lm.yaml -n 2                                      two ranks, through launch
    mesh-mpi launch -n 2 -- bench runs/bench_lm.yaml                            the same
    mesh-mpi bench runs/bench_lm.yaml -n 2 --in-turn-with 'python peer.py' --rounds 5
    mesh-mpi bench runs/bench_lm.yaml -n 2 --save /scratch                      saving instead, in turn with h5py alone

Prints one line for people and one line of JSON. A step is timed on every rank and counts as long as on the slowest; no barrier stands
between steps. The yardstick is the rate of 2048 x 2048 float32 products on all ranks at once, with the BLAS threads that a rank has
(launch gives each its share of the cores), before and after.
flops = 6 * parameters in products * tokens + 12 * layers * batch * length^2 * heads * d_kv, nothing taken off for causality.
With --in-turn-with, this measurement and the peer's command, whose last line of JSON must hold tokens_per_s, run in alternation.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Protocol

from mesh_mpi.errors import LaunchError
from mesh_mpi.log import is_speaker, launcher_rank, say
from mesh_mpi.training.rate import flops, product_rate


class Step(Protocol):
    """What is measured: a training step bound to this rank's machine."""

    n_ranks: int
    peak_bytes: int  # planned
    resident_before_bytes: int  # resident before any variable existed
    comm_bytes: int  # payload that this rank passes to collectives in one step

    def run(self) -> None:
        """Take one step, to its end."""

    def comm_s(self) -> float:
        """Return the seconds spent in collectives since the start."""

    def maxima(self, values: Sequence[float]) -> list[float]:
        """Return the largest of each value over all ranks."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``mesh-mpi bench``."""
    parser.add_argument("config", metavar="CONFIG", help="a YAML file, here or one that comes with the package")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="set a key of the configuration, dotted: bench.warmup=1")
    parser.add_argument("--steps", type=int, metavar="K", help="steps that are timed (default: the configuration's bench.steps)")
    parser.add_argument("-n", type=int, metavar="N", help="start N ranks through launch (default: the ranks this runs on, else one)")
    parser.add_argument("--in-turn-with", metavar="COMMAND", help="a peer's command, run in alternation with this measurement")
    parser.add_argument("--save", metavar="FOLDER", help="measure saving the model there instead, in turn with h5py writing the same bytes")
    parser.add_argument("--rounds", type=int, default=5, metavar="R", help="rounds of either alternation (default 5)")


def run(arguments: argparse.Namespace) -> int:
    """Measure here, on ranks started for it, or in turn with a peer."""
    if arguments.rounds < 1 or arguments.save is not None and arguments.in_turn_with is not None:
        raise LaunchError(f"bench: --rounds is {arguments.rounds}, --save {arguments.save!r} and --in-turn-with {arguments.in_turn_with!r}. "
                          "Give at least 1 round, and one of the two.")
    if arguments.in_turn_with is not None:
        return in_turn(own_command(arguments), arguments.in_turn_with, arguments.rounds)
    if arguments.n is not None:
        if launcher_rank() is not None:
            raise LaunchError(f"bench: -n {arguments.n} was given on a rank that is already running. Leave -n out, or start without a launcher.")
        return subprocess.call(own_command(arguments))
    from mesh_mpi.config import load
    from mesh_mpi.mesh import Mesh

    overrides = [*arguments.overrides, *([f"bench.steps={arguments.steps}"] if arguments.steps is not None else [])]
    config = load(arguments.config, overrides)
    from mesh_mpi.training.step import build  # after the configuration: its errors need no compiler

    training = build(config)  # before the ranks are counted: a fault of the layout has one text, with a launcher and without
    mesh = Mesh(config.mesh_shape)
    if mesh.size > 1 and launcher_rank() is None:
        raise LaunchError(f"bench: mesh {mesh} needs {mesh.size} ranks and this is one process. Add -n {mesh.size}, or mesh_shape= for one rank.")
    if arguments.save is not None:
        figures = saving(training, arguments.save, arguments.rounds)
        text = describe_saving(figures)
    else:
        figures = measure(open_step(training), config)
        text = describe(figures)
    if is_speaker():
        print(f"bench {arguments.config}: {text}")
        print(json.dumps(figures), flush=True)
    return 0


def open_step(training) -> Step:
    """Bind a compiled training step to this process's machine; memory counts from here, MPI, one product and one reduction done."""
    from mesh_mpi.mesh import Mesh
    from mesh_mpi.runtime.machine import choose_machine
    from mesh_mpi.training.measure import MeasuredStep

    product_rate(choose_machine(Mesh(training.config.mesh_shape)).maxima, repeats=1)
    before = resident_now_bytes()
    step = MeasuredStep(training)
    step.resident_before_bytes = before
    return step


def measure(step: Step, config) -> dict:
    """Take the configured steps and return the figures, the same on every rank."""
    for _ in range(config.bench.warmup):
        step.run()
    resident = resident_bytes()  # before the products of the yardstick, which take memory of their own
    before = product_rate(step.maxima)
    comm_start, times = step.comm_s(), []
    for _ in range(config.bench.steps):
        start = time.perf_counter()
        step.run()
        times.append(time.perf_counter() - start)
    comm = (step.comm_s() - comm_start) / config.bench.steps
    resident = max(resident, resident_now_bytes())
    after = product_rate(step.maxima)
    comm_s, peak, growth, resident, *slowest = step.maxima([comm, step.peak_bytes, resident - step.resident_before_bytes, resident, *times])
    step_s, work = statistics.median(slowest), flops(config)
    rate, ceiling = work / step_s / 1e9, step.n_ranks * (before + after) / 2
    return {
        "n_ranks": step.n_ranks, "mesh_shape": config.mesh_shape, "layout": config.layout, "threads": _threads(step.n_ranks),
        "step_s": round(step_s, 5), "step_s_min": round(min(slowest), 5), "step_s_max": round(max(slowest), 5),
        "tokens_per_s": round(config.n_tokens / step_s, 1), "comm_s": round(comm_s, 6), "comm_fraction": round(comm_s / step_s, 4),
        "comm_bytes": step.comm_bytes, "flops": work, "gflops_per_s": round(rate, 2),
        "sgemm_gflops_per_s_before": round(before, 2), "sgemm_gflops_per_s_after": round(after, 2), "sgemm_fraction": round(rate / ceiling, 4),
        "peak_bytes": int(peak), "resident_bytes": int(resident), "resident_growth_bytes": int(growth),
    }


def saving(training, folder: str, rounds: int) -> dict:
    """Return the figures of saving a compiled training step's variables in ``folder``, the same on every rank."""
    from mesh_mpi.checkpoint.measure import measure_save
    from mesh_mpi.mesh import Mesh
    from mesh_mpi.runtime.machine import choose_machine
    from mesh_mpi.runtime.state import State

    return measure_save(State(training.programs, training.config.seed, choose_machine(Mesh(training.config.mesh_shape))), folder, rounds)


def describe_saving(figures: dict) -> str:
    """Return the figures of saving as one line for people."""
    rate, ranks = figures["checkpoint_bytes"] / 1e6, "1 rank" if figures["n_ranks"] == 1 else f"{figures['n_ranks']} ranks"
    return (f"a checkpoint of {rate:,.0f} MB from {ranks} written in {figures['write_s']:.3f} s ({rate / figures['write_s']:,.0f} MB/s, "
            f"its checksums with it), by h5py alone in {figures['plain_s']:.3f} s: {figures['ratio']:.2f} of its rate; verified in {figures['verify_s']:.3f} s more")


def describe(figures: dict) -> str:
    """Return the figures as one line for people."""
    return (f"{figures['tokens_per_s']:,.1f} tokens/s, {figures['step_s']:.4f} s a step on {figures['n_ranks']} ranks "
            f"(mesh {figures['mesh_shape'] or 'of one rank'}); communication {figures['comm_fraction']:.1%}, {figures['comm_bytes']:,} bytes a rank; "
            f"{figures['gflops_per_s']:.1f} GF/s, {figures['sgemm_fraction']:.1%} of the ranks' sgemm rate "
            f"({figures['sgemm_gflops_per_s_before']:.1f} GF/s a rank before, {figures['sgemm_gflops_per_s_after']:.1f} after); "
            f"memory of a rank {figures['peak_bytes'] / 2**20:.0f} MiB planned, "
            f"{figures['resident_growth_bytes'] / 2**20:.0f} MiB grown since the start ({figures['resident_growth_bytes'] / figures['peak_bytes']:.1%}), "
            f"{figures['resident_bytes'] / 2**20:.0f} MiB resident in all")


def resident_bytes() -> int:
    """Return the most memory this process has had resident so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def resident_now_bytes() -> int:
    """Return the memory this process has resident now (where the system does not say: the most so far)."""
    try:
        with open("/proc/self/statm") as text:
            return int(text.read().split()[1]) * resource.getpagesize()
    except OSError:
        return resident_bytes()


def own_command(arguments: argparse.Namespace) -> list[str]:
    """Return the command line of this measurement by itself, through launch when -n was given."""
    options = ["--steps", str(arguments.steps)] if arguments.steps is not None else []
    options += ["--save", arguments.save, "--rounds", str(arguments.rounds)] if arguments.save is not None else []
    bench = ["bench", arguments.config, *arguments.overrides, *options]
    launch = ["launch", "-n", str(arguments.n), "--"] if arguments.n is not None else []
    return [sys.executable, "-m", "mesh_mpi.jobs.main", *launch, *bench]


def in_turn(own: list[str], peer: str, rounds: int) -> int:
    """Run two measurements in alternation; print each round, the medians, the spreads and the ratio."""
    rates: dict[str, list[float]] = {"this": [], "peer": []}
    for i in range(rounds):
        rates["this"].append(tokens_per_s(own, "this measurement"))
        rates["peer"].append(tokens_per_s(peer, "the peer"))
        say(f"round {i + 1} of {rounds}: this {rates['this'][-1]:,.1f}, peer {rates['peer'][-1]:,.1f} tokens/s")
    medians = {name: statistics.median(values) for name, values in rates.items()}
    ratios = [a / b for a, b in zip(rates["this"], rates["peer"])]
    for name, values in rates.items():
        print(f"{name}: median {medians[name]:,.1f} tokens/s ({min(values):,.1f} - {max(values):,.1f}) of {rounds} rounds")
    print(f"ratio of the medians: {medians['this'] / medians['peer']:.3f}; round by round {min(ratios):.3f} - {max(ratios):.3f}")
    print(json.dumps({"this": rates["this"], "peer": rates["peer"], "ratio": round(medians["this"] / medians["peer"], 4)}), flush=True)
    return 0


def tokens_per_s(command: list[str] | str, whose: str) -> float:
    """Run a command and return the ``tokens_per_s`` in its last line of JSON; LaunchError if it fails or has none."""
    done = subprocess.run(command, shell=isinstance(command, str), capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        raise LaunchError(f"bench: {whose} ended with exit code {done.returncode}. Its last words:\n{done.stderr[-2000:] or done.stdout[-2000:]}")
    for line in reversed(done.stdout.splitlines()):
        try:
            return float(json.loads(line)["tokens_per_s"])
        except (ValueError, KeyError, TypeError):
            continue  # not the line that is looked for
    raise LaunchError(f"bench: {whose} printed no line of JSON with tokens_per_s. It must end with one, as in {{\"tokens_per_s\": 1000.0}}.")


def _threads(n_ranks: int) -> int:
    """Return the BLAS threads of a rank: what the environment says, else its share of the cores (as the runtime has it)."""
    given = os.environ.get("OPENBLAS_NUM_THREADS") or os.environ.get("OMP_NUM_THREADS") or ""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return int(given) if given.isdigit() else max(1, cores // n_ranks)

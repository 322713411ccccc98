"""Curves of runs: loss and throughput against steps, from metrics.jsonl alone.

Invariant: drawing needs neither MPI nor checkpoints; a run that is still going on, or whose last line was cut short, is drawn as far as it is.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ..errors import ConfigError
from .run_folder import METRICS

FORMATS = (".png", ".svg", ".pdf")
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")  # told apart also by the colour-blind
LARGEST = 1e30  # beyond it, a number of a run that diverged is not drawn: axes have an end
SMOOTHED_PARTS = 50  # the smoothing's window is this part of a run


class Curves(NamedTuple):
    """One run: (step, loss) of training, (step, held-out loss), (step, tokens a second)."""

    name: str
    loss: list[tuple[int, float]]
    held_out: list[tuple[int, float]]
    throughput: list[tuple[int, float]]


def read_curves(run: str | Path) -> Curves:
    """Return the curves of a run's folder, or of a metrics file. Raises ConfigError if there is none, or no step in it."""
    path = Path(run) / METRICS if Path(run).is_dir() else Path(run)
    try:
        lines = path.read_bytes().decode(errors="replace").splitlines()
    except OSError as error:
        raise ConfigError(f"plot: {path} cannot be read: {error.strerror or error}. Give the folder of a run, which holds {METRICS}.") from None
    found: dict[str, list] = {"loss": [], "valid_loss": [], "tokens_per_s": []}
    for line in lines:
        try:
            values = json.loads(line)
            step = int(values["step"])
            numbers = {key: float(values[key]) for key in found if isinstance(values.get(key), (int, float))}
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            continue  # half a line of a run that is writing, or a damaged one
        for key, number in numbers.items():
            if 0 <= step < 2**63 and abs(number) < LARGEST:
                found[key].append((step, number))
    if not found["loss"]:
        raise ConfigError(f"plot: {path} has {len(lines)} lines and no step's loss in them. Give the folder of a run that has taken a step.")
    return Curves(str(run), found["loss"], found["valid_loss"], found["tokens_per_s"])


def smoothed(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return the points with each value averaged with its neighbours, over a fiftieth of the run; fewer at the beginning, where losses fall steeply."""
    half, result = len(points) // (2 * SMOOTHED_PARTS), []
    for i, (step, _) in enumerate(points):
        near = [value for _, value in points[i - min(i, half):i + min(i, half) + 1]]
        result.append((step, sum(near) / len(near)))
    return result


def draw(curves: Sequence[Curves], output: str | Path) -> None:
    """Draw runs over one another into a .png, .svg or .pdf. Raises ConfigError without matplotlib, or where nothing can be written."""
    path = Path(output)
    if path.suffix not in FORMATS:
        raise ConfigError(f"plot: the output is {path}. Give a name that ends in {', '.join(FORMATS[:-1])} or {FORMATS[-1]}.")
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise ConfigError(f"plot: matplotlib is missing ({error}). Install it: pip install matplotlib.") from None
    with pyplot.rc_context({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25,
                            "legend.frameon": False, "svg.fonttype": "none"}):
        figure, (above, below) = pyplot.subplots(2, 1, figsize=(9, 7.5), sharex=True, height_ratios=(2, 1), layout="constrained")
        for i, run in enumerate(curves):
            _draw_run(above, below, run, COLOURS[i % len(COLOURS)], alone=len(curves) == 1)
        above.set(ylabel="loss (nats a token)", title="Training" if len(curves) > 1 else f"Training of {curves[0].name}", ylim=_loss_range(curves))
        above.legend(loc="upper right")
        below.set(xlabel="step", ylabel="tokens a second", ylim=(0, None))
        below.xaxis.get_major_locator().set_params(integer=True)
        below.yaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda value, _: f"{value:,.0f}"))
        below.margins(x=0.02)
        figure.align_ylabels()
        try:
            figure.savefig(path, dpi=150)
        except OSError as error:
            raise ConfigError(f"plot: {path} cannot be written: {error.strerror or error}. Choose another --output.") from None
        finally:
            pyplot.close(figure)


def _draw_run(above, below, run: Curves, colour: str, alone: bool) -> None:
    """Draw one run: the steps' losses faintly, smoothed ones in front, held-out ones as points; throughput below."""
    name = "" if alone else f"{run.name}: "
    above.plot(*zip(*run.loss), color=colour, alpha=0.25, linewidth=0.8)
    label = f"{name}training{', smoothed' if len(run.loss) >= 2 * SMOOTHED_PARTS else ''}"
    above.plot(*zip(*smoothed(run.loss)), color=colour, linewidth=1.8, label=label)
    if run.held_out:
        step, loss = run.held_out[-1]
        above.plot(*zip(*run.held_out), color=colour, linestyle="--", linewidth=1.0, marker="o", markersize=5, markeredgecolor="white",
                   label=f"{name}held out, {loss:.3f} at step {step:,}")
    if run.throughput:
        below.plot(*zip(*run.throughput), color=colour, alpha=0.25, linewidth=0.8)
        below.plot(*zip(*smoothed(run.throughput)), color=colour, linewidth=1.8)


def _loss_range(curves: Sequence[Curves]) -> tuple[float, float]:
    """Return limits that show all but the steepest beginning: the losses of the first steps would press everything else together."""
    losses = [value for run in curves for _, value in (*run.loss, *run.held_out)]
    later = [value for run in curves for _, value in (*run.loss[len(run.loss) // SMOOTHED_PARTS:], *run.held_out)]
    low, high = min(losses), max(later)
    pad = 0.05 * (high - low) or 0.05 * max(1.0, math.fabs(high))
    return low - pad, high + pad

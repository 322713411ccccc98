"""The training step of a configuration: one program, or {first, more, apply} for microbatches.

Invariant: gradients are of loss sums, accumulate unreduced, and are divided once by the reduced number of targets, so that a step's result
depends neither on the mesh nor on the number of microbatches (but for the order of sums).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from ..compiler.compile import compile
from ..compiler.program import Program
from ..config import Config
from ..dims import Dimension
from ..graph.gradients import gradients, reachable
from ..graph.tensor import Tensor
from ..graph.variable import Accumulator, Variable, placeholder
from ..layers import Masks
from ..ops import add_n
from ..optimize import UpdateInputs, clip, make_optimizer, make_schedule
from ..transformer import LanguageModel, LossParts


PADDING = 0  # the target that fills packed rows and does not count


class StepMetrics(NamedTuple):
    """One step's figures: ``loss`` in nats a target (the mean over the whole batch), ``n_tokens`` that counted in it, ``grad_norm`` (global, of
    the mean gradient, before clipping), ``learning_rate``, and ``applied``: False if the gradient was not finite and nothing changed."""

    loss: float
    n_tokens: int
    grad_norm: float
    learning_rate: float
    applied: bool


class _Feeds(NamedTuple):
    """The placeholders of a step; programs without dropout or Adam lack some."""

    inputs: Tensor
    targets: Tensor
    learning_rate: Tensor
    step: Tensor
    row_offset: Tensor
    segments: Tensor | None  # packed rows only: which part of the row a position belongs to, and its index there
    positions: Tensor | None

    def loss(self, model: LanguageModel, masks: Masks | None, training: bool = True) -> LossParts:
        """Return the model's loss of these feeds."""
        return model.loss(self.inputs, self.targets, masks, self.segments, training, self.positions)


class Training:
    """The compiled programs of a configuration; made by :func:`build`.

    ``programs`` is what a State is made of; ``step_programs`` those of one step (``step``, or ``first``, ``more``, ``apply``), ``step_program``
    the one that updates the variables, ``evaluation`` the program of the loss alone, or None.
    """

    def __init__(self, config: Config, model: LanguageModel, step_programs: list[Program], evaluation: Program | None):
        self.config, self.model = config, model
        self.step_programs, self.evaluation = step_programs, evaluation
        self.programs = [*step_programs, *([evaluation] if evaluation is not None else [])]
        self.step_program = step_programs[-1]
        self.schedule = make_schedule(config.schedule, config.train.steps)

    def describe_batch(self) -> str:
        """Return the step's batch in words: sequences, tokens, microbatches, slices."""
        c = self.config
        k, n = c.n_microbatches, c.n_replicas
        pieces = f", in {k} microbatches of {c.n_sequences // k}" if k > 1 else ""
        share = f", {c.n_sequences // (k * n)} on each of {n} slices of the batch at a time" if n > 1 else ""
        return f"batch {c.n_sequences:,} sequences x {c.model.length} = {c.n_tokens:,} tokens a step{pieces}{share}"

    def run_step(self, state, step: int, batch: Mapping[str, Any]) -> StepMetrics:
        """Take step number ``step`` (from 1) on ``batch`` and return its figures, the same on every rank.

        Shape   batch["inputs"], batch["targets"]: int32 [batch, length] of the step's whole batch, or callable(slices) that is asked for the
                rows and positions of each slice; a negative target does not count.
        Comm    that of the programs.
        Raises  GraphError or ShapeError if the feeds do not fit.
        """
        numbers = {"step": step, "learning_rate": self.schedule(step)}
        k, out = self.config.n_microbatches, {}
        rows = self.config.n_sequences // k
        for m in range(k):
            program = self.step_programs[min(m, len(self.step_programs) - 2)] if k > 1 else self.step_program
            pieces = {name: _rows(given, m * rows, rows) for name, given in batch.items()}
            out = self._run(state, program, {**numbers, **pieces, "row_offset": m * rows})
        if k > 1:
            out = self._run(state, self.step_program, numbers)
        n = float(out["n_targets"])
        return StepMetrics(float(out["loss_sum"]) / max(n, 1.0), int(n), float(out["grad_norm"]), numbers["learning_rate"], bool(out["applied"]))

    def evaluate(self, state, batches: Iterable[Mapping[str, Any]]) -> float:
        """Return the loss in nats a target over ``batches`` of ``evaluation``'s size (one microbatch), without dropout, smoothing or z-loss."""
        total = count = 0.0
        for batch in batches:
            out = self._run(state, self.evaluation, dict(batch))
            total, count = total + float(out["loss_sum"]), count + float(out["n_targets"])
        return total / max(count, 1.0)

    @staticmethod
    def _run(state, program: Program, given: dict) -> dict:
        return state.run(program, **{name: value for name, value in given.items() if name in program.feeds})


def build(config: Config, evaluation: bool = False) -> Training:
    """Build the model of a configuration, its gradients and updates, and compile its step; with ``evaluation`` also the loss alone.

    Communication: none. Raises LayoutError, MeshError, DimensionError or ConfigError, with every fault found.
    """
    dtype, k = config.float_type, config.n_microbatches
    packed = config.data.is_packed
    model = LanguageModel(config.model, dtype, ignore=PADDING if packed else None)
    dims = [Dimension("batch", config.n_sequences // k), Dimension("length", config.model.length)]
    feeds = _Feeds(placeholder("inputs", dims, "int32"), placeholder("targets", dims, "int32"), placeholder("learning_rate", (), dtype),
                   placeholder("step", (), "int64"), placeholder("row_offset", (), "int64"),
                   *(placeholder(name, dims, "int32") if packed else None for name in ("segments", "positions")))
    parts = feeds.loss(model, Masks(feeds.step, feeds.row_offset))
    variables = trainable_variables([parts.loss_sum])
    grads = gradients(parts.loss_sum, variables)
    if k == 1:
        programs = [_compiled(config, "step", *_update(config, variables, grads, parts, feeds))]
    else:
        programs = _microbatched(config, variables, grads, parts, feeds)
    held_out = None
    if evaluation:
        parts = feeds.loss(model, None, training=False)
        held_out = _compiled(config, "evaluate", {"loss_sum": parts.loss_sum, "n_targets": parts.n_targets}, [], programs[0])
    return Training(config, model, programs, held_out)


def trainable_variables(tensors: Iterable[Tensor]) -> list[Variable]:
    """Return the trainable variables that ``tensors`` depend on, in the order in which they were made."""
    found = [op.outputs[0] for op in reachable(tensors)]
    return [v for v in found if isinstance(v, Variable) and v.trainable]


def _update(config: Config, variables, grads, parts: LossParts, feeds: _Feeds):
    """Return the outputs and updates of the part of a step that applies gradient sums."""
    clipped = clip(grads, parts.n_targets, config.optimizer.clip_norm)
    optimizer = make_optimizer(config.optimizer)
    inputs = UpdateInputs(feeds.learning_rate, feeds.step, clipped.scale, clipped.apply)
    updates = [pair for v, g in zip(variables, grads) for pair in optimizer.update(v, g, inputs)]
    outputs = {"loss_sum": parts.loss_sum, "n_targets": parts.n_targets, "grad_norm": clipped.norm, "applied": clipped.apply}
    return outputs, updates


def _microbatched(config: Config, variables, grads, parts: LossParts, feeds: _Feeds) -> list[Program]:
    """Return the programs ``first``, ``more`` and ``apply``: sums are written, added to, and reduced and applied."""
    names = [*(v.full_name for v in variables), "loss_sum", "n_targets"]
    terms = [*grads, parts.loss_sum, parts.n_targets]
    sums = [Accumulator(f"accumulator/{name}", t.shape, t.dtype) for name, t in zip(names, terms)]
    first = _compiled(config, "first", {}, list(zip(sums, terms)))
    more = _compiled(config, "more", {}, [(a, add_n([a, t])) for a, t in zip(sums, terms)], first)
    parts = LossParts(sums[-2], sums[-1], parts.logits)
    return [first, more, _compiled(config, "apply", *_update(config, variables, sums[:-2], parts, feeds), first)]


def _compiled(config: Config, name: str, outputs, updates, like: Program | None = None) -> Program:
    return compile(outputs, updates, config.mesh_shape, config.layout, config.storage, name, config.strict_layout, like)


def _rows(given, start: int, n: int):
    """Return rows ``start`` to ``start + n`` of a feed: of an array, or of a callable that is asked for slices."""
    if not callable(given):
        return given[start:start + n]
    return lambda slices: given((slice(slices[0].start + start, slices[0].stop + start), *slices[1:]))

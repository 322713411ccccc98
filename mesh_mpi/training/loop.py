"""The training loop: from a configuration to a trained, resumable run.

Invariant: all ranks take the same decisions at the same step, from numbers that were agreed on; what a run leaves behind at step s is the
same whether it was interrupted before or not.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import deque
from typing import NamedTuple

from ..checkpoint import find, load, read_configuration, save
from ..config import Config, loads, to_builtins, to_yaml
from ..errors import CheckpointError, ConfigError, MeshMpiError
from ..log import say
from ..mesh import Mesh
from ..runtime.agreement import on_rank_0
from ..runtime.banner import banner
from ..runtime.machine import choose_machine
from ..runtime.state import State
from .batches import HeldOut, open_batches, open_held_out, unigram_entropy_of_rows
from .events import Events
from .progress import Progress
from .rate import flops, product_rate
from .run_folder import Metrics, RunFolder
from .step import StepMetrics, Training, build
from .stop import CHECKPOINTED, StopRequest

DONE, NOT_FINITE = 0, 1


class Outcome(NamedTuple):
    """``code``: 0 done, 85 saved because it was asked to stop, 1 too many steps in a row without a finite gradient. ``step``: the last one taken."""

    code: int
    step: int
    checkpoint: str | None


class _Figures(NamedTuple):
    """What a step took, in seconds, on the slowest rank; whether some rank was asked to stop, and whether figures could not be written before it."""

    step_s: float
    comm_s: float
    stop: bool
    unwritten: bool


def train(config: Config, stop: StopRequest | None = None) -> Outcome:
    """Train as configured: resume if there is something to resume, save, evaluate, stop when asked (by ``stop``, if it is open already).

    Comm    collective. Raises MeshMpiError, alike on every rank, for whatever a user can mend.
    """
    folder = None
    with contextlib.nullcontext(stop) if stop is not None else StopRequest() as stop:  # also while compiling and loading: the run then stops after its first step
        parts = _parts(config)  # before anything is made: a fault of the configuration leaves no folder, and has one text on any ranks
        machine = choose_machine(Mesh(config.mesh_shape))
        try:
            folder = RunFolder(config.run_dir, machine) if config.run_dir is not None else None
            return _Run(config, parts, machine, folder).run(stop)
        finally:
            if folder is not None:
                folder.close()


class _Parts(NamedTuple):
    """What a configuration alone makes: the programs, the rows to train on and those held out (None: no evaluation)."""

    training: Training
    batches: object
    held_out: HeldOut | None


def _parts(config: Config) -> _Parts:
    """Compile, and open the data. Communication: none. Raises whatever is wrong with layout, sizes or data."""
    evaluation = config.data.valid is not None
    if evaluation and not config.data.is_packed:
        raise ConfigError(f"train: data.train is {config.data.train} and data.valid {config.data.valid}, so that evaluation would see other rows than "
                          "training. Give data.train a token file too, or data.valid=null.")
    return _Parts(build(config, evaluation=evaluation), open_batches(config), open_held_out(config) if evaluation else None)


class _Records:
    """Where figures go: metrics.jsonl, and event files if asked for."""

    def __init__(self, folder: RunFolder | None, last_step: int, tensorboard: bool):
        self.folder, self._all = folder, [Metrics(folder, last_step), Events(folder, last_step, tensorboard)]

    @property
    def failed(self) -> bool:
        """Whether something could not be written, here."""
        return any(record.error is not None for record in self._all)

    def check(self, checkpoint: str | None) -> None:
        """Raise what could not be written, alike on every rank. Comm: a verdict of rank 0."""
        def refuse():
            error = next((record.error for record in self._all if record.error is not None), None)
            if error is not None:
                raise MeshMpiError(f"metrics of {self.folder.path}: {error.strerror or error}, so the run ends. Its last checkpoint is {checkpoint}. "
                                   "Free some space, or mend the file system; the same command goes on from there.")
        if self.folder is not None:
            on_rank_0(self.folder.machine, f"metrics of {self.folder.path}", refuse)

    @property
    def losses(self) -> deque[float]:
        """The last losses that the file held when it was opened, on rank 0; takes those of further steps."""
        return self._all[0].losses

    def owe_evaluation(self) -> bool:
        """Whether the run goes on from a step whose held-out loss is missing, alike on every rank. Comm: a verdict of rank 0."""
        return self.folder is not None and on_rank_0(self.folder.machine, f"metrics of {self.folder.path}", lambda: self._all[0].owes_evaluation)

    def write(self, **values) -> None:
        """Add the figures of a step, one of them ``step``."""
        for record in self._all:
            record.write(**values)

    def close(self) -> None:
        """Bring all to disk."""
        for record in self._all:
            record.close()


class _Run:
    """One run, from where it begins to where it ends."""

    def __init__(self, config: Config, parts: _Parts, machine, folder: RunFolder | None):
        self.config, self.machine, self.folder = config, machine, folder
        self.training, self.batches, self.held_out = parts
        self.text = to_yaml(config)
        checkpoint = self._found()  # before memory is taken: a damaged one is refused at once
        self.state = State(self.training.programs, config.seed, machine, extra_digest=self.text)
        self.step, self.n_tokens = self._restored(checkpoint)
        self.changed = on_rank_0(machine, "resume", lambda: _changed(read_configuration(checkpoint), config)) if checkpoint is not None else []
        self.saved_step = self.step
        self.losses: deque[float] = deque()  # the last ones; of steps before this process's, on rank 0 only
        self.entropy = self._entropy()
        self.checkpoint = str(checkpoint.parent) if checkpoint is not None else None
        k = config.n_microbatches
        times = [1, k - 1, 1] if k > 1 else [1]
        self.comm_bytes = sum(n * r.payload_bytes for n, p in zip(times, self.training.step_programs) for r in p.collectives())

    def _found(self):
        c = self.config
        if c.resume == "never" or self.folder is None and c.resume == "auto":
            found = find(self.folder.path, "auto", self.machine) if self.folder is not None else None
            if found is not None:
                raise ConfigError(f"resume: never was asked for and {c.run_dir} holds {found.parent.name}. Choose another run_dir, or resume=auto.")
            return None
        return find(self.folder.path if self.folder is not None else None, c.resume, self.machine)

    def _restored(self, checkpoint) -> tuple[int, int]:
        """Set the state from a checkpoint, or from ``init_from``; return the steps done and the tokens seen."""
        c = self.config
        if checkpoint is None:
            if c.init_from is not None:
                load(self.state, find(None, c.init_from, self.machine), only="parameters", verified=True)
            return 0, 0
        counters = load(self.state, checkpoint, verified=True)
        missing = [name for name in ("rows_consumed", "tokens") if name not in counters]
        if missing:
            raise CheckpointError(f"resume from {checkpoint.parent}: it has no {' and no '.join(missing)} in /state, so no training loop saved it. "
                                  "Use init_from to begin anew with its parameters.")
        step, rows = int(counters["step"]), int(counters["rows_consumed"])
        differ = [f"{what} {then} there and {now} here" for what, then, now in (
            ("seed", int(counters["seed"]), c.seed), ("sequences a step", rows // max(step, 1), c.n_sequences)) if step and then != now]
        if differ:
            raise CheckpointError(f"resume from {checkpoint.parent}: {', '.join(differ)}, so the run would see other data. "
                                  "Use the values of the run, or init_from to begin anew with its parameters.")
        return step, int(counters["tokens"])

    def run(self, stop: StopRequest) -> Outcome:
        """Take the steps that are left."""
        c = self.config
        self._announce()
        rate = product_rate(self.machine.maxima, size=1024, repeats=3) * self.machine.n_ranks
        metrics, progress = _Records(self.folder, self.step, c.train.tensorboard), Progress(self.step, c.train.steps, c.train.log_every)
        times: list[float] = []
        bad, code = 0, DONE
        self.losses = metrics.losses
        self.batches.start(self.step + 1)
        try:
            if metrics.owe_evaluation() and not self._evaluated(metrics, progress, stop, False):
                code = CHECKPOINTED
            while self.step < c.train.steps and code == DONE:
                taken, figures = self._take(stop, metrics)
                if figures.unwritten:
                    metrics.check(self.checkpoint)
                times = [*times[-49:], figures.step_s]
                self.losses.append(taken.loss)
                bad = 0 if taken.applied else bad + 1
                self._report(metrics, progress, taken, figures, times, rate)
                due = c.train.checkpoint_every and self.step % c.train.checkpoint_every == 0 or self.step == c.train.steps
                if due and taken.applied:
                    # before an evaluation, which takes time; not after a step that changed nothing, or a run that diverged would push out good checkpoints
                    self._save(progress)
                evaluated = self._evaluated(metrics, progress, stop, figures.stop)
                if c.train.max_bad_steps and bad >= c.train.max_bad_steps:
                    code = NOT_FINITE
                elif not evaluated or figures.stop and self.step < c.train.steps:
                    code = CHECKPOINTED
            if code != NOT_FINITE:
                self._save(progress)
            metrics.close()
            metrics.check(self.checkpoint)
        finally:
            self.batches.close()
            progress.close()
            metrics.close()
        return self._outcome(code, bad)

    def _announce(self) -> None:
        c = self.config
        text = banner(self.state)
        if self.folder is not None:
            self.folder.describe(self.text, text)
        say(text)
        n = self.training.step_program.n_parameters
        begin = f"going on from step {self.step}" if self.step else "from the beginning"
        begin = "which were taken: raise train.steps to go on" if self.step >= c.train.steps else begin
        say(f"{n:,} parameters; {self.training.describe_batch()}; {c.train.steps} steps, {begin}")
        if self.changed:
            say(f"other than when step {self.step} was saved: {', '.join(self.changed)}")
        if not c.data.is_packed:
            say("data.train is synthetic: random numbers, from which nothing is learnt")
        if self.entropy is not None:
            say(f"the entropy of the training tokens' frequencies is {self.entropy:.4f} nats a token: what a model reaches that knows nothing else")

    def _entropy(self) -> float | None:
        """Return the unigram entropy of the training rows, where it is found quickly. Comm: a verdict of rank 0."""
        if not self.config.data.is_packed:
            return None
        return on_rank_0(self.machine, "train", lambda: unigram_entropy_of_rows(self.batches.tokens))

    def _take(self, stop: StopRequest, metrics: _Records) -> tuple[StepMetrics, _Figures]:
        comm, start = self.machine.comm_s, time.perf_counter()
        taken = self.training.run_step(self.state, self.step + 1, self.batches.feeds(self.step + 1))
        step_s = time.perf_counter() - start
        self.step += 1
        self.n_tokens += taken.n_tokens
        step_s, comm_s, asked, failed = self.machine.maxima([step_s, self.machine.comm_s - comm, float(stop.requested), float(metrics.failed)])
        return taken, _Figures(step_s, comm_s, asked > 0, failed > 0)

    def _report(self, metrics: _Records, progress: Progress, taken: StepMetrics, figures: _Figures, times, rate: float) -> None:
        c = self.config
        metrics.write(step=self.step, loss=taken.loss, tokens=taken.n_tokens, step_s=figures.step_s, tokens_per_s=taken.n_tokens / figures.step_s,
                      comm_bytes=self.comm_bytes, comm_s=figures.comm_s, grad_norm=taken.grad_norm, learning_rate=taken.learning_rate,
                      **({} if taken.applied else {"skipped": True}))
        typical = statistics.median(times)
        fraction = flops(c) / typical / 1e9 / rate
        progress.step(self.step, f"loss {taken.loss:.4f}  {c.n_tokens / typical:,.0f} tokens/s  {fraction:.0%} of products' rate  "
                                 f"{figures.comm_s / figures.step_s:.0%} communication", (c.train.steps - self.step) * typical)
        if not taken.applied:
            progress.line(f"step {self.step}: the gradient's norm is {taken.grad_norm}; nothing was changed")

    def _evaluated(self, metrics: _Records, progress: Progress, stop: StopRequest, stopping: bool) -> bool:
        """Evaluate if this step asks for it. False: it does, and the run was asked to stop before it or between two of its batches; it is
        then done when the run goes on. Comm: that of the program, and one reduction of a number a batch."""
        t, asked = self.config.train, stopping
        if self.held_out is None or not t.evaluate_every or self.step % t.evaluate_every and self.step != t.steps:
            return True

        def until_asked():
            nonlocal asked
            for feeds in self.held_out.all(t.evaluate_batches):
                asked = asked or self.machine.maxima([float(stop.requested)])[0] > 0
                if asked:
                    return
                yield feeds

        start = time.perf_counter()
        loss = self.training.evaluate(self.state, until_asked())
        if not asked:
            metrics.write(step=self.step, valid_loss=loss, valid_s=time.perf_counter() - start)
            progress.line(f"step {self.step}: held-out loss {loss:.4f}")
        return not asked

    def _save(self, progress: Progress) -> None:
        if self.folder is None or self.saved_step == self.step:
            return
        t = self.config.train
        counters = {"rows_consumed": self.batches.rows_consumed(self.step), "tokens": self.n_tokens}
        done = save(self.state, self.folder.path, self.step, counters, self.text, t.keep_last, t.keep_every)
        self.saved_step, self.checkpoint = self.step, str(done.path)
        progress.line(f"step {self.step}: saved {done.path} ({done.n_bytes / 2**20:.1f} MiB; written in {done.write_s:.2f} s, verified in {done.verify_s:.2f} s)")

    def _outcome(self, code: int, bad: int) -> Outcome:
        if code == NOT_FINITE:
            say(f"train: {bad} steps in a row had no finite gradient, up to step {self.step}. The last checkpoint is {self.checkpoint}. "
                "Lower the learning rate, clip the gradient, or look at the data.")
        elif code == CHECKPOINTED:
            say(f"train: asked to stop; {f'saved at step {self.step}. The same command goes on from there' if self.checkpoint else 'nothing is saved without run_dir'}.")
        elif self.losses:
            last = statistics.fmean(self.losses)
            part = 0.0 if not self.entropy else 1 - last / self.entropy
            side = f"{abs(part):.1%} {'below' if part > 0 else 'above'}"
            below = "" if not self.entropy else f", {side} the entropy of the tokens' frequencies, {self.entropy:.4f}"
            say(f"train: the mean of the last {len(self.losses)} losses is {last:.4f} nats a token{below}")
        return Outcome(code, self.step, self.checkpoint)


def _changed(text: str, config: Config) -> list[str]:
    """Return which keys of the configuration in ``text`` have other values now: ``schedule.learning_rate 0.003 -> 0.001``."""
    try:
        then, now = _flat(to_builtins(loads(text, "the checkpoint"))), _flat(to_builtins(config))
    except MeshMpiError:  # of an older version: it need not be readable
        return []
    return [f"{key} {then.get(key, 'none')} -> {now.get(key, 'none')}" for key in {**then, **now}
            if key not in ("run_dir", "resume", "init_from") and then.get(key, "none") != now.get(key, "none")]


def _flat(tree: dict, path: str = "") -> dict:
    return {k: v for key, value in tree.items()
            for k, v in (_flat(value, f"{path}{key}.") if isinstance(value, dict) else {path + key: value}).items()}

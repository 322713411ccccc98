"""Figures of a run as event files for TensorBoard, by TensorBoard's own writer.

Invariant: rank 0 alone writes; a resumed run tells TensorBoard from which step on, so that steps taken twice are shown once.
"""

from __future__ import annotations

import time

from ..errors import ConfigError
from ..runtime.agreement import on_rank_0
from .run_folder import RunFolder

FOLDER = "tensorboard"
SCALARS = ("loss", "valid_loss", "tokens_per_s", "step_s", "comm_s", "grad_norm", "learning_rate")


class Events:
    """Event files in ``run_dir/tensorboard``, from step ``last_step`` + 1 on; nothing if not ``wanted`` or without a folder.

    Comm    a verdict of rank 0. Raises ConfigError, alike on every rank, without the package tensorboard.
    """

    def __init__(self, folder: RunFolder | None, last_step: int, wanted: bool):
        self._writer, self.error = None, None
        if wanted and folder is not None:
            on_rank_0(folder.machine, f"events of {folder.path}", lambda: self._open(folder, last_step))

    def _open(self, folder: RunFolder, last_step: int) -> None:
        try:
            from tensorboard.compat.proto.event_pb2 import Event, SessionLog
            from tensorboard.compat.proto.summary_pb2 import Summary
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError as error:
            raise ConfigError(f"train: train.tensorboard needs the package tensorboard ({error}). Install it: pip install 'mesh-mpi[tensorboard]', "
                              "or set train.tensorboard=false.") from None
        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(folder.path / FOLDER))
        self._writer.add_event(Event(wall_time=time.time(), step=last_step + 1, session_log=SessionLog(status=SessionLog.START)))

    def write(self, step: int, **values) -> None:
        """Add the scalars among ``values`` to a step."""
        if self._writer is not None:
            scalars = [self._summary.Value(tag=name, simple_value=float(values[name])) for name in SCALARS if values.get(name) is not None]
            try:
                self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=self._summary(value=scalars)))
            except OSError as error:  # of its thread, which writes
                self.error = self.error or error

    def close(self) -> None:
        """Bring what was added to the file; an error is kept, as in metrics."""
        if self._writer is not None:
            try:
                self._writer.close()
            except OSError as error:
                self.error = self.error or error
            self._writer = None

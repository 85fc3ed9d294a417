"""TensorBoard event files."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from effloop.record.sinks import AppendFile, CurvesSink, Scores


class TensorBoardSink(CurvesSink):
    """Writes the curves train/*, val/*, perf/*.

    Events are written by the calling thread, one for all curves of a report. TensorBoard's own SummaryWriter uses a
    thread, which takes a core from the training step, and may hang after Ctrl-C.
    """

    def __init__(self, folder: Path, hidden: int) -> None:
        """Open a file for this start of the run, which hides earlier points from update `hidden` on; 0 hides none."""
        folder.mkdir(exist_ok=True)
        self._file = AppendFile(folder / f"events.out.tfevents.{time.time_ns()}.effloop.{os.getpid()}")
        self._records = RecordWriter(self._file)
        self._write(0, file_version="brain.Event:2")
        if hidden:  # a resumed run repeats these updates
            self._write(hidden, session_log=SessionLog(status=SessionLog.START))

    def curves(self, values: Scores, step: int) -> None:
        points = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._write(step, summary=Summary(value=points))

    def _write(self, step: int, **content: Any) -> None:
        self._records.write(Event(wall_time=time.time(), step=step, **content).SerializeToString())

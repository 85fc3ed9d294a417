"""Curves for TensorBoard."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from PIL import Image

from effloop.record.append import AppendFile
from effloop.record.grid import png
from effloop.record.sinks import EpochReport, Report, Scores, Sink


class TensorBoardSink(Sink):
    """Curves for TensorBoard: train/*, val/*, perf/*; and a picture of samples.

    Written where it happens, all curves of a report as one event. TensorBoard's own SummaryWriter has a
    thread for that, which takes a core from the step, and which Ctrl-C at the wrong moment leaves waiting.
    """

    def __init__(self, folder: Path, first_step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        folder.mkdir(exist_ok=True)
        self._file = AppendFile(folder / f"events.out.tfevents.{time.time_ns()}.effloop.{os.getpid()}")
        self._records = RecordWriter(self._file)
        self._write(0, file_version="brain.Event:2")
        if first_step:  # curves of updates that a resumed run does again are hidden from here on
            self._write(first_step, session_log=SessionLog(status=SessionLog.START))

    def images(self, name: str, picture: Image.Image) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        width, height = picture.size
        image = Summary.Image(width=width, height=height, colorspace=3, encoded_image_string=png(picture))
        self._write(0, summary=Summary(value=[Summary.Value(tag=name, image=image)]))

    def train(self, report: Report) -> None:
        values = {f"train/{name}": value for name, value in report.now.items()}
        values |= {"train/lr": report.lr, "perf/images_per_s": report.span.images_per_s, "perf/wait": report.span.wait}
        self._curves(values, report.moment.step)

    def epoch(self, report: EpochReport) -> None:
        self._curves({f"val/{name}": value for name, value in report.val.items()}, report.moment.step)

    def _curves(self, values: Scores, step: int) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        points = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._write(step, summary=Summary(value=points))

    def _write(self, step: int, **content: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._records.write(Event(wall_time=time.time(), step=step, **content).SerializeToString())

    def close(self) -> None:
        self._file.close()

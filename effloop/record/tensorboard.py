"""TensorBoard event files."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2
from tensorboard.summary.writer.record_writer import RecordWriter

from effloop.record.grid import png
from effloop.record.sinks import AppendFile, CurvesSink, Scores


class TensorBoardSink(CurvesSink):
    """Writes the curves train/*, val/*, perf/*, a picture of samples, hyperparameters and best scores (`names`).

    Events are written by the calling thread, one for all curves of a report. TensorBoard's own SummaryWriter uses a
    thread, which takes a core from the training step, and may hang after Ctrl-C.
    """

    def __init__(self, folder: Path, hidden: int, hyperparameters: Mapping[str, Any], names: Sequence[str]) -> None:
        """Open a file for this start of the run, which hides earlier points from update `hidden` on; 0 hides none."""
        self._names = names
        folder.mkdir(exist_ok=True)
        self._file = AppendFile(folder / f"events.out.tfevents.{time.time_ns()}.effloop.{os.getpid()}")
        self._records = RecordWriter(self._file)
        self._write(0, file_version="brain.Event:2")
        if hidden:  # a resumed run repeats these updates
            self._write(hidden, session_log=SessionLog(status=SessionLog.START))
        self._begin_session(hyperparameters)

    def images(self, name: str, picture: NDArray[np.uint8], step: int = 0) -> None:
        height, width, _ = picture.shape
        image = Summary.Image(width=width, height=height, colorspace=3, encoded_image_string=png(picture))
        self._write(step, summary=Summary(value=[Summary.Value(tag=name, image=image)]))

    def finish(self, summary: Mapping[str, Any]) -> None:
        best = {f"hparam/val/{name}": summary["best"][name] for name in self._names}
        self.curves({**best, "hparam/images_per_s": summary["images_per_s"]}, summary["step"])
        end = plugin_data_pb2.SessionEndInfo(status=api_pb2.STATUS_SUCCESS, end_time_secs=time.time())
        self._session(metadata.SESSION_END_INFO_TAG, session_end_info=end)

    def _begin_session(self, hyperparameters: Mapping[str, Any]) -> None:
        """Write the hyperparameters.

        torch's SummaryWriter also writes the table's columns, but TensorBoard uses those of the first run it finds for
        all runs. Without them the table has the columns of all runs.
        """
        start = plugin_data_pb2.SessionStartInfo(start_time_secs=time.time())
        for name, value in hyperparameters.items():
            if isinstance(value, bool):
                start.hparams[name].bool_value = value
            elif isinstance(value, int | float):
                start.hparams[name].number_value = value
            elif isinstance(value, str):
                start.hparams[name].string_value = value
        self._session(metadata.SESSION_START_INFO_TAG, session_start_info=start)

    def _session(self, tag: str, **info: Any) -> None:
        data = metadata.create_summary_metadata(plugin_data_pb2.HParamsPluginData(**info))
        self._write(0, summary=Summary(value=[Summary.Value(tag=tag, metadata=data)]))

    def curves(self, values: Scores, step: int) -> None:
        points = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._write(step, summary=Summary(value=points))

    def _write(self, step: int, **content: Any) -> None:
        self._records.write(Event(wall_time=time.time(), step=step, **content).SerializeToString())

    def close(self) -> None:
        self._file.close()

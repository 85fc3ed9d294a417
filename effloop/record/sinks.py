"""Where a run's record goes: a log, JSON lines, TensorBoard, the terminal."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from PIL import Image
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from effloop.record.base import Moment
from effloop.record.clock import Span
from effloop.record.grid import png

Scores = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Report:
    """What training did since the last report, and since the epoch began.

    Attributes:
        moment: where the run is.
        lr: learning rate of the last update.
        now, mean: loss, top1 and top5 since the last report, and since the epoch began.
        span, epoch_span: the same two stretches' time.
    """

    moment: Moment
    lr: float
    now: Scores
    mean: Scores
    span: Span
    epoch_span: Span

    def line(self) -> str:
        """The line of the log, values since the last one and (since the epoch began)."""
        moment, span, whole = self.moment, self.span, self.epoch_span
        errors = "  ".join(
            f"Error@{k} {100 * (1 - self.now[name]):.3f} ({100 * (1 - self.mean[name]):.3f})"
            for k, name in ((1, "top1"), (5, "top5"))
        )
        return (
            f"Epoch: [{moment.epoch}][{moment.update}/{moment.updates}]  "
            f"Time {span.seconds_per_update:.3f} ({whole.seconds_per_update:.3f})  "
            f"Data {span.images_per_s:.1f} ({whole.images_per_s:.1f})  "
            f"Wait {span.wait:.1%} ({whole.wait:.1%})  "
            f"Loss {self.now['loss']:.4f} ({self.mean['loss']:.4f})  {errors}"
        )


class Sink:
    """Hears everything and keeps nothing; the parent of those that do."""

    def note(self, line: str) -> None:
        """Something worth a line, for people."""

    def images(self, name: str, picture: Image.Image) -> None:
        """A picture of what is trained on; RGB.

        Raises:
            OSError: it can't be written; all else still can.
        """

    def train(self, report: Report) -> None:
        """Some updates were done."""

    def epoch(self, moment: Moment, scores: Scores, span: Span) -> None:
        """An epoch ended: validation scores and the training's time."""

    def close(self) -> None:
        """The run is over or broken off."""


def epoch_line(moment: Moment, scores: Scores, span: Span) -> str:
    """One line for an epoch's end."""
    return (
        f"Epoch: [{moment.epoch}] validation  Loss {scores['loss']:.4f}  Top@1 {100 * scores['top1']:.2f}  "
        f"Top@5 {100 * scores['top5']:.2f}  Data {span.images_per_s:.1f}  Wait {span.wait:.1%}"
    )


class LogSink(Sink):
    """Plain lines, in `log.txt` or on a standard output that is no terminal."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def note(self, line: str) -> None:
        self._file.write(line + "\n")
        self._file.flush()

    def train(self, report: Report) -> None:
        self.note(report.line())

    def epoch(self, moment: Moment, scores: Scores, span: Span) -> None:
        self.note(epoch_line(moment, scores, span))

    def close(self) -> None:
        if self._file is not sys.stdout:
            self._file.close()


class JsonSink(Sink):
    """`metrics.jsonl`: one JSON object a line; numbers that aren't finite are null."""

    def __init__(self, path: Path, last_step: int) -> None:
        """Go on in the file at `path`, without what it holds of updates after `last_step`."""
        if path.exists():
            kept = [line for line in path.read_text().splitlines(keepends=True) if _step(line) <= last_step]
            temporary = path.with_suffix(".tmp")
            temporary.write_text("".join(kept))
            os.replace(temporary, path)
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def train(self, report: Report) -> None:
        self._write(
            "train",
            report.moment,
            {**report.now, "lr": report.lr, "images_per_s": report.span.images_per_s, "wait": report.span.wait},
        )

    def epoch(self, moment: Moment, scores: Scores, span: Span) -> None:
        self._write("val", moment, {**scores, "images_per_s": span.images_per_s, "wait": span.wait})

    def _write(self, split: str, moment: Moment, values: Scores) -> None:
        row = finite({"split": split, "epoch": moment.epoch, "step": moment.step, **values})
        self._file.write(json.dumps(row) + "\n")

    def close(self) -> None:
        self._file.close()


def finite(values: Any) -> Any:
    """The same, with null for every number that is NaN or infinite: JSON has neither."""
    if isinstance(values, Mapping):
        return {key: finite(value) for key, value in values.items()}
    return None if isinstance(values, float) and not math.isfinite(values) else values


def _step(line: str) -> float:
    try:
        step: float = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return math.inf  # cut off in the middle, when the run was killed
    return step


class TensorBoardSink(Sink):
    """Curves for TensorBoard: train/*, val/*, perf/*; and a picture of samples.

    Written where it happens, all curves of a report as one event. TensorBoard's own SummaryWriter has a
    thread for that, which takes a core from the step, and which Ctrl-C at the wrong moment leaves waiting.
    """

    def __init__(self, folder: Path, first_step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        folder.mkdir(exist_ok=True)
        name = f"events.out.tfevents.{time.time_ns()}.effloop.{os.getpid()}"
        self._file = (folder / name).open("wb")
        self._records = RecordWriter(self._file)
        self._write(0, file_version="brain.Event:2")
        if first_step:  # curves of updates that a resumed run does again are hidden from here on
            self._write(first_step, session_log=SessionLog(status=SessionLog.START))

    def images(self, name: str, picture: Image.Image) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        width, height = picture.size
        image = Summary.Image(width=width, height=height, colorspace=3, encoded_image_string=png(picture))
        self._file.flush()
        start = self._file.tell()
        try:
            self._write(0, summary=Summary(value=[Summary.Value(tag=name, image=image)]))
            self._file.flush()
        except OSError:
            with suppress(OSError):  # TensorBoard doesn't read on behind a part of a record
                self._file.seek(start)
                self._file.truncate()
            raise

    def train(self, report: Report) -> None:
        values = {f"train/{name}": value for name, value in report.now.items()}
        values |= {"train/lr": report.lr, "perf/images_per_s": report.span.images_per_s, "perf/wait": report.span.wait}
        self._curves(values, report.moment.step)

    def epoch(self, moment: Moment, scores: Scores, span: Span) -> None:
        self._curves({f"val/{name}": value for name, value in scores.items()}, moment.step)
        self._file.flush()

    def _curves(self, values: Scores, step: int) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        points = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._write(step, summary=Summary(value=points))

    def _write(self, step: int, **content: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._records.write(Event(wall_time=time.time(), step=step, **content).SerializeToString())

    def close(self) -> None:
        self._file.close()


class TerminalSink(Sink):
    """A progress bar for the epoch under way, a line for each that is done."""

    def __init__(self, console: Console) -> None:
        self._bar = Progress(
            TextColumn("epoch {task.fields[epoch]}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
        )
        self._task: TaskID | None = None

    def note(self, line: str) -> None:
        self._bar.console.print(line, highlight=False, soft_wrap=True)

    def train(self, report: Report) -> None:
        moment = report.moment
        note = f"loss {report.mean['loss']:.3f}  {report.span.images_per_s:,.0f} images/s  wait {report.span.wait:.0%}"
        if self._task is None:
            epoch = f"{moment.epoch + 1}/{moment.epochs}"
            self._task = self._bar.add_task("", total=moment.updates, epoch=epoch, note=note)
            self._bar.start()
        self._bar.update(self._task, completed=moment.update, note=note)

    def epoch(self, moment: Moment, scores: Scores, span: Span) -> None:
        if self._task is not None:
            self._bar.remove_task(self._task)
            self._task = None
        self.note(epoch_line(moment, scores, span))

    def close(self) -> None:
        self._bar.stop()


def summary_table(summary: Mapping[str, Any]) -> Table:
    """The best and the last scores of a run, side by side."""
    table = Table(title="result")
    for heading in ("", "best", "last"):
        table.add_column(heading, justify="right" if heading else "left")
    for name in ("top1", "top5", "loss"):
        best, last = (summary[which].get(name, math.nan) for which in ("best", "last"))
        table.add_row(name, *(f"{v:.4f}" if name == "loss" else f"{v:.2%}" for v in (best, last)))
    table.add_row("epoch", str(summary["best"].get("epoch", "-")), str(summary["last"].get("epoch", "-")))
    table.add_row("images/s", "", f"{summary['images_per_s']:,.0f}")
    table.add_row("wait", "", f"{summary['wait']:.1%}")
    table.add_row("seconds", "", f"{summary['seconds']:.1f}")
    return table

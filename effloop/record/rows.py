"""Machine-readable files of a run: metrics.jsonl, perf.jsonl, metrics.csv, summary.json."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from effloop.record.append import AppendFile
from effloop.record.base import Position
from effloop.record.clock import Span
from effloop.record.sinks import EpochReport, Sink, StepReport
from effloop.system.files import write_text


class _Rows(Sink):
    """A file with a row per line, each of which belongs to an update."""

    header = ""
    """The first line."""

    def __init__(self, path: Path, last_step: int) -> None:
        """Open the file to append, without its rows of updates after `last_step`."""
        kept = []
        if path.exists():
            lines = path.read_text("utf-8").splitlines(keepends=True)
            kept = [line for line in lines if line.endswith("\n") and self._step(line) <= last_step]
        write_text(path, "".join([self.header, *kept]))
        self._file = AppendFile(path)

    def _step(self, line: str) -> float:
        """The update of a line; infinity if it isn't a row."""
        raise NotImplementedError

    def _append(self, line: str) -> None:
        self._file.write(line.encode())

    def close(self) -> None:
        self._file.close()


class _JsonLines(_Rows):
    """A JSON object per line; numbers that aren't finite are null."""

    def _step(self, line: str) -> float:
        try:
            step: float = json.loads(line)["step"]
        except (ValueError, KeyError, TypeError):
            return math.inf
        return step

    def _write(self, key: str, name: str, position: Position, values: Mapping[str, float]) -> None:
        row = {key: name, "epoch": position.epoch, "step": position.step, **values}
        self._append(json.dumps(finite(row)) + "\n")


class MetricsFile(_JsonLines):
    """`metrics.jsonl`: scores and learning rates, which are the same when a run is repeated."""

    def train(self, report: StepReport) -> None:
        self._write("split", "train", report.position, {**report.now, "lr": report.lr})

    def epoch(self, report: EpochReport) -> None:
        if report.val:
            self._write("split", "val", report.position, report.val)


class PerfFile(_JsonLines):
    """`perf.jsonl`: times, which differ when a run is repeated."""

    def train(self, report: StepReport) -> None:
        span = report.span
        times = {"seconds": span.seconds, "wait_s": span.waited_s, "idle_s": span.idle_s}
        self._write("span", "train", report.position, {**times, "images_per_s": span.images_per_s, "wait": span.wait})

    def span(self, name: str, position: Position, seconds: float) -> None:
        self._write("span", name, position, {"seconds": seconds})


def read_times(path: Path) -> tuple[Span, dict[str, float]]:
    """Totals of a perf.jsonl: of training, and the seconds of other spans by name; zero and {} without a file."""
    try:
        rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
        train = [row for row in rows if row["span"] == "train"]
        images = sum(row["images_per_s"] * row["seconds"] for row in train)
        seconds, waited_s = (sum(row[key] for row in train) for key in ("seconds", "wait_s"))
        idle_s = sum(row.get("idle_s", row["wait_s"]) for row in train)  # which older files lack
        training = Span(seconds, waited_s, round(images), idle_s=idle_s)
        names = {row["span"] for row in rows} - {"train"}
        return training, {name: sum(row["seconds"] for row in rows if row["span"] == name) for name in names}
    except (OSError, ValueError, LookupError, TypeError):
        return Span(), {}


class EpochTable(_Rows):
    """`metrics.csv`: a row for each epoch. Times are those of training.

    Numbers that aren't finite, and scores of an epoch that wasn't evaluated, are empty.
    """

    def __init__(self, path: Path, last_step: int, names: Sequence[str]) -> None:
        """Open the file as `_Rows` does; `names` are the scores' names, in the order of columns."""
        self._names = names
        scores = [f"{split}/{name}" for split in ("train", "val") for name in names]
        self.header = ",".join(["epoch", "step", "lr", *scores, "images_per_s", "wait", "seconds"]) + "\n"
        super().__init__(path, last_step)

    def _step(self, line: str) -> float:
        try:
            return int(line.split(",")[1])
        except (ValueError, IndexError):  # the header, which is written again
            return math.inf

    def epoch(self, report: EpochReport) -> None:
        position, span = report.position, report.span
        scores = [each.get(name) for each in (report.train, report.val) for name in self._names]
        row = [position.epoch, position.step, report.lr, *scores, span.images_per_s, span.wait, span.seconds]
        line = io.StringIO()
        csv.writer(line, lineterminator="\n").writerow(finite(value) for value in row)
        self._append(line.getvalue())


class SummaryFile(Sink):
    """`summary.json`, written at the end; when a run is resumed, the old file is deleted."""

    def __init__(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        self._path = path

    def finish(self, summary: Mapping[str, Any]) -> None:
        plain = {key: value for key, value in summary.items() if key != "efficiency"}  # which has a file of its own
        write_text(self._path, json.dumps(finite(plain), indent=2) + "\n")


def finite(values: Any) -> Any:
    """Replace NaN and infinity, which JSON lacks, by None in nested dicts and lists."""
    if isinstance(values, Mapping):
        return {key: finite(value) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return [finite(value) for value in values]
    return None if isinstance(values, float) and not math.isfinite(values) else values

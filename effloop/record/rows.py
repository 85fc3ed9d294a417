"""Machine-readable files of a run: metrics.jsonl, perf.jsonl, metrics.csv, summary.json."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from effloop.errors import few
from effloop.record.base import Position
from effloop.record.efficiency import Span
from effloop.record.sinks import AppendFile, EpochReport, Sink, StepReport
from effloop.system.files import keep_rows, write_text
from effloop.system.untrusted import MOST_ROWS, NewLines, read_text


@dataclass(frozen=True)
class Resumed:
    """The position that a run resumes at, which decides which rows its files keep."""

    step: int = 0  # updates done; 0 is a run of its own
    within: bool = False  # whether the epoch of that update is unfinished: its evaluation, for one, is still to be done
    saved: bool = True  # whether the checkpoint has a row of its own in perf.jsonl


class Rows(Sink):
    """A file of JSON lines, each of which belongs to an update."""

    def __init__(self, path: Path, resumed: Resumed) -> None:
        """Open the file to append, without its rows of what is done again."""

        def keep(row: Any) -> bool:
            step = float(row["step"])
            return step < resumed.step or (step == resumed.step and self._is_before(row, resumed))

        keep_rows(path, keep)
        self._file = AppendFile(path)

    def _is_before(self, row: Mapping[str, Any], resumed: Resumed) -> bool:
        """Whether a row of the last update is from before the checkpoint."""
        raise NotImplementedError

    def _write(self, position: Position, values: Mapping[str, Any]) -> None:
        (key, name), *rest = values.items()
        row = {key: name, "epoch": position.epoch, "step": position.step, **dict(rest)}
        self._file.write(json.dumps(finite(row)).encode() + b"\n")


class MetricsFile(Rows):
    """`metrics.jsonl`: scores and learning rates, which are the same when a run is repeated."""

    def _is_before(self, row: Mapping[str, Any], resumed: Resumed) -> bool:
        return not resumed.within or row.get("split") == "train"

    def train(self, report: StepReport) -> None:
        self._write(report.position, {"split": "train", **report.now, "lr": report.lr})

    def epoch(self, report: EpochReport) -> None:
        if report.val:
            self._write(report.position, {"split": "val", **report.val})


class PerfFile(Rows):
    """`perf.jsonl`: times, which differ when a run is repeated."""

    def __init__(self, path: Path, resumed: Resumed) -> None:
        super().__init__(path, resumed)
        rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()[-3:]] if resumed.saved else []
        if rows and not any(each["span"] == "checkpoint" and each["step"] == resumed.step for each in rows):
            # A row is written once the checkpoint is saved: a killed run had no time to.
            row = {"span": "checkpoint", "epoch": rows[-1]["epoch"], "step": resumed.step, "seconds": 0.0}
            self._file.write(json.dumps(row).encode() + b"\n")

    def _is_before(self, row: Mapping[str, Any], resumed: Resumed) -> bool:
        span = row.get("span")
        return resumed.saved if span == "checkpoint" else span == "train" or not resumed.within

    def train(self, report: StepReport) -> None:
        span = report.span
        times = {"seconds": span.seconds, "wait_s": span.waited_s, "idle_s": span.idle_s}
        speed = {"images_per_s": span.images_per_s, "wait": span.wait}
        self._write(report.position, {"span": "train", **times, **speed})

    def span(self, name: str, position: Position, seconds: float) -> None:
        self._write(position, {"span": name, "seconds": seconds})


def read_times(path: Path) -> tuple[list[Span], dict[str, float]]:
    """The intervals of training in a perf.jsonl, and the seconds of other spans by name; empty without a file."""
    try:
        rows = [json.loads(line) for line in read_text(path, MOST_ROWS).splitlines()]
        train = [
            Span(
                row["seconds"],
                row["wait_s"],
                round(row["images_per_s"] * row["seconds"]),
                idle_s=row.get("idle_s", row["wait_s"]),  # which older files lack
            )
            for row in rows
            if row["span"] == "train"
        ]
        names = {row["span"] for row in rows} - {"train"}
        return train, {name: sum(row["seconds"] for row in rows if row["span"] == name) for name in names}
    except (OSError, ValueError, LookupError, TypeError):
        return [], {}


class EpochTable(Sink):
    """`metrics.csv`: a row for each epoch. Times are those of training.

    Numbers that aren't finite, and scores of an epoch that wasn't evaluated, are empty.
    """

    def __init__(self, path: Path, resumed: Resumed, names: Sequence[str]) -> None:
        """Open the file as `Rows` does; `names` are the scores' names, in the order of columns."""
        self._names = names
        scores = [f"{split}/{name}" for split in ("train", "val") for name in names]
        kept = [",".join(["epoch", "step", "lr", *scores, "images_per_s", "wait", "seconds"]) + "\n"]
        last = resumed.step - resumed.within  # the row of an unfinished epoch is still to come
        for line in path.read_text("utf-8").splitlines(keepends=True) if path.is_file() else ():
            with suppress(ValueError, LookupError):  # the header
                kept += [line] if line.endswith("\n") and int(line.split(",")[1]) <= last else []
        write_text(path, "".join(kept))
        self._file = AppendFile(path)

    def epoch(self, report: EpochReport) -> None:
        position, span = report.position, report.span
        scores = [each.get(name) for each in (report.train, report.val) for name in self._names]
        row = [position.epoch, position.step, report.lr, *scores, span.images_per_s, span.wait, span.seconds]
        line = io.StringIO()
        csv.writer(line, lineterminator="\n").writerow(finite(value) for value in row)
        self._file.write(line.getvalue().encode())


class FinalFile(Sink):
    """A JSON file of `content` of the summary, written at the end; a resumed run deletes the old one."""

    def __init__(self, path: Path, content: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> None:
        path.unlink(missing_ok=True)
        self._path, self._content = path, content

    def finish(self, summary: Mapping[str, Any]) -> None:
        write_text(self._path, json.dumps(finite(self._content(summary)), indent=2) + "\n")


def complete_summary(run_dir: Path, summary: Mapping[str, Any]) -> None:
    """Write the summary.json that a killed run had no time for: what `Recorder.finish` gets, and perf.jsonl's times."""
    intervals, other_s = read_times(run_dir / "perf.jsonl")
    training = sum(intervals, Span())
    besides = {name: other_s.get(name, 0.0) for name in ("evaluation", "checkpoint")}
    times = {"wait": training.waited_s, "step": training.seconds - training.waited_s, **besides, "other": 0.0}
    speed = {"images_per_s": training.images_per_s, "wait": training.wait}
    full = {**summary, "seconds": sum(times.values()), **speed, "time": times}
    write_text(run_dir / "summary.json", json.dumps(finite(full), indent=2) + "\n")


def finite(values: Any) -> Any:
    """Replace NaN and infinity, which JSON lacks, by None in nested dicts and lists."""
    if isinstance(values, Mapping):
        return {key: finite(value) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return [finite(value) for value in values]
    return None if isinstance(values, float) and not math.isfinite(values) else values


def flatten(tree: Mapping[str, Any], separator: str = ".", prefix: str = "") -> dict[str, Any]:
    """Flatten nested dicts to {"optim.lr": 0.1, …}; an empty dict is a value."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        nested = isinstance(value, Mapping) and value
        found |= flatten(value, separator, f"{prefix}{key}{separator}") if nested else {f"{prefix}{key}": value}
    return found


# `skipped.jsonl`: images that `on_error=skip` did without. The data path writes it, here it is read.

SKIPPED = "skipped.jsonl"  # its name in a run folder


@dataclass(frozen=True, slots=True)
class SkippedRow:
    """One image, in one epoch (0 for `val`): number and name of the sample, and the one that was loaded `instead`."""

    split: str
    epoch: int
    id: int
    name: str
    reason: str
    instead: int | None


class SkippedFile:
    """The list of a run folder, of which only what is new is read."""

    def __init__(self, run_dir: Path) -> None:
        self._lines = NewLines(run_dir / SKIPPED)
        self._found: dict[tuple[str, int, int], SkippedRow] = {}

    def read(self) -> list[SkippedRow]:
        """The rows in the order of epochs and samples; without what isn't a row."""
        for line in self._lines.read():
            with suppress(LookupError, TypeError, ValueError, OverflowError, RecursionError):
                row = json.loads(line)
                instead = None if row["instead"] is None else int(row["instead"])
                key = str(row["split"]), int(row["epoch"]), int(row["id"])
                self._found[key] = SkippedRow(*key, str(row["name"]), str(row["reason"]), instead)
        return [self._found[key] for key in sorted(self._found)]


def counted(rows: list[SkippedRow]) -> dict[str, int]:
    """{split: how many different images}."""
    splits = {row.split for row in rows}
    return {split: len({row.id for row in rows if row.split == split}) for split in sorted(splits)}


def lines_of(rows: list[SkippedRow], epoch: int, *, first: bool) -> list[str]:
    """Lines for the log at the end of an epoch; `first`: the validation split was evaluated for the first time."""
    lines = []
    for split, different in counted(rows).items():
        own = [row for row in rows if row.split == split]
        before = {row.id for row in own if row.epoch < epoch}
        now = [row for row in own if (row.epoch == epoch and row.id not in before if split == "train" else first)]
        if now:
            what = "were replaced" if split == "train" else "were left out"
            more = f"; {different:,} until now" if different > len(now) else ""
            lines.append(
                f"skipped  {len(now):,} of {split} can't be loaded and {what}: "
                f"{few([f'{row.name} {row.reason}' for row in now])} ({SKIPPED}){more}"
            )
    return lines

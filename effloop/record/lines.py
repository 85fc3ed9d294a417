"""Sinks that write log lines: to log.txt, to standard output, to a terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from effloop.errors import printable
from effloop.record.append import AppendFile
from effloop.record.sinks import EpochReport, Sink, StepReport
from effloop.task import Meter


class LogSink(Sink):
    """Writes a line for each report; subclasses implement `note`."""

    def train(self, report: StepReport) -> None:
        self.note(report.line())

    def epoch(self, report: EpochReport) -> None:
        self.note(report.line())


class LogFile(LogSink):
    """`log.txt`."""

    def __init__(self, path: Path) -> None:
        self._file = AppendFile(path)

    def note(self, line: str) -> None:
        lines = "\n".join(map(printable, line.split("\n")))
        self._file.write(f"{lines}\n".encode())

    def warning(self, line: str) -> None:
        self.note(f"warning: {line}")

    def close(self) -> None:
        self._file.close()


class PlainOutput(LogSink):
    """Standard output that isn't a terminal."""

    is_output = True

    def __init__(self, console: Console, meters: Sequence[Meter]) -> None:
        self._console = console
        self._meters = meters

    def note(self, line: str) -> None:
        print(line, flush=True)

    def finish(self, summary: Mapping[str, Any]) -> None:
        self._console.print(summary_table(summary, self._meters))


class TerminalSink(Sink):
    """A progress bar for the current epoch, and a line for each completed one."""

    is_output = True

    def __init__(self, console: Console, meters: Sequence[Meter]) -> None:
        self._meters = meters
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
        self._bar.console.print(line, markup=False, emoji=False, highlight=False, soft_wrap=True)

    def train(self, report: StepReport) -> None:
        position = report.position
        note = f"loss {report.mean['loss']:.3f}  {report.span.images_per_s:,.0f} images/s  wait {report.span.wait:.0%}"
        if self._task is None:
            epoch = f"{position.epoch + 1}/{position.epochs}"
            self._task = self._bar.add_task("", total=position.updates, epoch=epoch, note=note)
            self._bar.start()
        self._bar.update(self._task, completed=position.update, note=note)

    def epoch(self, report: EpochReport) -> None:
        if self._task is not None:
            self._bar.remove_task(self._task)
            self._task = None
        self.note(report.line())

    def finish(self, summary: Mapping[str, Any]) -> None:
        self._bar.console.print(summary_table(summary, self._meters))

    def close(self) -> None:
        self._bar.stop()


def summary_table(summary: Mapping[str, Any], meters: Sequence[Meter]) -> Table:
    """A table of the best and the last scores of a run."""
    table = Table(title="result")
    for heading in ("", "best", "last"):
        table.add_column(heading, justify="right" if heading else "left")
    for meter in meters:
        values = (summary[which].get(meter.name, math.nan) for which in ("best", "last"))
        table.add_row(meter.name, *map(meter.text, values))
    table.add_row("epoch", str(summary["best"].get("epoch", "-")), str(summary["last"].get("epoch", "-")))
    table.add_row("images/s", "", f"{summary['images_per_s']:,.0f}")
    table.add_row("wait", "", f"{summary['wait']:.1%}")
    table.add_row("seconds", "", f"{summary['seconds']:.1f}")
    return table

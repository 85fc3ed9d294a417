"""The base class of sinks, which write a run's progress, and a list of sinks that drops those that fail."""

from __future__ import annotations

import os
import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from effloop.errors import EffLoopError, warn
from effloop.record.base import Position
from effloop.record.efficiency import Span
from effloop.task import LOSS, Meter


class AppendFile:
    """A file that is appended to in whole records: one that can't be written completely is removed.

    TensorBoard stops reading at an incomplete record, and so do most readers of JSON lines.
    """

    def __init__(self, path: Path) -> None:
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK, 0o666)  # else a pipe is waited for
        self._fd = fd
        self._closing = weakref.finalize(self, os.close, fd)  # of a trainer that was built and never trained, too

    def write(self, record: bytes) -> None:
        """Append a record; after an OSError the file is as it was before."""
        if not self._closing.alive:
            raise ValueError("write to a closed file")
        end = os.lseek(self._fd, 0, os.SEEK_END)
        rest = memoryview(record)
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]  # a write may be partial if the disk is nearly full
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._fd, end)
            raise

    def close(self) -> None:
        """Close it; doing so again changes nothing."""
        self._closing()


Scores = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class StepReport:
    """Progress of training: scores and times since the last report (`now`, `span`) and since the epoch's start."""

    position: Position
    lr: float
    meters: Sequence[Meter]
    now: Scores
    mean: Scores
    span: Span
    epoch_span: Span

    def line(self) -> str:
        """The log line: values since the last one, and in parentheses since the start of the epoch."""
        position, span, epoch = self.position, self.span, self.epoch_span
        scores = "  ".join(
            f"{meter.label} {meter.number(self.now[meter.name])} ({meter.number(self.mean[meter.name])})"
            for meter in _loss_first(self.meters, self.now)
        )
        return (
            f"Epoch: [{position.epoch}][{position.update}/{position.updates}]  "
            f"Time {span.seconds_per_update:.3f} ({epoch.seconds_per_update:.3f})  "
            f"Data {span.images_per_s:.1f} ({epoch.images_per_s:.1f})  "
            f"Wait {span.wait:.1%} ({epoch.wait:.1%})  "
            f"{scores}"
        )

    def curves(self) -> dict[str, float]:
        """{name of a curve: its value}: train/*, perf/*."""
        speed = {"perf/images_per_s": self.span.images_per_s, "perf/wait": self.span.wait}
        return {**{f"train/{name}": value for name, value in self.now.items()}, "train/lr": self.lr, **speed}


@dataclass(frozen=True, slots=True)
class EpochReport:
    """Scores and times of a completed epoch's training, and of its validation; `val` is {} if there was none."""

    position: Position
    lr: float
    meters: Sequence[Meter]
    train: Scores
    val: Scores
    span: Span
    val_span: Span

    def line(self) -> str:
        """The log line: of the validation, or of the training if there was none."""
        name, values, span = "training", self.train, self.span
        if self.val:
            name, values, span = "validation", self.val, self.val_span
        scores = "  ".join(
            f"{each.label} {each.number(values[each.name])}" for each in _loss_first(self.meters, values)
        )
        return f"Epoch: [{self.position.epoch}] {name}  {scores}  Data {span.images_per_s:.1f}  Wait {span.wait:.1%}"

    def curves(self) -> dict[str, float]:
        """{name of a curve: its value}: val/*; {} without a validation."""
        return {f"val/{name}": value for name, value in self.val.items()}


def _loss_first(meters: Sequence[Meter], values: Scores) -> list[Meter]:
    """Those that have a value: training lacks scores that aren't sums."""
    return sorted((meter for meter in meters if meter.name in values), key=lambda meter: meter != LOSS)


class Sink:
    """Writes nothing; the base class of sinks.

    If a method raises any Exception, the run continues without the sink.
    """

    is_output: ClassVar[bool] = False  # whether it writes to standard output: a closed pipe there ends the command
    _file: Any = None  # an `AppendFile` of sinks that write to one

    def note(self, line: str) -> None:
        """Write a line to the log."""

    def warning(self, line: str) -> None:
        """Write a warning that another sink failed, which standard error already has."""

    def train(self, report: StepReport) -> None:
        """Write a report of some updates."""

    def epoch(self, report: EpochReport) -> None:
        """Write a report of an epoch."""

    def span(self, name: str, position: Position, seconds: float) -> None:
        """Write the time of something besides training: `evaluation`, `checkpoint`."""

    def finish(self, summary: Mapping[str, Any]) -> None:
        """The run has finished; `summary` is for summary.json."""

    def end(self, error: BaseException | None) -> None:
        """The run has ended, or was stopped by `error`."""

    def close(self) -> None:
        """Close files and connections, also after a failure."""
        if isinstance(self._file, AppendFile):  # a plugin may call something else so
            self._file.close()


class CurvesSink(Sink):
    """Writes numbers by update."""

    def curves(self, values: Scores, step: int) -> None:
        """Write {name of a curve: its value} at an update."""
        raise NotImplementedError

    def train(self, report: StepReport) -> None:
        self.curves(report.curves(), report.position.step)

    def epoch(self, report: EpochReport) -> None:
        if report.val:
            self.curves(report.curves(), report.position.step)


class Sinks:
    """A list of sinks. One that fails is dropped with a warning; the others continue."""

    def __init__(self) -> None:
        self._named: list[tuple[str, Sink]] = []

    def open(self, name: str, make: Callable[[], Sink]) -> None:
        """Add the sink that `make` returns, unless it raises; `name` is for messages."""
        try:
            self._named.append((name, make()))
        except Exception as error:
            self._warn(name, error)

    def for_each(self, call: Callable[[Sink], None]) -> None:
        """Call a function with each sink.

        Raises:
            BrokenPipeError: standard output is a closed pipe.
        """
        for each in list(self._named):
            name, sink = each
            try:
                if each in self._named:  # else it failed to write the warning about another one's failure
                    call(sink)
            except Exception as error:
                self._named.remove(each)
                with suppress(Exception):
                    sink.close()
                if sink.is_output and isinstance(error, BrokenPipeError):
                    raise
                self._warn(name, error)

    def close(self) -> None:
        """Close and drop all: nothing is written later, as by a span that ends when its generator is collected."""
        self.for_each(lambda sink: sink.close())
        self._named.clear()

    def _warn(self, name: str, error: Exception) -> None:
        reason = error.strerror if isinstance(error, OSError) else str(error) if isinstance(error, EffLoopError) else ""
        if not reason:
            reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}".removesuffix(": ")
        reason = re.sub(r"://[^/\s]+@", "://…@", reason)  # a server's address may hold a password
        line = f"record: {name} failed ({reason}); the run continues without it"
        with suppress(OSError):  # standard error may be a file on the same full disk
            warn(line)
        self.for_each(lambda sink: sink.warning(line))

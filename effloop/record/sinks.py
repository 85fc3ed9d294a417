"""Where a run's progress is written to, and how a sink that fails is dropped."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from effloop.errors import EffLoopError, warn
from effloop.record.base import Position
from effloop.record.clock import Span
from effloop.task import LOSS, Meter

Scores = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class StepReport:
    """What training did since the last report, and since the epoch began.

    Attributes:
        position: where the run is.
        lr: learning rate of the last update.
        meters: of the task.
        now, mean: scores since the last report, and since the epoch began.
        span, epoch_span: the same two stretches' time.
    """

    position: Position
    lr: float
    meters: Sequence[Meter]
    now: Scores
    mean: Scores
    span: Span
    epoch_span: Span

    def line(self) -> str:
        """The line of the log, values since the last one and (since the epoch began)."""
        position, span, whole = self.position, self.span, self.epoch_span
        scores = "  ".join(
            f"{meter.label} {meter.number(self.now[meter.name])} ({meter.number(self.mean[meter.name])})"
            for meter in _in_lines(self.meters)
        )
        return (
            f"Epoch: [{position.epoch}][{position.update}/{position.updates}]  "
            f"Time {span.seconds_per_update:.3f} ({whole.seconds_per_update:.3f})  "
            f"Data {span.images_per_s:.1f} ({whole.images_per_s:.1f})  "
            f"Wait {span.wait:.1%} ({whole.wait:.1%})  "
            f"{scores}"
        )

    def curves(self) -> dict[str, float]:
        """The same by the names of curves: train/*, perf/*."""
        values = {f"train/{name}": value for name, value in self.now.items()}
        return {
            **values,
            "train/lr": self.lr,
            "perf/images_per_s": self.span.images_per_s,
            "perf/wait": self.span.wait,
        }


@dataclass(frozen=True, slots=True)
class EpochReport:
    """An epoch that was trained and evaluated.

    Attributes:
        position: where the run is.
        lr: learning rate of the epoch's last update.
        meters: of the task.
        train, val: scores of all its training and of the validation.
        span: the time of its training.
    """

    position: Position
    lr: float
    meters: Sequence[Meter]
    train: Scores
    val: Scores
    span: Span

    def line(self) -> str:
        """The line of the log."""
        scores = "  ".join(f"{meter.label} {meter.number(self.val[meter.name])}" for meter in _in_lines(self.meters))
        return (
            f"Epoch: [{self.position.epoch}] validation  {scores}  "
            f"Data {self.span.images_per_s:.1f}  Wait {self.span.wait:.1%}"
        )

    def curves(self) -> dict[str, float]:
        """The validation's scores by the names of curves: val/*."""
        return {f"val/{name}": value for name, value in self.val.items()}


def _in_lines(meters: Sequence[Meter]) -> list[Meter]:
    """In the order of a line: the loss first."""
    return sorted(meters, key=lambda meter: meter != LOSS)


class Sink:
    """Writes nothing; the base class of sinks.

    Whatever a method raises, the run goes on without the sink. KeyboardInterrupt passes.
    """

    is_output: ClassVar[bool] = False
    """Whether it writes to the standard output: a closed pipe there ends the command, as with any other."""

    def note(self, line: str) -> None:
        """A line for the log."""

    def warning(self, line: str) -> None:
        """Another sink failed; standard error has the line already."""

    def images(self, name: str, picture: NDArray[np.uint8]) -> None:
        """A picture of what is trained on; RGB.

        Raises:
            OSError: it can't be written; all else still can.
        """

    def train(self, report: StepReport) -> None:
        """Some updates were done."""

    def epoch(self, report: EpochReport) -> None:
        """An epoch ended."""

    def span(self, name: str, position: Position, seconds: float) -> None:
        """Something beside training (`evaluation`, `checkpoint`) took so long."""

    def finish(self, summary: Mapping[str, Any]) -> None:
        """The run came to its end: what summary.json holds."""

    def end(self, error: BaseException | None) -> None:
        """The run is over, or broken off by `error`."""

    def close(self) -> None:
        """Close files and connections, whether it has failed or not."""


class Sinks:
    """Several sinks as one. One that fails is dropped with a warning; the others go on."""

    def __init__(self) -> None:
        self._named: list[tuple[str, Sink]] = []

    def open(self, name: str, make: Callable[[], Sink]) -> None:
        """Add the sink that `make` makes, if it can; `name` is for messages."""
        try:
            self._named.append((name, make()))
        except Exception as error:
            self._warn(name, error)

    def tell(self, act: Callable[[Sink], None]) -> None:
        """Do something with each.

        Raises:
            BrokenPipeError: the reader of the standard output is gone.
        """
        for each in list(self._named):
            name, sink = each
            try:
                if each in self._named:  # else it failed while it was told of another's failure
                    act(sink)
            except Exception as error:
                self._named.remove(each)
                with suppress(Exception):
                    sink.close()
                if sink.is_output and isinstance(error, BrokenPipeError):
                    raise
                self._warn(name, error)

    def _warn(self, name: str, error: Exception) -> None:
        reason = error.strerror if isinstance(error, OSError) else str(error) if isinstance(error, EffLoopError) else ""
        if not reason:
            reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}".removesuffix(": ")
        reason = re.sub(r"://[^/\s]+@", "://…@", reason)  # a server's address may hold a password
        line = f"record: {name} failed ({reason}); the run goes on without it"
        with suppress(OSError):  # the same disk, where standard error goes to a file
            warn(line)
        self.tell(lambda sink: sink.warning(line))

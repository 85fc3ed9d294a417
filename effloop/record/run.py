"""The recorder of a run folder."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from effloop.batch import Batch, Previews
from effloop.errors import ConfigError
from effloop.record import grid
from effloop.record.base import Moment, RecordConfig, Recorder, recorders
from effloop.record.clock import Clock, Span
from effloop.record.metrics import Metrics, Totals
from effloop.record.sinks import JsonSink, LogSink, Report, Sink, TensorBoardSink, TerminalSink, finite, summary_table


@dataclass
class RunConfig(RecordConfig):
    """Fields of `record=run`.

    Attributes:
        tensorboard: write curves to `tensorboard/` in the run folder.
        console: show progress on the standard output.
        samples: so many training samples, each in its first epochs, are a picture in TensorBoard; 0 is none.
    """

    tensorboard: bool = True
    console: bool = True
    samples: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.samples <= 64:
            raise ConfigError(f"record.samples: {self.samples} is not allowed; set a number from 0 (none) to 64")


_PREVIEW_EPOCHS = 4
_PREVIEW_PIXELS = 8_000_000  # 100 images of 256 pixels; more take seconds, and TensorBoard holds them in memory


def _preview_rows(side: int) -> int:
    """How many samples of so many pixels' height and width are shown at most; one at least."""
    return max(1, grid.rows_within(_PREVIEW_PIXELS, side, _PREVIEW_EPOCHS))


@recorders.register("run", RunConfig)
class RunRecorder(Recorder):
    """A log, metrics.jsonl, summary.json and TensorBoard curves in the run folder."""

    def __init__(
        self, config: RunConfig, *, run_dir: Path, first_step: int, rank: int = 0, world_size: int = 1
    ) -> None:
        """Record to `run_dir`; a resumed run goes on after update `first_step`.

        Rank 0 alone writes. The others hear the same, because whoever reads a meter needs all ranks' sums.
        """
        self.config = config
        self.run_dir = run_dir
        self.console = Console()
        self._writes = rank == 0
        self._first_step = first_step
        self._world_size = world_size
        self._clock = Clock()
        self._trained = Span()
        self._sinks: list[Sink] = []
        if self._writes:
            self._sinks.append(LogSink((run_dir / "log.txt").open("a", encoding="utf-8")))
        if self._writes and config.console:
            self._sinks.append(TerminalSink(self.console) if self.console.is_terminal else LogSink(sys.stdout))

    def __enter__(self) -> RunRecorder:
        self._started = time.perf_counter()
        if not self._writes:
            return self
        self._sinks.append(JsonSink(self.run_dir / "metrics.jsonl", self._first_step))
        if self.config.tensorboard:
            self._sinks.append(TensorBoardSink(self.run_dir / "tensorboard", self._first_step))
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is not None:
            self.note(f"stopped by {kind.__name__}: {error[0]}".removesuffix(": "))
        for sink in self._sinks:
            sink.close()

    def note(self, line: str) -> None:
        for sink in self._sinks:
            sink.note(line)

    def images(self, name: str, preview: Previews) -> None:
        if not (self._writes and self.config.samples and self.config.tensorboard):
            return
        found = preview(self.config.samples, _PREVIEW_EPOCHS, _preview_rows)
        if not found.rows:
            return
        picture = grid.draw(found)
        try:
            for sink in self._sinks:
                sink.images(name, picture)
        except OSError as error:
            self.note(f"{name}: the picture can't be written: {error.strerror or error}; the run goes on without it")

    def wait(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        self._clock = Clock(self._world_size)
        self._reported = Totals()
        self._reported_span = Span()
        return self._clock.wait(batches)

    def step(self, moment: Moment, metrics: Metrics, lr: float) -> None:
        self._clock.updates += 1
        if moment.update % self.config.log_every and moment.update != moment.updates:
            return
        totals, span = metrics.read(), self._clock.read()
        report = Report(
            moment=moment,
            lr=lr,
            now=(totals - self._reported).scores(),
            mean=totals.scores(),
            span=span - self._reported_span,
            epoch_span=span,
        )
        self._reported, self._reported_span = totals, span
        for sink in self._sinks:
            sink.train(report)

    def epoch(self, moment: Moment, scores: Mapping[str, float]) -> None:
        self._trained += self._reported_span
        for sink in self._sinks:
            sink.epoch(moment, scores, self._reported_span)

    def finish(self, summary: Mapping[str, Any]) -> None:
        if not self._writes:
            return
        whole = {
            **summary,
            "seconds": time.perf_counter() - self._started,
            "images_per_s": self._trained.images_per_s,
            "wait": self._trained.wait,
        }
        (self.run_dir / "summary.json").write_text(json.dumps(finite(whole), indent=2) + "\n")
        if self.config.console:
            self.console.print(summary_table(whole))

"""The recorder that writes to a run folder."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from effloop.batch import Batch
from effloop.errors import how_ended, printable
from effloop.record import rows
from effloop.record.base import Metrics, Position, RecordConfig, Recorder, recorders
from effloop.record.efficiency import Clock, Efficiency, Span
from effloop.record.sinks import AppendFile, EpochReport, Sink, Sinks, StepReport
from effloop.task import Meter, Task, score_names

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID
    from rich.table import Table


@dataclass
class EpochSoFar:
    """The state of the epoch that is trained, as of its last line in the log."""

    sums: list[float] | None = None  # the task's, of all ranks; None before the first line
    before: list[float] | None = None  # those of the line before; None is the start of the epoch
    span: Span = field(default_factory=Span)  # times
    position: Position | None = None  # of the update
    lr: float = 0.0
    begun: bool = False  # whether there is one; False from its end until the next one begins
    resumed: bool = False  # whether it continues from a checkpoint

    def report(self, task: Task, span: Span) -> StepReport:
        """The last line of the log; `span` is of what came since the one before."""
        assert self.position is not None
        assert self.sums is not None
        since = np.subtract(self.sums, self.before).tolist() if self.before else self.sums
        scores = task.scores(since), task.scores(self.sums)
        return StepReport(self.position, self.lr, task.meters, *scores, span, self.span)

    def state_dict(self, clock: Span) -> dict[str, Any]:
        """As plain values; `clock` is the time until now, which may be after the last line."""
        spans = {"span": list(astuple(self.span)), "clock": list(astuple(clock))}
        position = asdict(self.position) if self.position else None
        return {"sums": self.sums, "before": self.before, "position": position, "lr": self.lr, **spans}

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> EpochSoFar:
        """The inverse of `state_dict`."""
        position = Position(**state["position"]) if state["position"] else None
        span = Span(*state["span"])
        return cls(state["sums"], state["before"], span, position, state["lr"], begun=True, resumed=True)


class LogFile(Sink):
    """`log.txt`."""

    def __init__(self, path: Path) -> None:
        self._file = AppendFile(path)

    def note(self, line: str) -> None:
        self._file.write("".join(f"{printable(each)}\n" for each in line.split("\n")).encode())

    def warning(self, line: str) -> None:
        self.note(f"warning: {line}")

    def train(self, report: StepReport) -> None:
        self.note(report.line())

    def epoch(self, report: EpochReport) -> None:
        self.note(report.line())


class StandardOutput(Sink):
    """The lines of the log; on a terminal a progress bar for the current epoch, and a line for each completed one."""

    is_output = True

    def __init__(self, console: Console, meters: Sequence[Meter]) -> None:
        self._console, self._meters = console, meters
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}"), TimeRemainingColumn())
        self._bar = Progress(TextColumn("epoch {task.fields[epoch]}"), *columns, console=console, transient=True)
        self._task: TaskID | None = None

    def note(self, line: str) -> None:
        if self._console.is_terminal:
            self._console.print(line, markup=False, emoji=False, highlight=False, soft_wrap=True)
        else:
            print(line, flush=True)

    def train(self, report: StepReport) -> None:
        if not self._console.is_terminal:
            self.note(report.line())
            return
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
        self._console.print(summary_table(summary, self._meters))

    def close(self) -> None:
        self._bar.stop()


def summary_table(summary: Mapping[str, Any], meters: Sequence[Meter]) -> Table:
    """A table of the best and the last scores of a run."""
    from rich.table import Table

    table = Table(title=f"result ({summary['precision']})")
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


@dataclass
class RunConfig(RecordConfig):
    """Fields of `record=run`.

    Attributes:
        tensorboard: write curves to `tensorboard/` in the run folder.
        console: show progress on standard output.
        mlflow, wandb: log to MLflow, to Weights & Biases; their environment variables set the server.
        project: name of the experiment in MLflow and of the project in Weights & Biases.
    """

    tensorboard: bool = True
    console: bool = True
    mlflow: bool = False
    wandb: bool = False
    project: str = "effloop"

    def require(self) -> None:
        if self.mlflow or self.wandb:
            from effloop.record import trackers

            if self.mlflow:
                trackers.import_mlflow()
            if self.wandb:
                trackers.import_wandb()


def _without_efficiency(summary: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in summary.items() if key != "efficiency"}  # which has a file of its own


@recorders.register("run", RunConfig)
class RunRecorder(Recorder):
    """A log, rows of scores and times, a summary and TensorBoard curves in the run folder."""

    def __init__(
        self,
        config: RunConfig,
        *,
        run_dir: Path,
        task: Task,
        first_step: int,
        hyperparameters: Mapping[str, Any],
        startup: Mapping[str, float],
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        """Record to `run_dir`; a resumed run continues after update `first_step`.

        Only rank 0 writes. The others run this, too, because reading the metrics needs all ranks' sums.
        `hyperparameters` are the config, for trackers; `startup` has the seconds before training.
        """
        self.config = config
        self.run_dir = run_dir
        self._skipped = rows.SkippedFile(run_dir)
        self.task = task
        self._writes = rank == 0
        self._resumed = rows.Resumed(first_step)
        self._hyperparameters = hyperparameters
        self._world_size = world_size
        self._clock = self._validation = Clock()
        self._training = Span()
        self._epoch = EpochSoFar()
        self._before = Span()  # times of the current epoch from before the run was stopped
        self._startup = startup
        self._intervals: list[Span] = []
        self._other_s: dict[str, float] = defaultdict(float)
        self._evaluated = False
        self._sinks = Sinks()
        if self._writes:
            self._open("log.txt", LogFile)
        if self._writes and config.console:
            from rich.console import Console

            self._sinks.open("the standard output", lambda: StandardOutput(Console(), task.meters))

    def __enter__(self) -> RunRecorder:
        self._started = time.perf_counter()
        if self._writes:
            self._open_sinks()
            self._restore_times()
        return self

    def _restore_times(self) -> None:
        self._intervals, other_s = rows.read_times(self.run_dir / "perf.jsonl")
        training = sum(self._intervals, Span())
        self._training = training - self._epoch.span  # which counts when its epoch ends
        self._other_s.update(other_s)
        self._started -= self._training.seconds + self._before.seconds + sum(other_s.values())

    def _open_sinks(self) -> None:
        resumed, params, names = self._resumed, self._hyperparameters, score_names(self.task.meters)
        self._open("metrics.jsonl", lambda path: rows.MetricsFile(path, resumed))
        self._open("perf.jsonl", lambda path: rows.PerfFile(path, resumed))
        self._open("metrics.csv", lambda path: rows.EpochTable(path, resumed, names))
        self._open("summary.json", lambda path: rows.FinalFile(path, _without_efficiency))
        self._open("efficiency.json", lambda path: rows.FinalFile(path, lambda summary: asdict(summary["efficiency"])))
        if self.config.tensorboard or self.config.mlflow or self.config.wandb:
            from effloop.record import trackers

            args = self.run_dir, self.config.project, params
            if self.config.tensorboard:
                hidden = resumed.step and resumed.step + 1
                self._open("tensorboard", lambda path: trackers.TensorBoardSink(path, hidden))
            if self.config.mlflow:
                self._sinks.open("MLflow", lambda: trackers.MlflowSink(*args))
            if self.config.wandb:
                self._sinks.open("Weights & Biases", lambda: trackers.WandbSink(*args))

    def _open(self, name: str, make: Callable[[Path], Sink]) -> None:
        path = self.run_dir / name
        self._sinks.open(str(path), lambda: make(path))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        try:
            if error is not None:
                self.note(": ".join(how_ended(error)))
        finally:
            self._sinks.for_each(lambda sink: sink.end(error))
            self._sinks.close()

    def note(self, line: str) -> None:
        self._sinks.for_each(lambda sink: sink.note(line))

    def wait(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        if not self._epoch.resumed:
            self._epoch, self._before = EpochSoFar(), Span()
        self._epoch.resumed, self._epoch.begun = False, True
        self._clock = Clock(self._world_size, before=self._before)
        return self._clock.wait(batches)

    def validation(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        self._validation = Clock(self._world_size, padded=True)
        return self._validation.wait(batches)

    def step(self, position: Position, metrics: Metrics, lr: float) -> None:
        self._clock.update()
        if not position.update % self.config.log_every or position.update == position.updates:
            self._line(position, metrics, lr)

    def trained(self, position: Position, metrics: Metrics, lr: float) -> None:
        if self._epoch.position is None or self._epoch.position.step != position.step:
            self._line(position, metrics, lr)

    def _line(self, position: Position, metrics: Metrics, lr: float) -> None:
        epoch = self._epoch
        epoch.before, epoch.sums, was, epoch.span = epoch.sums, metrics.read(), epoch.span, self._clock.read()
        epoch.position, epoch.lr = position, lr
        report = epoch.report(self.task, epoch.span - was)
        self._intervals.append(report.span)
        self._sinks.for_each(lambda sink: sink.train(report))

    @contextmanager
    def span(self, name: str, position: Position) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:  # Ctrl-C during a checkpoint is raised when that is complete
            seconds = time.perf_counter() - began
            self._other_s[name] += seconds
            self._sinks.for_each(lambda sink: sink.span(name, position, seconds))

    def epoch(self, position: Position, scores: Mapping[str, float]) -> None:
        last = self._epoch.report(self.task, Span())
        self._training += last.epoch_span
        self._epoch.begun = False
        spans = {"span": last.epoch_span, "val_span": self._validation.read() if scores else Span()}
        report = EpochReport(position, last.lr, self.task.meters, train=last.mean, val=scores, **spans)
        self._sinks.for_each(lambda sink: sink.epoch(report))
        if self._writes:
            for line in rows.lines_of(self._skipped.read(), position.epoch, first=bool(scores) and not self._evaluated):
                self.note(line)
        self._evaluated = self._evaluated or bool(scores)

    def finish(self, summary: Mapping[str, Any]) -> None:
        review = self.review(self._efficiency(self._times())) if self.review and self._writes else {}
        times = self._times()
        efficiency = replace(self._efficiency(times), **review)
        full = {
            **summary,
            "seconds": sum(times.values()),
            "images_per_s": self._training.images_per_s,
            "wait": self._training.wait,
            "time": times,
            "efficiency": efficiency,
        }
        if self.download:
            full["download"] = dict(self.download)
        if skipped := rows.counted(self._skipped.read()):
            full["skipped"] = skipped
        for line in efficiency.lines():
            self.note(line)
        self._sinks.for_each(lambda sink: sink.finish(full))

    def state_dict(self) -> dict[str, Any]:
        return self._epoch.state_dict(self._clock.read()) if self._epoch.begun else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if len(state) > len(unrecorded := {"unrecorded"} & {*state}):
            self._epoch, self._before = EpochSoFar.of(state), Span(*state["clock"])
            self._resumed = replace(self._resumed, within=True, saved=not unrecorded)

    def _times(self) -> dict[str, float]:
        """Seconds of the run's parts until now."""
        times = {
            "wait": self._training.waited_s,
            "step": self._training.seconds - self._training.waited_s,
            "evaluation": self._other_s["evaluation"],
            "checkpoint": self._other_s["checkpoint"],
        }
        return {**times, "other": time.perf_counter() - self._started - sum(times.values())}

    def _efficiency(self, times: Mapping[str, float]) -> Efficiency:
        besides = {name: times[name] for name in ("evaluation", "checkpoint", "other")}
        return Efficiency.of(self._training, self._intervals, besides, self._startup)

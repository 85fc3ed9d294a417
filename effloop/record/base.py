"""The base class of recorders."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from effloop.batch import Batch
from effloop.errors import check_value
from effloop.lazy import Tensor, torch
from effloop.registry import PartConfig, Registry


class Metrics:
    """Running sums on one device. Counts are exact up to 2**53 samples; adding never waits for the device.

    Args:
        num_sums: M, the number of the task's sums.
        device: of the sums.
        over_ranks: `Parallel.rows`; if it is given, all ranks must read at the same time.
        parts: P, the parts that batches are of in turn; `sums` is (P, M) float64, this rank's total of each.
    """

    def __init__(
        self,
        num_sums: int,
        device: torch.device,
        over_ranks: Callable[[Tensor], Tensor] = lambda sums: sums,
        parts: int = 1,
    ) -> None:
        self.sums = torch.zeros(parts, num_sums, dtype=torch.float64, device=device)
        self.over_ranks = over_ranks
        self.reset()

    def reset(self) -> None:
        self.sums.zero_()
        self._turns = itertools.cycle(self.sums.unbind())

    def add(self, sums: Tensor) -> None:
        """Add a batch's sums: (M,) float64."""
        row = next(self._turns)
        row += sums

    def read(self) -> list[float]:
        """The M sums so far over all ranks; waits for the device."""
        total: list[float] = self.over_ranks(self.sums).sum(0).tolist()
        return total


@dataclass
class RecordConfig(PartConfig):
    """Fields that every recorder has.

    Attributes:
        log_every: updates between two lines of the log; the host waits for the device only to write one.
    """

    log_every: int = 10

    def __post_init__(self) -> None:
        check_value("record.log_every", self.log_every, self.log_every > 0, "a number of updates above 0")

    def require(self) -> None:
        """Raise a ConfigError if a package that is needed isn't installed."""


@dataclass(frozen=True, slots=True)
class Position:
    """A run's progress: in `epoch`, counted from 0, of `epochs`, after `update` of `updates`; `step` in all."""

    epoch: int
    epochs: int
    update: int
    updates: int
    step: int


class Recorder:
    """Records nothing; the base class of recorders that do.

    Attributes:
        review: maps a run's `Efficiency`, at its end, to stages, verdict and override; None skips that.
        download: what it took to have remote data here, for the summary; empty for other data.
    """

    review: Callable[[Any], Mapping[str, Any]] | None = None
    download: Mapping[str, float] = MappingProxyType({})

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        """The run has ended, or was stopped by `error` of type `kind`."""

    def note(self, line: str) -> None:
        """Write a line to the log."""

    def wait(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the same batches, and measure the time spent waiting for each."""
        yield from batches

    def validation(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the same batches of a validation, and measure as `wait` does."""
        yield from batches

    def step(self, position: Position, metrics: Metrics, lr: float) -> None:
        """An optimizer update is done; `metrics` has this epoch's sums so far, on the device."""

    def trained(self, position: Position, metrics: Metrics, lr: float) -> None:
        """An epoch is trained, at whatever update it ends."""

    def span(self, name: str, position: Position) -> AbstractContextManager[None]:
        """Measure the time of something besides training: `evaluation`, `checkpoint`."""
        return nullcontext()

    def epoch(self, position: Position, scores: Mapping[str, float]) -> None:
        """An epoch has been trained; `scores` are those of its evaluation, {} if there was none."""

    def finish(self, summary: Mapping[str, Any]) -> None:
        """The run has finished."""

    def state_dict(self) -> dict[str, Any]:
        """The state to resume from within an epoch, as plain values; {} between epochs."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`, before the recorder is entered."""


recorders: Registry[Recorder] = Registry("record", {"run": "effloop.record.run"})


@recorders.register("none", RecordConfig)
def null_recorder(config: RecordConfig, **context: Any) -> Recorder:
    """Records nothing."""
    return Recorder()

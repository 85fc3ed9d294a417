"""Early stopping: when a run ends before its last epoch."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from effloop.errors import ConfigError, check_value
from effloop.task import Meter


@dataclass
class StopConfig:
    """When a run ends before its last epoch. Its best weights are in `best.ckpt`, as always.

    Attributes:
        patience: epochs without a better score (`checkpoint.best_by`) after which the run ends; null never ends it.
        min_delta: how much better than the best so far a score has to be, in the score's own unit: 0.01 of an accuracy
            is one percentage point.
        minutes: of training and evaluation. No epoch is begun that would end later, going by the one before it; a run
            that is resumed has what is left.
    """

    patience: int | None = None
    min_delta: float = 0.0
    minutes: float | None = None

    def __post_init__(self) -> None:
        patience, minutes = self.patience, self.minutes
        check_value("stop.patience", patience, patience is None or patience >= 1, "a number of epochs, or null")
        check_value("stop.min_delta", self.min_delta, 0 <= self.min_delta < math.inf, "a number from 0")
        check_value("stop.minutes", minutes, minutes is None or 0 < minutes < math.inf, "a number above 0, or null")
        if self.min_delta and patience is None:
            raise ConfigError(f"stop.min_delta: {self.min_delta} needs stop.patience; set it, too")


class EarlyStop:
    """Early stopping by a `StopConfig` and a score that has to become better.

    Attributes:
        score: the best so far, of those that were better by more than `min_delta`; NaN before any.
        epoch: that it is of, counted from 0; -1 before any, so that epochs without a score are counted, too.
        seconds: of training until the last epoch ended, those before a resume included.
        epoch_seconds: of the last epoch, with what came between it and the one before.
        timed: the last epoch, counted from 0; -1 before any. A run that is stopped in its evaluation resumes there.
    """

    def __init__(self, config: StopConfig, meter: Meter) -> None:
        self.config = config
        self.meter = meter
        self.score, self.epoch = math.nan, -1
        self.seconds = self.epoch_seconds = self._begun_s = 0.0
        self.timed = -1
        self._since = time.monotonic()

    def begin(self) -> None:
        self._since = time.monotonic() - self._begun_s

    def trained(self, epoch: int) -> None:
        if epoch == self.timed:
            return
        now, self.timed = time.monotonic(), epoch
        self.epoch_seconds = now - self._since
        self.seconds += self.epoch_seconds
        self._since = now

    def scored(self, epoch: int, scores: Mapping[str, float]) -> None:
        value, sign = scores[self.meter.name], 1 if self.meter.higher_is_better else -1
        if sign * (value - self.score) > self.config.min_delta or (math.isnan(self.score) and not math.isnan(value)):
            self.score, self.epoch = value, epoch

    def out_of_time(self) -> str:
        """Why another epoch would take too long; empty if it wouldn't. Clocks differ: only rank 0's counts."""
        minutes = self.config.minutes
        if minutes is None or self.seconds + self.epoch_seconds <= 60 * minutes:
            return ""
        return f"stop.minutes={minutes:g}: another epoch would end after {self.seconds + self.epoch_seconds:.1f} s"

    def out_of_patience(self, done: int) -> str:
        """Why a run of so many epochs isn't worth going on; empty if it is. The same on all ranks."""
        patience = self.config.patience
        if patience is None or done - 1 - self.epoch < patience:
            return ""
        if self.epoch < 0:
            return f"stop.patience={patience}: no {self.meter.label} in {done} epochs"
        by = f" by more than {self.meter.text(self.config.min_delta)}" if self.config.min_delta else ""
        best = f"{self.meter.text(self.score)} of epoch {self.epoch}"
        return f"stop.patience={patience}: no {self.meter.label} better{by} than the {best} since"

    def state_dict(self, *, within: bool = False) -> dict[str, Any]:
        """Only the state of limits that are set: a checkpoint has no times otherwise; `within` an epoch that has
        begun.
        """
        state: dict[str, Any] = {}
        if self.config.patience is not None:
            state = {"score": self.score, "epoch": self.epoch}
        if self.config.minutes is not None:
            state |= {"seconds": self.seconds, "epoch_seconds": self.epoch_seconds, "timed": self.timed}
            state |= {"begun_s": time.monotonic() - self._since} if within else {}
        return state

    def load_state_dict(self, state: Mapping[str, Any], best: Mapping[str, float]) -> None:
        """Continue from a `state_dict`, or without patience so far from the scores and `epoch` of the best epoch."""
        self.score = float(state.get("score", best.get(self.meter.name, math.nan)))
        self.epoch, self.timed = int(state.get("epoch", best.get("epoch", -1))), int(state.get("timed", -1))
        self.seconds, self.epoch_seconds, self._begun_s = (
            float(state.get(key, 0.0)) for key in ("seconds", "epoch_seconds", "begun_s")
        )

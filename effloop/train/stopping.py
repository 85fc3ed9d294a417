"""Early stopping: when a run ends before its last epoch."""

from __future__ import annotations

import math
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
    """

    patience: int | None = None
    min_delta: float = 0.0

    def __post_init__(self) -> None:
        patience = self.patience
        check_value("stop.patience", patience, patience is None or patience >= 1, "a number of epochs, or null")
        check_value("stop.min_delta", self.min_delta, 0 <= self.min_delta < math.inf, "a number from 0")
        if self.min_delta and patience is None:
            raise ConfigError(f"stop.min_delta: {self.min_delta} needs stop.patience; set it, too")


class EarlyStop:
    """Early stopping by a `StopConfig` with `patience`, and by a score."""

    def __init__(self, config: StopConfig, meter: Meter) -> None:
        self.config, self.meter = config, meter
        # The best so far, of those that were better by more than `min_delta`, and its epoch, counted from 0. -1 before
        # any, so that epochs without a score are counted, too.
        self.score, self.epoch = math.nan, -1

    def scored(self, epoch: int, scores: Mapping[str, float]) -> None:
        value, sign = scores[self.meter.name], 1 if self.meter.higher_is_better else -1
        if sign * (value - self.score) > self.config.min_delta or (math.isnan(self.score) and not math.isnan(value)):
            self.score, self.epoch = value, epoch

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

    def state_dict(self) -> dict[str, Any]:
        return {"score": self.score, "epoch": self.epoch}

    def load_state_dict(self, state: Mapping[str, Any], best: Mapping[str, float]) -> None:
        """Continue from a `state_dict`, or without patience so far from the scores and `epoch` of the best epoch."""
        self.score = float(state.get("score", best.get(self.meter.name, math.nan)))
        self.epoch = int(state.get("epoch", best.get("epoch", -1)))

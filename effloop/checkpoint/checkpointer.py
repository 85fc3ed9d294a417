"""Which checkpoints a run keeps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from effloop.checkpoint import files
from effloop.registry import PartConfig, Registry
from effloop.system.processes import interrupts_deferred
from effloop.task import Meter


@dataclass
class CheckpointConfig(PartConfig):
    """Fields that every checkpointer has.

    Attributes:
        best_by: the validation score that decides which epoch was the best; null is the objective's, or the task's
            first one.
    """

    best_by: str | None = None


class Checkpoints:
    """Tracks the best scores and writes nothing; the base class of checkpointers that do.

    Args:
        config: of this part.
        meter: the score that decides which epoch was the best.
        run_dir: the run folder.
        facts: what goes into every checkpoint beside the state: config, classes.
    """

    def __init__(self, config: CheckpointConfig, meter: Meter, run_dir: Path, facts: Mapping[str, Any]) -> None:
        self.config = config
        self.meter = meter
        self.folder = run_dir / "checkpoints"
        self.facts = dict(facts)
        self.best: dict[str, float] = {}

    def note(self, epoch: int, scores: Mapping[str, float]) -> bool:
        """Remember an epoch's validation scores if they are the best so far; whether they are."""
        name, sign = self.meter.name, 1 if self.meter.higher_is_better else -1
        value = scores[name]
        if self.best and not sign * value > sign * self.best[name] and not math.isnan(self.best[name]):
            return False
        self.best = {**scores, "epoch": epoch}
        return True

    def save(self, state: dict[str, Any], *, is_best: bool) -> None:
        """Save a state, if this checkpointer does."""

    def state_dict(self) -> dict[str, Any]:
        return {"best": dict(self.best)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best = dict(state["best"])


checkpointers: Registry[Checkpoints] = Registry("checkpoint")


@checkpointers.register("none", CheckpointConfig)
class NoCheckpoints(Checkpoints):
    """Nothing is written."""


@checkpointers.register("last_best", CheckpointConfig)
class LastAndBest(Checkpoints):
    """last.ckpt after every epoch, and best.ckpt."""

    def save(self, state: dict[str, Any], *, is_best: bool) -> None:
        last = self.folder / "last.ckpt"
        with interrupts_deferred():
            files.write(last, {**self.facts, **state})
            if is_best:
                files.link(last, self.folder / "best.ckpt")

"""A batch that worker processes are loading."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from effloop.batch import Batch, Skipped
from effloop.data.engine.worker import FAILED, FILLED, REPORTED


@dataclass(slots=True)
class PendingBatch:
    """A batch that workers are loading.

    Attributes:
        batch: complete when no runs are left; the reference keeps its slot from being reused.
        runs_left: runs of samples without an answer yet.
        failure: first row, kind and text of the first run that failed.
        wanted: False once cancelled; runs in progress still write into the slot.
        skipped: samples that could not be loaded.
    """

    batch: Batch
    runs_left: int
    failure: tuple[int, int, str] | None = None
    wanted: bool = True
    skipped: list[Skipped] = field(default_factory=list)

    def answered(self, start: int, kind: int, text: str) -> None:
        """A worker has answered about the run that begins with row `start`."""
        if kind == FILLED:
            self.skipped += [Skipped(*each) for each in json.loads(text or "[]")]
        elif self.failure is None or start < self.failure[0]:
            self.failure = start, kind, text

    def check(self) -> None:
        """Raise what went wrong, if anything did."""
        if self.failure:
            _, kind, text = self.failure
            raise RuntimeError(text) if kind == FAILED else REPORTED[kind](text)

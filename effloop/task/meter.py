"""Scores of tasks: their names, and how they are shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Meter:
    """A score of a task.

    Attributes:
        name: its key in metrics.jsonl and summary.json; `val/NAME` is an objective.
        label: what it is called in lines of the log.
        higher_is_better: whether more of it is better.
        percent: whether it is a share from 0 to 1, shown in percent.
        of_one: whether it is as near to 1 as possible though no share, as R² is.
        min_outputs: models of fewer outputs aren't scored by it: five of five classes are always right.
    """

    name: str
    label: str
    higher_is_better: bool = True
    percent: bool = True
    min_outputs: int = 0
    of_one: bool = False

    def text(self, value: float) -> str:
        """A value for a table: `74.78%`, or `0.8165`."""
        return f"{value:z.2%}" if self.percent else f"{value:z.4f}"

    def number(self, value: float) -> str:
        """A value for a line of the log, without a unit: `74.78`, or `0.8165`."""
        return f"{100 * value:z.2f}" if self.percent else f"{value:z.4f}"


LOSS = Meter("loss", "Loss", higher_is_better=False, percent=False)
"""The loss, which every task has."""


def suiting(meters: tuple[Meter, ...], num_outputs: int) -> tuple[Meter, ...]:
    """Those that a model of so many outputs is scored by."""
    return tuple(meter for meter in meters if meter.min_outputs <= num_outputs)


def score_names(meters: Sequence[Meter]) -> list[str]:
    """Names of scores in the order of columns in files: the loss first."""
    return [LOSS.name, *(meter.name for meter in meters if meter != LOSS)]

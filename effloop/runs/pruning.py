"""Ending runs of a sweep early that are worse than the others were."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

from effloop.config import Config
from effloop.parallel import Parallel
from effloop.runs.reader import JOB, read_jsonl
from effloop.task import Meter, meters_of

_OTHERS = 4
"""So many others must have come as far: the median of fewer says little."""
_WARM_UP = 0.25
"""Share of a run's epochs that it may always have."""


class MedianPruner:
    """Ends a run whose best score so far is worse than the median of what the other jobs had at the same epoch.

    It is the median stopping of Golovin et al. ("Google Vizier", 2017), also Optuna's MedianPruner, but with the best
    score up to the epoch for the others, too, and not only for those that came to their end. It reads the other jobs'
    folders, so it works for any launcher, and for a grid as for a search. A run without any finite score is the worst.

    Args:
        run_dir: the job's folder, beside those of the others.
        meter: the validation score.
    """

    def __init__(self, run_dir: Path, meter: Meter) -> None:
        self._run_dir = run_dir
        self._meter = meter

    def should_prune(self, epoch: int, epochs: int) -> bool:
        """Whether the run should end here, where `epoch` of `epochs` have been trained, evaluated and recorded."""
        if epoch >= epochs or epoch < _WARM_UP * epochs:
            return False
        folders = [job.parent for job in self._run_dir.parent.glob(f"*/{JOB}")]
        scores = [self._best(folder, epoch) for folder in folders if folder.name != self._run_dir.name]
        scores = [score for score in scores if not math.isnan(score)]
        mine = self._best(self._run_dir, epoch)
        if len(scores) < _OTHERS:
            return False
        return mine < median(scores) if self._meter.higher_is_better else mine > median(scores)

    def _best(self, run_dir: Path, epoch: int) -> float:
        """The best score of a run's first `epoch` epochs; infinitely bad if it has none, NaN if it isn't so far."""
        rows = [row for row in read_jsonl(run_dir / "metrics.jsonl") if row.get("split") == "val"]
        values = [row.get(self._meter.name) for row in rows if row["epoch"] < epoch]
        if len(values) < epoch:
            return math.nan
        numbers = [value for value in values if value is not None]
        if self._meter.higher_is_better:
            return float(max(numbers, default=-math.inf))
        return float(min(numbers, default=math.inf))


def build_pruner(config: Config, run_dir: Path, parallel: Parallel) -> Callable[[int, int], bool]:
    """(epochs done, epochs) -> whether a run ends early, decided by rank 0; never outside of a sweep that prunes."""
    if not config.sweep.prune or not (run_dir / JOB).is_file():
        return lambda done, epochs: False
    meter = next(each for each in meters_of(config.task.name) if f"val/{each.name}" == config.objective)
    rule = MedianPruner(run_dir, meter)
    return lambda done, epochs: parallel.on_rank0(partial(rule.should_prune, done, epochs))

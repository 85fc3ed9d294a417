"""Early stopping of the runs of a sweep that are worse than the others."""

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

_MIN_OTHERS = 4
"""Other jobs that must have reached the epoch: the median of fewer says little."""
_WARM_UP = 0.25
"""Share of its epochs before which no run is ended."""


class MedianPruner:
    """Ends a run whose best score so far is worse than the median of the other jobs' best scores at the same epoch.

    This is the median stopping rule of Golovin et al. ("Google Vizier", 2017) and Optuna's MedianPruner, but takes the
    best score up to the epoch for the others, too, and also counts unfinished jobs. It reads the other jobs' folders,
    so it works with any launcher, for a grid and for a search. Only jobs that have evaluated the epoch are compared. A
    run without any finite score is the worst.

    Args:
        run_dir: the job's folder, next to those of the others.
        meter: the validation score to compare.
    """

    def __init__(self, run_dir: Path, meter: Meter) -> None:
        self._run_dir = run_dir
        self._meter = meter

    def should_prune(self, epoch: int, epochs: int) -> bool:
        """Whether the run should end now; `epoch` of `epochs` have been trained and recorded."""
        if epoch >= epochs or epoch < _WARM_UP * epochs:
            return False
        folders = [job.parent for job in self._run_dir.parent.glob(f"*/{JOB}")]
        scores = [self._best(folder, epoch) for folder in folders if folder.name != self._run_dir.name]
        scores = [score for score in scores if not math.isnan(score)]
        own = self._best(self._run_dir, epoch)
        if len(scores) < _MIN_OTHERS:
            return False
        return own < median(scores) if self._meter.higher_is_better else own > median(scores)

    def _best(self, run_dir: Path, epoch: int) -> float:
        """The best score of a run's first `epoch` epochs; infinitely bad without any, NaN if the last has none."""
        rows = [row for row in read_jsonl(run_dir / "metrics.jsonl") if row.get("split") == "val"]
        values = {row["epoch"]: row.get(self._meter.name) for row in rows if row["epoch"] < epoch}
        if epoch - 1 not in values:
            return math.nan
        numbers = [value for value in values.values() if value is not None]
        if self._meter.higher_is_better:
            return float(max(numbers, default=-math.inf))
        return float(min(numbers, default=math.inf))


def build_pruner(config: Config, run_dir: Path, parallel: Parallel) -> Callable[[int, int], bool]:
    """(epochs done, epochs) -> whether to end the run, as rank 0 decides; always False outside of a pruned sweep."""
    if not config.sweep.prune or not (run_dir / JOB).is_file():
        return lambda done, epochs: False
    meter = next(each for each in meters_of(config.task.name) if f"val/{each.name}" == config.objective)
    pruner = MedianPruner(run_dir, meter)
    return lambda done, epochs: parallel.on_rank0(partial(pruner.should_prune, done, epochs))

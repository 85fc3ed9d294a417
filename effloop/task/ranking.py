"""Scores of flags by how samples are ranked: average precision, and thresholds. In float64, whatever the order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Ranking:
    """Counts at each distinct score of M samples, from the highest.

    Attributes:
        scores: (D,) float64.
        hits: (D,) int64, samples with the flag that score as much or more.
        found: (D,) int64, samples that score as much or more.
        positives: samples with the flag.
    """

    scores: NDArray[np.float64]
    hits: NDArray[np.int64]
    found: NDArray[np.int64]
    positives: int

    @classmethod
    def of(cls, scores: NDArray[Any], flags: NDArray[Any]) -> Ranking:
        """(M,) scores and (M,) flags, 0 or 1; samples of the same score count together, in any order."""
        order = np.argsort(-scores)
        scores = scores[order].astype(np.float64)
        hits = flags[order].cumsum(dtype=np.int64)
        ends = np.ones(len(scores), np.bool_)  # of runs of equal scores
        ends[:-1] = scores[:-1] != scores[1:]  # and no difference, which infinite ones don't have
        last = np.flatnonzero(ends)
        return cls(scores[last], hits[last], last + 1, int(hits[-1]) if len(hits) else 0)

    @property
    def average_precision(self) -> float:
        """The sum over thresholds of the precision there times what the recall grows by; NaN without positives, or if a
        score is NaN.

        As in scikit-learn and torchmetrics: no interpolation.
        """
        if not self.positives or np.isnan(self.scores[-1]):  # which is sorted last
            return float("nan")
        gains = np.diff(self.hits, prepend=0) / self.positives
        return float((gains * self.hits / self.found).sum())

    @property
    def best_threshold(self) -> float:
        """Between two scores: the highest of those with the largest F1; 0.5 without positives. Scores are 0 to 1."""
        if not self.positives:
            return 0.5
        best = int(np.argmax(2 * self.hits / (self.found + self.positives)))
        below = self.scores[best + 1] if best + 1 < len(self.scores) else 0.0
        return float(self.scores[best] + below) / 2


def mean_average_precision(scores: NDArray[Any], flags: NDArray[Any]) -> float:
    """The mean average precision of the classes that have a positive; NaN if none has.

    Args:
        scores: (N, K).
        flags: (N, K), 0 or 1.
    """
    known = [value for value in average_precisions(scores, flags) if value == value]
    return float(np.mean(known)) if known else float("nan")


def average_precisions(scores: NDArray[Any], flags: NDArray[Any]) -> list[float]:
    """K average precisions, one for each class; NaN for one without positives. Arguments as of the mean."""
    return [Ranking.of(*columns).average_precision for columns in zip(scores.T, flags.T, strict=True)]


def best_thresholds(scores: NDArray[Any], flags: NDArray[Any]) -> list[float]:
    """K thresholds, one for each class, by `Ranking.best_threshold`.

    Args:
        scores: (N, K), from 0 to 1.
        flags: (N, K), 0 or 1.
    """
    return [Ranking.of(*columns).best_threshold for columns in zip(scores.T, flags.T, strict=True)]


def f1_macro(hits: NDArray[Any], extra: NDArray[Any], missed: NDArray[Any]) -> float:
    """The mean F1 of the classes that some sample has or is predicted to have; NaN if none.

    Args:
        hits: (K,) true positives.
        extra: (K,) false positives.
        missed: (K,) false negatives.
    """
    total = 2 * hits + extra + missed
    return float(np.mean(2 * hits[total > 0] / total[total > 0])) if (total > 0).any() else float("nan")

"""Evaluation in detail: scores by class, the worst samples, confusion and calibration."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

NUM_WORST = 32
"""Samples that are named for their loss."""

NUM_POINTS, NUM_PLOTTED = 1_000, 9
"""Samples in a plot of predictions over targets, and outputs that have one."""

NUM_BINS = 15
"""Bins of the reliability diagram, as many as Guo et al. have."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Details:
    """An evaluation in detail.

    Attributes:
        rows: a row for each class or output, the worst first; the same columns in all, None where there is no value.
        worst: the samples with the largest loss, that first: `id`, what they are and what they are taken for, in
            words or as a list of numbers, and `loss` or `error`.
        percent: whether the fractions in `rows` are shares from 0 to 1.
        unit: what `confusion` counts: samples, or pixels.
        confusion: (M, 3) int64: class, class that it is taken for, samples or pixels; of the pairs that there are. Only
            where each of them has one class.
        points: (n, k, 2) float64: target and prediction, of samples spread evenly and of the first outputs. Only where
            targets are numbers.
        calibration: (NUM_BINS, 3) float64: samples, mean probability of the class that is predicted, share in which it
            is right, of samples by that probability. Only where there are probabilities.
    """

    rows: Sequence[Row]
    worst: Sequence[Row]
    percent: bool = True
    confusion: NDArray[np.int64] | None = None
    calibration: NDArray[np.float64] | None = None
    points: NDArray[np.float64] | None = None
    unit: str = "samples"

    @property
    def mistakes(self) -> NDArray[np.int64]:
        """(m, 3) int64: the rows of `confusion` in which the classes differ, the most frequent first."""
        return _mistakes(np.empty((0, 3), np.int64) if self.confusion is None else self.confusion)

    @property
    def calibration_error(self) -> float | None:
        """The expected calibration error (Guo et al. 2017, "On calibration of modern neural networks"): by how much
        probabilities and shares of right predictions differ, the mean over samples.
        """
        if self.calibration is None or not self.calibration[:, 0].any():
            return None
        samples, probability, right = self.calibration.T
        error = float((samples * abs(probability - right)).sum() / samples.sum())
        return None if math.isnan(error) else error


def of_classes(
    losses: NDArray[np.float32],
    targets: NDArray[Any],
    predicted: NDArray[Any],
    probabilities: NDArray[np.float32],
    names: Sequence[str],
) -> Details:
    """Details where each sample has one class.

    Args:
        losses: (N,) of each sample.
        targets: (N,) classes.
        predicted: (N,) classes.
        probabilities: (N,) of the predicted classes.
        names: of the K classes.
    """
    targets, predicted = targets.astype(np.int64), predicted.astype(np.int64)
    codes, counts = np.unique(targets * len(names) + predicted, return_counts=True)
    confusion = np.stack([codes // len(names), codes % len(names), counts], axis=1)
    calibration = calibration_bins(probabilities, targets == predicted)
    worst = [
        {
            "id": sample,
            "target": names[targets[sample]],
            "predicted": names[predicted[sample]],
            "probability": float(probabilities[sample]),
            "loss": float(losses[sample]),
        }
        for sample in largest(losses)
    ]
    return Details(class_rows(confusion, names), worst, confusion=confusion, calibration=calibration)


def of_flags(
    losses: NDArray[Any],
    scores: NDArray[Any],
    predicted: NDArray[np.bool_],
    has: NDArray[np.bool_],
    names: Sequence[str],
) -> Details:
    """Details where each sample has any number of classes.

    Args:
        losses: (N,) of each sample.
        scores: (N, K) by which samples are ranked for each class.
        predicted: (N, K) which classes are predicted.
        has: (N, K) which classes samples have.
        names: of the K classes.
    """
    counts = [part.sum(axis=0).tolist() for part in (has, predicted, predicted & has)]
    rows = [
        {
            "class": name,
            "samples": samples,
            "ap": None if math.isnan(ranking.average_precision) else ranking.average_precision,
            "f1": share(2 * hits, samples + found),
            "precision": share(hits, found),
            "recall": share(hits, samples),
        }
        for name, samples, found, hits, ranking in zip(names, *counts, rankings(scores, has), strict=True)
    ]
    worst = [
        {
            "id": sample,
            "target": _listed(names, has[sample]),
            "predicted": _listed(names, predicted[sample]),
            "loss": float(losses[sample]),
        }
        for sample in largest(losses)
    ]
    return Details(worst_first(rows, "ap"), worst)


def of_numbers(predicted: NDArray[Any], targets: NDArray[Any], names: Sequence[str]) -> Details:
    """Details where each sample has K numbers. Of several, the worst samples are those with the largest mean error in
    standard deviations of the targets.

    Args:
        predicted: (N, K).
        targets: (N, K).
        names: of the K numbers.
    """
    predicted, targets = predicted.astype(np.float64), targets.astype(np.float64)
    errors = predicted - targets
    spread = np.where(np.ptp(targets, axis=0) > 0, targets.std(axis=0), 0)  # which rounding leaves of equal ones
    squared = np.square(errors).mean(axis=0)
    rows = [
        {
            "output": name,
            "mae": float(abs(errors[:, place]).mean()),
            "rmse": float(np.sqrt(squared[place])),
            "r2": float(1 - squared[place] / spread[place] ** 2) if spread[place] else None,
            "bias": float(errors[:, place].mean()),
        }
        for place, name in enumerate(names)
    ]
    sizes = abs(errors) if len(names) == 1 else abs(errors) / np.where(spread > 0, spread, 1)
    worst = [
        {
            "id": sample,
            "target": targets[sample].tolist(),
            "predicted": predicted[sample].tolist(),
            "error": float(sizes[sample].mean()),
        }
        for sample in largest(sizes.mean(axis=1))
    ]
    some = np.unique(np.linspace(0, len(targets) - 1, NUM_POINTS).astype(np.int64))
    points = np.stack([targets[some, :NUM_PLOTTED], predicted[some, :NUM_PLOTTED]], axis=2)
    return Details(worst_first(rows, "r2"), worst, percent=False, points=points)


def class_rows(confusion: NDArray[np.int64], names: Sequence[str]) -> list[Row]:
    """A row for each class, by its F1: samples, recall, precision, F1, and what it is most often taken for.

    A class without samples has no recall, one that is never predicted no precision; what has no F1 comes last.

    Args:
        confusion: (M, 3), as in `Details`.
        names: of the K classes.
    """
    count = len(names)
    samples, predicted, hits = np.zeros((3, count), np.int64)
    np.add.at(samples, confusion[:, 0], confusion[:, 2])
    np.add.at(predicted, confusion[:, 1], confusion[:, 2])
    right = confusion[confusion[:, 0] == confusion[:, 1]]
    hits[right[:, 0]] = right[:, 2]
    taken: dict[int, tuple[int, int]] = {}
    for target, other, number in _mistakes(confusion).tolist():
        taken.setdefault(target, (other, number))
    rows = []
    for label, name in enumerate(names):
        other, number = taken.get(label, (None, 0))
        rows.append(
            {
                "class": name,
                "samples": int(samples[label]),
                "recall": share(hits[label], samples[label]),
                "precision": share(hits[label], predicted[label]),
                "f1": share(2 * hits[label], samples[label] + predicted[label]),
                "taken_for": None if other is None else names[other],
                "share": share(number, samples[label]),
            }
        )
    return worst_first(rows, "f1")


def calibration_bins(probabilities: NDArray[np.float32], right: NDArray[np.bool_]) -> NDArray[np.float64]:
    """(N,) probabilities of what is predicted, (N,) whether that is right -> (NUM_BINS, 3), as in `Details`.

    Bins are equally wide. One without samples has zeros.
    """
    edges = np.linspace(0, 1, NUM_BINS + 1, dtype=np.float32)[1:-1]
    places = np.digitize(probabilities, edges)
    sums = [np.bincount(places, weights, NUM_BINS) for weights in (np.ones(len(places)), probabilities, right)]
    bins = np.stack(sums, axis=1).astype(np.float64)
    bins[:, 1:] /= np.maximum(bins[:, :1], 1)
    return bins


def largest(losses: NDArray[Any]) -> list[int]:
    """The samples with the largest losses, at most NUM_WORST, the largest first; one that is no number is larger."""
    order = np.argsort(-np.where(np.isnan(losses), np.inf, losses), kind="stable")
    return [int(sample) for sample in order[:NUM_WORST]]


def _mistakes(confusion: NDArray[np.int64]) -> NDArray[np.int64]:
    wrong = confusion[confusion[:, 0] != confusion[:, 1]]
    order = np.argsort(-wrong[:, 2], kind="stable")
    return np.asarray(wrong[order])


def worst_first(rows: list[Row], by: str) -> list[Row]:
    """The rows with the smallest values first, those without one last."""
    return sorted(rows, key=lambda row: (row[by] is None, row[by] or 0.0))


def _listed(names: Sequence[str], flags: NDArray[np.bool_]) -> str:
    return ", ".join(names[place] for place in np.flatnonzero(flags).tolist()) or "none"


def share(part: float, whole: float) -> float | None:
    """A part as a fraction; None of nothing."""
    return float(part / whole) if whole else None


# Scores of flags by how samples are ranked: average precision, and thresholds. In float64, whatever the order.


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


def rankings(scores: NDArray[Any], flags: NDArray[Any]) -> list[Ranking]:
    """(N, K) scores and (N, K) flags, 0 or 1 -> K rankings, one for each class."""
    return [Ranking.of(*columns) for columns in zip(scores.T, flags.T, strict=True)]

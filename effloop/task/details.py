"""Evaluation in detail: scores by class, the worst samples, confusion and calibration."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

NUM_WORST = 32  # samples that are named for their loss

NUM_POINTS, NUM_PLOTTED = 1_000, 9  # samples in a plot of predictions over targets, and outputs that have one

NUM_BINS = 15  # of the reliability diagram, as many as Guo et al. have

Row = dict[str, Any]
Columns = dict[str, Callable[[int], Any]]


@dataclass(frozen=True)
class Details:
    """An evaluation in detail."""

    # a row for each class or output, the worst first; the same columns in all, None where there is no value
    rows: Sequence[Row]
    # the samples with the largest loss, that first: `id`, what they are and what they are taken for, in words or as a
    # list of numbers, and `loss` or `error`
    worst: Sequence[Row]
    percent: bool = True  # whether the fractions in `rows` are shares from 0 to 1
    # (M, 3) int64: class, class that it is taken for, samples or pixels; of the pairs that there are. Only where each
    # of them has one class
    confusion: NDArray[np.int64] | None = None
    # (NUM_BINS, 3) float64: samples, mean probability of the class that is predicted, share in which it is right, of
    # samples by that probability. Only where there are probabilities
    calibration: NDArray[np.float64] | None = None
    # (n, k, 2) float64: target and prediction, of samples spread evenly and of the first outputs. Only where targets
    # are numbers
    points: NDArray[np.float64] | None = None
    unit: str = "samples"  # what `confusion` counts: samples, or pixels

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


def _details(rows: list[Row], by: str, losses: NDArray[Any], columns: Columns, **more: Any) -> Details:
    """Rows by their values of `by`, those without one last, and the samples with the largest losses by `columns`."""
    worst = [{"id": sample, **{name: of(sample) for name, of in columns.items()}} for sample in largest(losses)]
    return Details(sorted(rows, key=lambda row: (row[by] is None, row[by] or 0.0)), worst, **more)


def of_classes(
    losses: NDArray[np.float32],
    targets: NDArray[Any],
    predicted: NDArray[Any],
    probabilities: NDArray[np.float32],
    names: Sequence[str],
) -> Details:
    """Details where each sample has one of K classes: (N,) losses, classes, predicted ones and their probabilities."""
    targets, predicted = targets.astype(np.int64), predicted.astype(np.int64)
    codes, counts = np.unique(targets * len(names) + predicted, return_counts=True)
    confusion = np.stack([codes // len(names), codes % len(names), counts], axis=1)
    samples, found, hits = (
        np.bincount(each, minlength=len(names)).tolist() for each in (targets, predicted, targets[targets == predicted])
    )
    taken: dict[int, tuple[int, int]] = {}
    for target, other, number in _mistakes(confusion).tolist():
        taken.setdefault(target, (other, number))
    rows: list[Row] = []
    for label, name in enumerate(names):
        other, number = taken.get(label, (None, 0))
        scores = _hit_scores(hits[label], samples[label], found[label])
        most = {"taken_for": None if other is None else names[other], "share": share(number, samples[label])}
        rows.append({"class": name, "samples": samples[label], **scores, **most})
    columns: Columns = {
        "target": lambda sample: names[targets[sample]],
        "predicted": lambda sample: names[predicted[sample]],
        "probability": lambda sample: float(probabilities[sample]),
        "loss": lambda sample: float(losses[sample]),
    }
    calibration = calibration_bins(probabilities, targets == predicted)
    return _details(rows, "f1", losses, columns, confusion=confusion, calibration=calibration)


def of_flags(
    losses: NDArray[Any],
    scores: NDArray[Any],
    predicted: NDArray[np.bool_],
    has: NDArray[np.bool_],
    names: Sequence[str],
) -> Details:
    """Details where each sample has any of K classes: (N,) losses, (N, K) scores, classes predicted, and there."""
    counts = [part.sum(axis=0).tolist() for part in (predicted & has, has, predicted)]
    rows: list[Row] = []
    for name, ranking, hits, samples, found in zip(names, rankings(scores, has), *counts, strict=True):
        ap = None if math.isnan(ranking.average_precision) else ranking.average_precision
        shares = _hit_scores(hits, samples, found)
        rows.append({"class": name, "samples": samples, "ap": ap, **{key: shares[key] for key in _SHARES}})
    columns = {
        "target": lambda sample: _listed(names, has[sample]),
        "predicted": lambda sample: _listed(names, predicted[sample]),
        "loss": lambda sample: float(losses[sample]),
    }
    return _details(rows, "ap", losses, columns)


def of_numbers(predicted: NDArray[Any], targets: NDArray[Any], names: Sequence[str]) -> Details:
    """Details where each sample has K numbers, (N, K). Of several, the worst samples are those with the largest mean
    error in standard deviations of the targets.
    """
    predicted, targets = predicted.astype(np.float64), targets.astype(np.float64)
    errors = predicted - targets
    spread = np.where(np.ptp(targets, axis=0) > 0, targets.std(axis=0), 0)  # which rounding leaves of equal ones
    squared = np.square(errors).mean(axis=0)
    rows: list[Row] = [
        {
            "output": name,
            "mae": float(abs(errors[:, place]).mean()),
            "rmse": float(np.sqrt(squared[place])),
            "r2": float(1 - squared[place] / spread[place] ** 2) if spread[place] else None,
            "bias": float(errors[:, place].mean()),
        }
        for place, name in enumerate(names)
    ]
    sizes = (abs(errors) if len(names) == 1 else abs(errors) / np.where(spread > 0, spread, 1)).mean(axis=1)
    columns = {
        "target": lambda sample: targets[sample].tolist(),
        "predicted": lambda sample: predicted[sample].tolist(),
        "error": lambda sample: float(sizes[sample]),
    }
    some = np.unique(np.linspace(0, len(targets) - 1, NUM_POINTS).astype(np.int64))
    points = np.stack([targets[some, :NUM_PLOTTED], predicted[some, :NUM_PLOTTED]], axis=2)
    return _details(rows, "r2", sizes, columns, percent=False, points=points)


def of_masks(confusion: NDArray[np.int64] | None, facts: NDArray[np.float32], names: Sequence[str]) -> Details:
    """Details where each pixel has one of K classes: (K, K) pixels of each class by what they are taken for, if known,
    and (N, 3 K) of each image the pixels of each class that are right, that there are, and that are predicted.
    """
    hits, targets, predicted = np.split(facts.astype(np.float64), 3, axis=1)
    union = targets + predicted - hits
    ious = np.divide(hits, union, out=np.full(hits.shape, np.nan), where=union > 0)
    counted = (union > 0).sum(axis=1)
    means = np.divide(np.nansum(ious, axis=1), counted, out=np.ones(len(ious)), where=counted > 0)
    rows: list[Row] = [
        {
            "class": name,
            "iou": share(right, there + found - right),
            "accuracy": share(right, there),
            "precision": share(right, found),
            "pixels": int(there),
            "share": share(there, targets.sum()),
        }
        for name, right, there, found in zip(
            names, *(each.sum(axis=0) for each in (hits, targets, predicted)), strict=True
        )
    ]
    columns = {
        "target": lambda sample: _shares(targets[sample], names),
        "predicted": lambda sample: _shares(predicted[sample], names),
        "iou": lambda sample: float(means[sample]),
    }
    pairs = None
    if confusion is not None:
        places = np.argwhere(confusion)
        pairs = np.concatenate([places, confusion[tuple(places.T)][:, None]], axis=1).astype(np.int64)
    return _details(rows, "iou", 1 - means, columns, confusion=pairs, unit="pixels")


_SHARES = ("f1", "precision", "recall")


def _hit_scores(hits: int, samples: int, found: int) -> dict[str, float | None]:
    """Of samples that have a class, and those that are predicted to have it."""
    scores = {"recall": share(hits, samples), "precision": share(hits, found)}
    return {**scores, "f1": share(2 * hits, samples + found)}


def calibration_bins(probabilities: NDArray[np.float32], right: NDArray[np.bool_]) -> NDArray[np.float64]:
    """(N,) probabilities of what is predicted, (N,) whether that is right -> (NUM_BINS, 3), as in `Details`."""
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
    return np.asarray(wrong[np.argsort(-wrong[:, 2], kind="stable")])


def _listed(names: Sequence[str], flags: NDArray[np.bool_]) -> str:
    return ", ".join(names[place] for place in np.flatnonzero(flags).tolist()) or "none"


def _shares(pixels: NDArray[np.float64], names: Sequence[str]) -> str:
    """`road 62%, sky 21%`: the four largest classes of an image."""
    total = pixels.sum()
    if not total or math.isnan(total):
        return "none"
    order = [int(label) for label in np.argsort(-pixels, kind="stable")[:4] if pixels[label] > 0]
    return ", ".join(f"{names[label]} {pixels[label] / total:.0%}" for label in order)


def share(part: float, whole: float) -> float | None:
    """A part as a fraction; None of nothing."""
    return float(part / whole) if whole else None


# Scores of flags by how samples are ranked: average precision, and thresholds. In float64, whatever the order.


@dataclass(frozen=True)
class Ranking:
    """Counts at each distinct score of M samples, from the highest."""

    scores: NDArray[np.float64]  # (D,) float64
    hits: NDArray[np.int64]  # (D,) int64, samples with the flag that score as much or more
    found: NDArray[np.int64]  # (D,) int64, samples that score as much or more
    positives: int  # samples with the flag

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
        """The sum over thresholds of the precision there times what the recall grows by, as in scikit-learn; NaN
        without positives, or if a score is NaN.
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

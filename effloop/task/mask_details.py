"""Details of an evaluation of masks: which classes and which images a model fails on."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from effloop.task.details import Details, Row, largest

_NAMED = 4
"""Classes of an image that are named, the largest first."""


def of_masks(confusion: NDArray[np.int64] | None, facts: NDArray[np.float32], names: Sequence[str]) -> Details:
    """Details where each pixel has one class.

    Args:
        confusion: (K, K) pixels of each class, in rows, by what they are taken for, in columns; None is not known, and
            the table then has no more than `facts` tells.
        facts: (N, 3 K) of each image the pixels of each class that are right, that there are, and that are predicted.
        names: of the K classes.
    """
    hits, targets, predicted = np.split(facts.astype(np.float64), 3, axis=1)
    union = targets + predicted - hits
    ious = np.divide(hits, union, out=np.full(hits.shape, np.nan), where=union > 0)
    counted = (union > 0).sum(axis=1)
    means = np.divide(np.nansum(ious, axis=1), counted, out=np.ones(len(ious)), where=counted > 0)
    worst: list[Row] = [
        {
            "id": sample,
            "target": _shares(targets[sample], names),
            "predicted": _shares(predicted[sample], names),
            "iou": float(means[sample]),
        }
        for sample in largest(1 - means)
    ]
    rows = _rows(hits.sum(axis=0), targets.sum(axis=0), predicted.sum(axis=0), names)
    if confusion is None:
        return Details(rows, worst, unit="pixels")
    places = np.argwhere(confusion)
    pairs = np.concatenate([places, confusion[tuple(places.T)][:, None]], axis=1).astype(np.int64)
    return Details(rows, worst, confusion=pairs, unit="pixels")


def _rows(
    hits: NDArray[np.float64], targets: NDArray[np.float64], predicted: NDArray[np.float64], names: Sequence[str]
) -> list[Row]:
    """A row for each class, by its IoU: IoU, accuracy, precision, pixels and their share; None where there is none."""
    total = targets.sum()
    rows: list[Row] = [
        {
            "class": name,
            "iou": _share(hits[label], targets[label] + predicted[label] - hits[label]),
            "accuracy": _share(hits[label], targets[label]),
            "precision": _share(hits[label], predicted[label]),
            "pixels": int(targets[label]),
            "share": _share(targets[label], total),
        }
        for label, name in enumerate(names)
    ]
    return sorted(rows, key=lambda row: (row["iou"] is None, row["iou"] or 0.0))


def _share(part: float, whole: float) -> float | None:
    return float(part / whole) if whole else None


def _shares(pixels: NDArray[np.float64], names: Sequence[str]) -> str:
    """`road 62%, sky 21%`: the largest classes of an image."""
    total = pixels.sum()
    if not total or math.isnan(total):
        return "none"
    order = [int(label) for label in np.argsort(-pixels, kind="stable")[:_NAMED] if pixels[label] > 0]
    return ", ".join(f"{names[label]} {pixels[label] / total:.0%}" for label in order)

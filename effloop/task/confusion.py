"""Confusion matrices of pixels, counted on the device, and the scores that they give."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

IGNORED = 255
"""The value in a mask of pixels that aren't counted."""


def predicted_classes(logits: Tensor) -> Tensor:
    """(N, K, H, W) -> (N, H, W) int64, the class with the largest logit."""
    if logits.device.type == "cpu":  # there argmax takes 25 ms of (16, 2, 128, 128), and 2 of channels_last
        logits = logits.contiguous(memory_format=torch.channels_last)
    return logits.argmax(dim=1)


def confusion_matrices(predicted: Tensor, masks: Tensor, num_classes: int) -> Tensor:
    """Count, for each image, the pixels of each class by what they are taken for; nothing here waits for the device.

    Args:
        predicted: (N, H, W) int64 classes.
        masks: (N, H, W) uint8 classes, or IGNORED.
        num_classes: K.

    Returns:
        (N, K, K) int64, on the device: the class in rows, what it is taken for in columns.
    """
    count, cells = len(masks), num_classes**2
    images = torch.arange(count, device=masks.device).view(-1, 1, 1) * cells
    places = images + masks.long() * num_classes + predicted
    found = _histogram(places, masks == IGNORED, count * cells)
    return found.view(count, num_classes, num_classes)


def _histogram(places: Tensor, ignored: Tensor, bins: int) -> Tensor:
    """How often each of 0 to bins - 1 occurs, (bins,) int64.

    CUDA's `bincount` asks the device how large the result is, and `histc` doesn't; on a CPU only `bincount` takes
    integers. There is one for each image, so that few threads add to the same number at once.
    """
    if places.is_cuda:  # what is above the maximum isn't counted, and the maximum itself is in the last bin
        return places.masked_fill(ignored, bins + 1).flatten().histc(bins, 0, bins)
    places = places.masked_fill(ignored, bins).flatten()
    if places.device.type == "cpu":
        return places.bincount(minlength=bins + 1)[:bins]
    return places.new_zeros(bins + 1).scatter_add_(0, places, torch.ones_like(places))[:bins]


def iou_of(confusion: NDArray[np.float64]) -> NDArray[np.float64]:
    """(..., K, K) -> (..., K) intersection over union of each class; NaN of one that neither occurs nor is
    predicted.
    """
    hits, targets, predicted = _margins(confusion)
    return _ratio(hits, targets + predicted - hits)


def accuracy_of(confusion: NDArray[np.float64]) -> NDArray[np.float64]:
    """(..., K, K) -> (..., K) the share of each class's pixels that are right; NaN of one that doesn't occur."""
    hits, targets, _ = _margins(confusion)
    return _ratio(hits, targets)


def pixel_scores(confusion: NDArray[np.float64]) -> dict[str, float]:
    """(K, K) -> `miou`, `accuracy` and `mean_accuracy`: means over the classes that have one, NaN without pixels."""
    total = confusion.sum()
    return {
        "miou": mean_of(iou_of(confusion)),
        "accuracy": float(np.trace(confusion) / total) if total else float("nan"),
        "mean_accuracy": mean_of(accuracy_of(confusion)),
    }


def mean_of(values: NDArray[np.float64]) -> float:
    """The mean without NaN; NaN if there is nothing else."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else float("nan")


def as_matrix(sums: Sequence[float] | NDArray[np.float64]) -> NDArray[np.float64]:
    """K * K numbers -> (K, K)."""
    side = round(len(sums) ** 0.5)
    return np.asarray(sums, np.float64).reshape(side, side)


def _margins(confusion: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Pixels of each class that are right, that there are, and that are predicted."""
    return np.diagonal(confusion, axis1=-2, axis2=-1), confusion.sum(-1), confusion.sum(-2)


def _ratio(part: NDArray[np.float64], whole: NDArray[np.float64]) -> NDArray[np.float64]:
    found: NDArray[np.float64] = np.divide(part, whole, out=np.full(whole.shape, np.nan), where=whole > 0)
    return found

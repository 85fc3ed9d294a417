"""How many samples, or pixels, of each class there are, and what targets are."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from effloop.data.image.mask import IGNORED, decode_mask
from effloop.data.source.base import Kind, Source, at_most
from effloop.errors import DataError

_LABELS = 1 << 20  # samples counted at a time
_MASKS = 1_000
"""Masks whose pixels are counted."""


def class_counts(source: Source) -> NDArray[np.int64]:
    """(K,) samples of each class of a source; of flags, samples that have it. Labels that no class has aren't counted.

    Samples are counted piece by piece: 10^8 of them take no more memory than 10^6.
    """
    num_classes = len(source.classes)
    counts = np.zeros(num_classes + 1, np.int64)  # the last one: labels that no class has
    for start in range(0, len(source) if num_classes else 0, _LABELS):
        piece = slice(start, start + _LABELS)
        if source.kind is Kind.flags:
            counts[:-1] += source.targets[piece].sum(axis=0, dtype=np.int64)
        else:
            counts += np.bincount(at_most(source.labels[piece], num_classes), minlength=num_classes + 1)
    return counts[:-1]


def pixel_counts(source: Source) -> NDArray[np.int64]:
    """(K,) pixels of each class in a source's masks, in 1,000 of them, evenly spaced, where there are more.

    A mask that can't be read isn't counted: training says so, or does without its sample.
    """
    counts = np.zeros(IGNORED + 1, np.int64)
    for index in np.unique(np.linspace(0, len(source) - 1, _MASKS).astype(np.int64)).tolist():
        with suppress(DataError):
            mask = decode_mask(source.read_mask(index), source.mask_format)
            counts += np.bincount(mask.ravel(), minlength=len(counts))
    return counts[: len(source.classes)]


def classes_without_samples(source: Source) -> list[str]:
    """Names of the classes that no sample has; none of masks, which aren't looked at for that."""
    if source.kind is Kind.masks:
        return []
    return [name for name, count in zip(source.classes, class_counts(source), strict=True) if not count]


def targets_of(source: Source) -> str:
    """How many classes, labels or numbers a source has, and how these were found, for `describe`."""
    count = len(source.target_names)
    words = {
        Kind.classes: f" in {count} classes",
        Kind.flags: f" with {count} labels",
        Kind.masks: f" with masks of {count} classes",
    }
    about = f" ({source.targets_note})" if source.targets_note else ""
    return words.get(source.kind, f" with {count} number{'s' * (count > 1)}") + about if count else ""

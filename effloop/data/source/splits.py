"""Splits, which don't all have every class."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import numpy as np

from effloop.data.source.base import DataConfig, Source, sources
from effloop.data.source.wrapped import Relabelled
from effloop.errors import DataError, EffLoopError


def open_split(config: DataConfig, split: str, classes: Sequence[str] | None = None) -> Source:
    """Open a split; with `data.allow_missing_classes`, its labels count the classes of all splits.

    These are the classes of the training split, then those that only the validation split has, then any other.

    Args:
        config: of the data.
        split: its name in the data.
        classes: what comes first instead, such as the classes that a checkpoint was trained on.

    Raises:
        ConfigError, DataError: it can't be opened.
    """
    source = sources.build(config, split)
    if not (config.allow_missing_classes and source.classes):
        return source
    found = dict.fromkeys(classes or ())
    for name in () if classes else (config.train_split, config.val_split):
        with suppress(EffLoopError):  # there is no such split
            found.update(dict.fromkeys(sources.build(config, name).classes))
    found.update(dict.fromkeys(source.classes))
    return source if tuple(found) == source.classes else Relabelled(source, [*found])


def check_same_classes(train: Source, val: Source) -> None:
    """Refuse splits with different classes or another order of them: every score would be wrong.

    Raises:
        DataError: they differ; the message lists the classes that only one split has.
    """
    if train.classes == val.classes:
        return
    only = {
        "train": sorted(set(train.classes) - set(val.classes)),
        "val": sorted(set(val.classes) - set(train.classes)),
    }
    differences = "; ".join(f"only in {split}: {', '.join(names[:8])}" for split, names in only.items() if names)
    raise DataError(
        f"train and val have different classes ({train.where}, {val.where}): "
        f"{differences or 'same names, other order'}; give both the same classes, or set "
        "data.allow_missing_classes=true"
    )


_LABELS = 1 << 20  # labels counted at a time


def classes_without_samples(source: Source) -> list[str]:
    """Names of the classes that no sample has."""
    counts = np.zeros(len(source.classes) + 1, np.int64)  # the last one: labels that no class has
    for start in range(0, len(source), _LABELS):
        labels = np.minimum(source.labels[start : start + _LABELS], len(source.classes))
        counts += np.bincount(labels, minlength=len(counts))
    return [name for name, count in zip(source.classes, counts, strict=False) if not count]

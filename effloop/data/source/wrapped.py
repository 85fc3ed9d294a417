"""Sources around another source, and splits that don't all have every class."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from effloop.data.image.header import Encoded
from effloop.data.source.base import DataConfig, Fingerprint, Source, sources
from effloop.errors import DataError, EffLoopError


class Wrapped(Source):
    """The samples of another source; a subclass changes something about them.

    Args:
        source: whose samples these are.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self.classes = source.classes
        self.about = getattr(source, "about", None)

    @property
    def labels(self) -> NDArray[Any]:  # type: ignore[override]  # read when used: not every source has labels
        return self.source.labels

    @property
    def targets(self) -> NDArray[Any]:
        return self.source.targets

    def read(self, index: int) -> Encoded:
        return self.source.read(index)

    def raw_key(self, index: int) -> bytes:
        return self.source.raw_key(index)

    def size(self, index: int) -> int:
        return self.source.size(index)

    def empty_samples(self) -> NDArray[np.int64]:
        return self.source.empty_samples()

    def will_need(self, indices: Sequence[int]) -> None:
        self.source.will_need(indices)

    @property
    def where(self) -> str:
        return self.source.where

    def fingerprint(self) -> dict[str, Any]:
        return self.source.fingerprint()

    def identity(self) -> dict[str, Any]:
        return self.source.identity()

    def files(self) -> Iterable[bytes]:
        return self.source.files()

    @property
    def has_checksums(self) -> bool:
        return self.source.has_checksums

    def verify(self, index: int) -> None:
        self.source.verify(index)

    def verify_index(self) -> None:
        self.source.verify_index()


class Relabelled(Wrapped):
    """A source whose classes are some of a longer list, in any order; labels are the places in that list.

    Args:
        source: has classes.
        classes: all of its classes are among them.
    """

    def __init__(self, source: Source, classes: Sequence[str]) -> None:
        super().__init__(source)
        self.classes = tuple(classes)
        place = {name: number for number, name in enumerate(classes)}
        self._places = np.array([*(place[name] for name in source.classes), len(classes)])

    @cached_property
    def labels(self) -> NDArray[Any]:  # type: ignore[override]
        known = np.minimum(self.source.labels, len(self._places) - 1)  # a label without a class stays without
        labels: NDArray[Any] = self._places.astype(np.min_scalar_type(len(self.classes)))[known]
        return labels

    @property
    def targets(self) -> NDArray[Any]:
        return self.labels

    @cached_property
    def _fingerprint(self) -> dict[str, Any]:
        if np.array_equal(self._places[:-1], np.arange(len(self._places) - 1)):
            return self.source.fingerprint()
        return _fingerprint_of(self)

    def fingerprint(self) -> dict[str, Any]:
        return self._fingerprint

    def identity(self) -> dict[str, Any]:
        return {**self.source.identity(), **self.fingerprint()}

    def __reduce__(self) -> tuple[Any, ...]:
        return Relabelled, (self.source, self.classes)


class Without(Wrapped):
    """A source without some of its samples; the others move up.

    Args:
        source: whose samples these are.
        left_out: which not.
    """

    def __init__(self, source: Source, left_out: Sequence[int]) -> None:
        super().__init__(source)
        self.left_out = left_out
        self._ids = np.delete(np.arange(len(source)), left_out)

    @cached_property
    def labels(self) -> NDArray[Any]:  # type: ignore[override]
        labels: NDArray[Any] = self.source.labels[self._ids]
        return labels

    @property
    def targets(self) -> NDArray[Any]:
        targets: NDArray[Any] = self.source.targets[self._ids]
        return targets

    def read(self, index: int) -> Encoded:
        return self.source.read(int(self._ids[index]))

    def raw_key(self, index: int) -> bytes:
        return self.source.raw_key(int(self._ids[index]))

    def size(self, index: int) -> int:
        return self.source.size(int(self._ids[index]))

    def empty_samples(self) -> NDArray[np.int64]:
        return np.flatnonzero(np.isin(self._ids, self.source.empty_samples()))

    def will_need(self, indices: Sequence[int]) -> None:
        self.source.will_need(self._ids[np.asarray(indices)].tolist())

    def verify(self, index: int) -> None:
        self.source.verify(int(self._ids[index]))

    @cached_property
    def _fingerprint(self) -> dict[str, Any]:
        return _fingerprint_of(self)

    def fingerprint(self) -> dict[str, Any]:
        return self._fingerprint

    def identity(self) -> dict[str, Any]:
        return {**self.source.identity(), **self.fingerprint()}


def _fingerprint_of(source: Source) -> dict[str, Any]:
    """From the keys, labels and sizes of all samples."""
    fingerprint = Fingerprint()
    for index, label in enumerate(source.labels.tolist()):
        fingerprint.add(source.raw_key(index), label, source.size(index))
    return fingerprint.result()


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

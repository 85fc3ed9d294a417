"""What arrays of labels mean: classes, several labels a sample, or numbers; and what the classes are called."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from effloop.data.source.base import Kind
from effloop.data.source.formats.array_names import ArrayNames, ArraysConfig
from effloop.data.source.formats.stored_array import StoredArray
from effloop.data.source.storage.targets import CLASSES, Targets
from effloop.errors import DataError
from effloop.system.hardware import available_memory

_MOST_LABEL_BYTES = 1 << 34  # 2 * 10^9 integers; a header may claim any number of them
_ROW_BYTES = 16  # of memory for what a label becomes
_MOST_CLASSES = 1 << 20  # without names; see `indexed`
_MOST_NAME_BYTES = 1 << 28  # of texts of a fixed length


def flat(labels: StoredArray) -> NDArray[Any]:
    """(N,) or (N, K) values.

    Raises:
        DataError: they are no labels.
    """
    if math.prod(labels.shape[2:]) != 1 or not labels.shape or labels.dtype.names is not None:
        raise DataError(
            f"{labels.name} is {labels.dtype.name}, {labels.shape}; labels are read of shape (N,) or (N, K): "
            "set data.label=NAME"
        )
    if (size := math.prod(labels.shape) * labels.dtype.itemsize) > _MOST_LABEL_BYTES:
        raise DataError(
            f"{labels.name} is {labels.dtype.name}, {labels.shape}, {size / 1e9:,.0f} GB of labels, more than the "
            f"{_MOST_LABEL_BYTES / 1e9:.0f} that are read: set data.label=NAME"
        )
    needed, free = 2 * size + len(labels) * _ROW_BYTES, available_memory()
    if needed > free:
        raise DataError(
            f"{labels.name} is {labels.dtype.name}, {labels.shape}, which takes {needed / 1e9:,.1f} GB of memory, "
            f"{free / 1e9:,.1f} are free: set data.label=NAME, or make room"
        )
    values = labels.load()
    values = values.reshape(len(values), math.prod(labels.shape[1:]))
    values = values[:, 0] if values.shape[1] == 1 else values
    if values.dtype.kind in "SUO" and all(isinstance(value, str | bytes) for value in values.reshape(-1)):
        return np.array([_text(value) for value in values.reshape(-1)], object).reshape(values.shape)
    if values.dtype.kind not in "biuf":
        raise DataError(f"{labels.name} is {values.dtype.name}; labels are read as integers, numbers or text")
    return values


def stored_names(names: ArrayNames, open_array: Callable[[str], StoredArray]) -> list[list[str]]:
    """What may be the names of the classes: different texts beside the labels, such as `class_names`."""
    found: list[list[str]] = []
    for name in names.class_names():
        with suppress(DataError):  # of another kind, which isn't needed
            array = open_array(name)
            small = len(array) <= _MOST_CLASSES and len(array) * array.dtype.itemsize <= _MOST_NAME_BYTES
            values = flat(array) if len(array.shape) == 1 and small else np.empty(0)
            if values.dtype.kind == "O" and len({*values}) == len(values):
                found.append([*values])
    return found


def _text(value: Any) -> str:
    return value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else str(value)


@dataclass(frozen=True)
class Form:
    """What labels mean.

    Attributes:
        classes: names, in order.
        targets: what the targets are, where they aren't classes.
        places: the class of each text.
        name: of the array, for messages.
    """

    classes: Sequence[str]
    name: str
    targets: Targets = CLASSES
    places: dict[str, int] | None = None

    def take(self, values: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any] | None]:
        """(N,) labels, and (N, K) targets that aren't classes.

        Raises:
            DataError: a label isn't one of the classes.
        """
        if self.targets:
            return np.zeros(len(values), np.int64), values.reshape(len(values), -1).astype(self.targets.dtype)
        if self.places is not None:
            wrong = next((value for value in values if value not in self.places), None)
            if wrong is not None:
                raise DataError(f"{self.name} has the label '{wrong}', which data.classes doesn't name; add it")
            return np.array([self.places[value] for value in values], np.int64), None
        labels = (values.argmax(1) if values.ndim == 2 else values).astype(np.int64)
        if len(labels) and labels.min() < 0:
            raise DataError(f"{self.name} has the label {labels.min()}; allowed are 0 to {len(self.classes) - 1}")
        return labels, None


def form_of(
    labels: Sequence[NDArray[Any]], config: ArraysConfig, name: str, stored: Sequence[Sequence[str]] = ()
) -> Form:
    """What the labels of all splits mean.

    Args:
        labels: as `flat` gives them.
        config: of the source.
        name: of the array, for messages.
        stored: what may be the names of the classes, as of `stored_names`.

    Raises:
        DataError: they can't be told.
    """
    columns = {values.shape[1] if values.ndim == 2 else 1 for values in labels}
    text = {values.dtype.kind == "O" for values in labels}
    if len(columns) > 1 or len(text) > 1:
        raise DataError(f"{name} and the labels of other splits have different shapes or types; give them the same")
    width = columns.pop()
    names: Sequence[str]
    if text.pop():
        if width > 1:
            raise DataError(f"{name} has {width} texts a sample; one class each is read: set data.label=NAME")
        found = {value for values in labels for value in values}
        names = config.classes or next((each for each in stored if found <= {*each}), sorted(found))
        return Form(names, name, places={each: place for place, each in enumerate(names)})
    if width == 1:
        if any(
            not np.isfinite(values).all() or (values != np.floor(values)).any()
            for values in labels
            if values.dtype.kind == "f"
        ):
            return Form((), name, Targets(Kind.numbers, (name.rpartition("/")[2].rpartition(":")[2],)))
        largest = max((int(values.max()) for values in labels if len(values)), default=0)
        if largest >= _MOST_CLASSES:
            raise DataError(f"{name} has the label {largest:,}; {_MOST_CLASSES - 1:,} is the largest of a class")
        together = sum(map(len, labels))
        of_samples = {*map(len, labels), together} - {largest + 1}  # as many texts are names of files
        stored = [each for each in stored if len(each) not in of_samples]
        return Form(_class_names(config, largest + 1, name, stored), name)
    if all(((values == 0) | (values == 1)).all() for values in labels):
        names = _class_names(config, width, name, [each for each in stored if len(each) == width])
        one_hot = all((values.sum(1, dtype=np.int64) == 1).all() for values in labels)
        if one_hot:
            return Form(names, name)
        if len(names) > width:
            raise DataError(f"{name} has {width} columns, but data.classes names {len(names)}; name as many")
        return Form(names, name, Targets(Kind.flags, tuple(names)))
    return Form((), name, Targets(Kind.numbers, tuple(str(number) for number in range(width))))


def _class_names(config: ArraysConfig, count: int, name: str, stored: Sequence[Sequence[str]]) -> Sequence[str]:
    """The names of so many classes or more: of several in the data, the shortest list that has enough."""
    if config.classes is None:
        enough = [each for each in stored if len(each) >= count]
        return min(enough, key=len, default=[str(number) for number in range(count)])
    if len(config.classes) < count:
        raise DataError(
            f"{name} has the label {count - 1}, but data.classes names {len(config.classes)}; add the missing names"
        )
    return config.classes

"""Samples from an array of images and one of labels."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from effloop.data.source.base import Kind
from effloop.data.source.formats.array_names import ArrayNames, ArraysConfig
from effloop.data.source.storage.imported import ORIGINAL, RAW, Contents, raw_image
from effloop.data.source.storage.targets import CLASSES, Targets
from effloop.data.source.storage.writing import Record
from effloop.errors import DataError

_BLOCK_BYTES = 16 << 20  # of images in memory at a time, or one chunk
_ENCODED_BYTES = 1 << 15  # of an encoded image, where only reading it tells
_ENCODED_ROWS = 256
_MOST_LABEL_BYTES = 1 << 34  # 2 * 10^9 integers; a header may claim any number of them
_MOST_CLASSES = 1 << 20  # without names; see `indexed`


class StoredArray(ABC):
    """An array in a file, read from its beginning to its end.

    Attributes:
        name: file and name, for messages.
        shape: its shape.
        dtype: its dtype; of objects, where rows are encoded images or text.
        chunk_rows: how many rows are stored together.
        num_bytes: of encoded images together, if that is known.
        about: how encoded images are encoded, as of `Contents`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    chunk_rows: int = 1
    num_bytes: int | None = None
    about: Mapping[str, Any] = ORIGINAL

    @abstractmethod
    def blocks(self, rows: int) -> Iterator[NDArray[Any]]:
        """All rows, so many at a time.

        Raises:
            DataError: they can't be read; the message has the file.
        """

    def load(self) -> NDArray[Any]:
        """All of it."""
        blocks = [*self.blocks(max(1, len(self) and -(-len(self) // self.chunk_rows) * self.chunk_rows))]
        return np.concatenate(blocks) if blocks else np.empty(self.shape, self.dtype)

    def __len__(self) -> int:
        return self.shape[0] if self.shape else 0


def contents_of(
    names: ArrayNames, split: str, config: ArraysConfig, open_array: Callable[[str], StoredArray]
) -> Contents:
    """What is to be copied of a split.

    Args:
        names: of all arrays.
        split: the split.
        config: of the source.
        open_array: an array by its name.

    Raises:
        DataError: images or labels of a dtype or shape that can't be taken.
        NoSplitError: there is no such split.
    """
    image, label = names.pair(split)
    images, labels = open_array(image), open_array(label)
    read = _reader(images)
    if len(images) != len(labels):
        raise DataError(
            f"{images.name} has {len(images):,} images, {labels.name} {len(labels):,} labels; correct either"
        )
    own = _flat(labels)
    form = _form([(own if name == label else _flat(open_array(name))) for name in names.labels()], config, labels.name)
    learned = form.take(own)
    return Contents(
        _records(read, learned, len(images)), len(images), read.num_bytes, form.classes, form.targets, read.about
    )


def _records(read: _Reader, learned: tuple[NDArray[Any], NDArray[Any] | None], count: int) -> Iterator[Record]:
    labels, targets = learned
    number = 0
    for data in read():
        target = b"" if targets is None else targets[number].tobytes()
        yield Record(b"%08d" % number, int(labels[number]), data, target)
        number += 1
    assert number == count


class _Reader:
    """Reads an array of images: `num_bytes` are those of all images, `about` is how they are encoded."""

    def __init__(self, images: StoredArray, encode: Callable[[Any], bytes], num_bytes: int, rows: int) -> None:
        self.images, self.encode, self.num_bytes, self.rows = images, encode, num_bytes, rows
        self.about = RAW if images.dtype == np.uint8 else images.about

    def __call__(self) -> Iterator[bytes]:
        for block in self.images.blocks(self.rows):
            yield from map(self.encode, block)


def _reader(images: StoredArray) -> _Reader:
    """How an array of images is read, by its dtype and shape.

    Raises:
        DataError: they are no images; the message says what is read.
    """
    shape, dtype = images.shape, images.dtype
    if dtype.kind in "OSV" and len(shape) == 1 and dtype.names is None:
        size = dtype.itemsize if dtype.kind in "SV" else _ENCODED_BYTES
        total = len(images) * size if images.num_bytes is None else images.num_bytes
        return _Reader(images, _encoded, total, _rows(images, _ENCODED_ROWS))
    sizes = f"{images.name} is {dtype.name}, {shape}"
    if dtype != np.uint8:
        fix = "write them anew as uint8, e.g. (255 * images).round().astype('uint8') if they are from 0 to 1"
        raise DataError(f"{sizes}; images are read as uint8 from 0 to 255: {fix}")
    if len(shape) == 4 and shape[3] not in (1, 3) and shape[1] in (1, 3):
        first = True
    elif len(shape) == 3 or (len(shape) == 4 and shape[3] in (1, 3)):
        first = False
    else:
        raise DataError(f"{sizes}; images are read of shape (N, H, W), (N, H, W, 3) or (N, 3, H, W): reshape them")
    if 0 in shape[1:]:
        raise DataError(f"{sizes}: its images have no pixels; leave it out")
    row = math.prod(shape[1:])
    encode = _channels_first if first else raw_image
    return _Reader(images, encode, len(images) * (row + 16), _rows(images, max(1, _BLOCK_BYTES // row)))


def _rows(images: StoredArray, wanted: int) -> int:
    """Rows to read at a time: of whole chunks."""
    return max(1, wanted // images.chunk_rows) * images.chunk_rows


def _channels_first(image: NDArray[np.uint8]) -> bytes:
    return raw_image(np.ascontiguousarray(np.moveaxis(image, 0, 2)))


def _encoded(image: Any) -> bytes:
    if isinstance(image, np.ndarray):
        return image.astype(np.uint8, copy=False).tobytes()
    if isinstance(image, np.void):
        return image.tobytes().rstrip(b"\0")
    return image.encode("latin-1", "replace") if isinstance(image, str) else bytes(image)


def _flat(labels: StoredArray) -> NDArray[Any]:
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
    values = labels.load()
    values = values.reshape(len(values), math.prod(labels.shape[1:]))
    values = values[:, 0] if values.shape[1] == 1 else values
    if values.dtype.kind in "SUO" and all(isinstance(value, str | bytes) for value in values.reshape(-1)):
        return np.array([_text(value) for value in values.reshape(-1)], object).reshape(values.shape)
    if values.dtype.kind not in "biuf":
        raise DataError(f"{labels.name} is {values.dtype.name}; labels are read as integers, numbers or text")
    return values


def _text(value: Any) -> str:
    return value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else str(value)


@dataclass(frozen=True)
class _Form:
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


def _form(labels: Sequence[NDArray[Any]], config: ArraysConfig, name: str) -> _Form:
    """What the labels of all splits mean.

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
        names = config.classes or sorted({value for values in labels for value in values})
        return _Form(names, name, places={each: place for place, each in enumerate(names)})
    if width == 1:
        if any(
            not np.isfinite(values).all() or (values != np.floor(values)).any()
            for values in labels
            if values.dtype.kind == "f"
        ):
            return _Form((), name, Targets(Kind.numbers, (name.rpartition("/")[2].rpartition(":")[2],)))
        largest = max((int(values.max()) for values in labels if len(values)), default=0)
        if largest >= _MOST_CLASSES:
            raise DataError(f"{name} has the label {largest:,}; {_MOST_CLASSES - 1:,} is the largest of a class")
        return _Form(_class_names(config, largest + 1, name), name)
    if all(((values == 0) | (values == 1)).all() for values in labels):
        names = _class_names(config, width, name)
        one_hot = all((values.sum(1, dtype=np.int64) == 1).all() for values in labels)
        return _Form(names, name) if one_hot else _Form(names, name, Targets(Kind.flags, tuple(names)))
    return _Form((), name, Targets(Kind.numbers, tuple(str(number) for number in range(width))))


def _class_names(config: ArraysConfig, count: int, name: str) -> Sequence[str]:
    if config.classes is None:
        return [str(number) for number in range(count)]
    if len(config.classes) < count:
        raise DataError(
            f"{name} has the label {count - 1}, but data.classes names {len(config.classes)}; add the missing names"
        )
    return config.classes

"""Arrays of images and labels in files of other programs, copied once: which they are, what labels mean, and how they
are read, from their beginning to their end.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from rich.filesize import decimal

from effloop.data.source import vocabulary
from effloop.data.source.base import Kind, NoSplitError
from effloop.data.source.root import expand_root
from effloop.data.source.storage.imported import ORIGINAL, RAW, Contents, ImportedSource, raw_image
from effloop.data.source.storage.packed import PackedConfig
from effloop.data.source.storage.targets import CLASSES, Targets
from effloop.data.source.storage.writing import Record
from effloop.errors import ConfigError, DataError
from effloop.system.hardware import available_memory

_LISTED = 16


@dataclass
class ArraysConfig(PackedConfig):
    """Fields of every source of named arrays.

    Attributes:
        image: name of the arrays of images, such as images; null: images, x, data and the like.
        label: name of the arrays of labels, such as labels; null: labels, y, targets and the like.
        classes: names of the classes, in the order of their labels; null: numbers, or the labels themselves.
    """

    image: str | None = None
    label: str | None = None
    classes: list[str] | None = None


@dataclass(frozen=True)
class StoredArray:
    """An array in a file, read from its beginning to its end."""

    name: str  # file and name, for messages
    shape: tuple[int, ...]
    dtype: np.dtype[Any]  # of objects, where rows are encoded images or text
    blocks: Callable[[int], Iterator[NDArray[Any]]]  # all rows, so many at a time; DataError if they can't be read
    chunk_rows: int = 1  # that are stored together
    num_bytes: int | None = None  # of encoded images together, if that is known
    about: Mapping[str, Any] = field(default_factory=lambda: ORIGINAL)  # how these are encoded, as of `Contents`

    def load(self) -> NDArray[Any]:
        """All of it."""
        blocks = [*self.blocks(max(1, len(self) and -(-len(self) // self.chunk_rows) * self.chunk_rows))]
        return np.concatenate(blocks) if blocks else np.empty(self.shape, self.dtype)

    def __len__(self) -> int:
        return self.shape[0] if self.shape else 0


def sliced(name: str, values: Any, **options: Any) -> StoredArray:
    """What has a shape, a dtype and slices, in memory or mapped."""

    def blocks(rows: int) -> Iterator[NDArray[Any]]:
        return (values[start : start + rows] for start in range(0, len(values), rows))

    return StoredArray(name, tuple(values.shape), values.dtype, blocks, **options)


# Which of several named arrays are the images and the labels of a split.


class ArrayNames:
    """The names of all arrays in the dataset `where`; `train/images`, `x_train` or `train.h5/images` say what they
    are. What is in front of the last `/` names no role.
    """

    def __init__(self, names: Sequence[str], where: str, config: ArraysConfig) -> None:
        self.names, self.where, self.config = names, where, config

    def pair(self, split: str) -> tuple[str, str]:
        """The arrays of images and of labels of a split; a DataError if it isn't known which these are."""
        found = [name for name in self.names if vocabulary.is_of_split(name, split)]
        images = _chosen(found, self.config.image, vocabulary.IMAGE_WORDS)
        if not images and (all_images := _chosen(self.names, self.config.image, vocabulary.IMAGE_WORDS)):
            splits = ("_".join(dict.fromkeys(vocabulary.split_of(name))) for name in all_images)
            there = ", ".join(dict.fromkeys(filter(None, splits))) or "none"
            raise NoSplitError(
                f"{self.where} has no split '{split}'; it has {there}: set data.train_split or data.val_split"
            )
        return self._one(images, "images", "image"), self._one(self.labels(found), "labels", "label")

    def labels(self, names: Sequence[str] | None = None) -> list[str]:
        """Those of these arrays, or of all, that have labels: what is called `classes` only where nothing else is."""
        found = _chosen(self.names if names is None else names, self.config.label, vocabulary.LABEL_WORDS)
        return [name for name in found if _own_words(name) != {"classes"}] or found

    def _one(self, found: Sequence[str], what: str, key: str) -> str:
        if len(found) == 1:
            return found[0]
        there = found or self.names
        listed = ", ".join(there[:_LISTED]) + (f" and {len(there) - _LISTED:,} more" * (len(there) > _LISTED))
        named = getattr(self.config, key)
        missing = f"no array '{named}'; it has" if named else f"no array that looks like {what}; it has"
        got = f"several arrays that may be {what}," if found else missing
        raise DataError(f"{self.where} has {got} {listed or 'none'}: set data.{key}=NAME")


def _own_words(name: str) -> set[str]:
    return {*vocabulary.words(name.rpartition("/")[2])}


def _chosen(names: Sequence[str], wanted: str | None, role: frozenset[str]) -> list[str]:
    """The arrays with a given name, or else of a role."""
    own, whole = {name: _own_words(name) for name in names}, {name: {*vocabulary.words(name)} for name in names}
    if wanted is None:
        of_role = [name for name, has in own.items() if has & role and not has & vocabulary.OTHER_WORDS]
        return of_role or [name for name in names if whole[name] & role and own[name] <= vocabulary.SPLIT_WORDS]
    asked = {*vocabulary.words(wanted)} - vocabulary.SPLIT_WORDS
    tiers = (
        [name for name in names if name == wanted],
        [name for name in names if own[name] - vocabulary.SPLIT_WORDS == asked],
        [name for name in names if asked and asked <= whole[name]],
    )
    return next(filter(None, tiers), [])


def has_split(name: str) -> bool:
    """Whether a file or folder has the name of a usual split in its own."""
    return bool({*vocabulary.words(name)} & vocabulary.SPLIT_WORDS)


# What labels mean: classes, several of them a sample, or numbers.

_ROW_BYTES = 16  # of memory for what a label becomes
_MOST_CLASSES, _MOST_FLAGS = 1 << 20, 1 << 14  # without names; see `indexed` and `tables`


def flat(labels: StoredArray) -> NDArray[Any]:
    """(N,) or (N, K) values; a DataError if they are no labels."""
    if math.prod(labels.shape[2:]) != 1 or not labels.shape or labels.dtype.names is not None:
        raise DataError(
            f"{labels.name} is {labels.dtype.name}, {labels.shape}; labels are read of shape (N,) or (N, K): "
            "set data.label=NAME"
        )
    size = math.prod(labels.shape) * labels.dtype.itemsize  # a header may claim any
    if 2 * size + _ROW_BYTES * len(labels) > (free := available_memory()):
        raise DataError(
            f"{labels.name} is {labels.dtype.name}, {labels.shape}: {decimal(size)}, too many for the memory, of which "
            f"{decimal(free)} are free; set data.label=NAME, or make room"
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
class Learned:
    """What labels mean."""

    classes: Sequence[str]  # names, in order
    name: str  # of the array or column, for messages
    targets: Targets = CLASSES  # what they are, where they aren't classes
    places: Mapping[str, int] | None = None  # the class of each text; None where labels are numbers

    def take(self, values: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any] | None]:
        """(N,) labels, and (N, K) targets that aren't classes; a DataError if a label isn't one of the classes."""
        if self.targets and values.dtype.kind == "O":
            targets = np.zeros((len(values), len(self.classes)), np.uint8)
            for row, each in zip(targets, values, strict=True):
                row[self._places(each)] = 1
            return np.zeros(len(values), np.int64), targets
        if self.targets:
            return np.zeros(len(values), np.int64), values.reshape(len(values), -1).astype(self.targets.dtype)
        return self._places(values.argmax(1) if values.ndim == 2 else values), None

    def _places(self, labels: Sequence[Any] | NDArray[Any]) -> NDArray[np.int64]:
        if self.places is not None:
            wrong = next((label for label in labels if label not in self.places), None)
            if wrong is not None:
                raise DataError(f"{self.name} has the label '{_text(wrong)[:80]}', which isn't named; add it")
            return np.array([self.places[label] for label in labels], np.int64)
        found = np.array(labels, np.int64)
        for wrong in (found.min(initial=0), found.max(initial=0)):
            if not 0 <= wrong < max(1, len(self.classes)):
                raise DataError(f"{self.name} has the label {wrong}; allowed are 0 to {len(self.classes) - 1}")
        return found


def infer_targets(
    labels: Sequence[NDArray[Any]],
    name: str,
    names: Sequence[str] | None = None,
    said: Targets = CLASSES,
    *,
    typed: bool = False,
) -> Learned:
    """What the labels of all splits mean.

    Args:
        labels: of each split: (N,) or (N, K) integers, floats or text, or (N,) lists of a sample's classes, as objects.
        name: of the array or column, for messages.
        names: of the classes, if these are given.
        said: what a file says that the targets are.
        typed: floats are numbers, and whole numbers classes, whatever their values.
    """
    labels = [values for values in labels if len(values)] or labels[:1]
    shapes = {(each.dtype.kind == "O", each.shape[1:], isinstance(next(iter(each), None), list)) for each in labels}
    if len(shapes) > 1:
        raise DataError(f"{name} and the labels of other splits have different shapes or types; give them the same")
    [(is_object, shape, _)] = shapes
    if is_object and shape:
        raise DataError(f"{name} has {shape[0]} texts a sample; one class each is read: set data.label=NAME")
    names = names or said.classes or None
    found = _infer_objects(labels, name, names) if is_object else _infer_numbers(labels, name, names, said, typed)
    if said and (found.targets.kind is not said.kind or len(found.targets.names) != len(said.names)):
        raise DataError(f"{name} doesn't hold {said.kind.value} of {len(said.names):,} names, as targets.json says")
    return found


def _infer_objects(labels: Sequence[NDArray[Any]], name: str, names: Sequence[str] | None) -> Learned:
    rows = [*chain.from_iterable(labels)]
    lists = any(not isinstance(row, str) for row in rows)
    types = {type(each) for each in (chain.from_iterable(rows) if lists else rows)}
    if len(types) > 1 or types - {str, int}:
        raise DataError(f"{name} has lists with other than texts alone or whole numbers alone; correct them")
    found, numbers = {*chain.from_iterable(rows)} if lists else {*rows}, types == {int}
    texts = names or ([] if numbers else sorted(found))
    if numbers and not texts and 1 < max(found) < _MOST_FLAGS:  # below they may be flags
        texts = [*map(str, range(max(found) + 1))]
    if lists and not texts:
        raise DataError(
            f"{name} has lists of numbers without names; name the classes in a targets.json beside it: "
            '{"kind": "flags", "names": ["name of 0", ...]}'
        )
    targets = Targets(Kind.flags, tuple(texts)) if lists else CLASSES
    return Learned(texts, name, targets, None if numbers else {each: place for place, each in enumerate(texts)})


def _infer_numbers(
    labels: Sequence[NDArray[Any]], name: str, names: Sequence[str] | None, said: Targets, typed: bool
) -> Learned:
    width = labels[0].shape[1] if labels[0].ndim == 2 else 1
    is_float = any(values.dtype.kind == "f" for values in labels)
    if said.kind is Kind.numbers or (typed and is_float):
        own = (name,) if width == 1 else tuple(f"{name}{place}" for place in range(width))
        return Learned((), name, said or Targets(Kind.numbers, own))
    if width == 1:
        if is_float and any((values != np.floor(values)).any() or not np.isfinite(values).all() for values in labels):
            return Learned((), name, Targets(Kind.numbers, (name.rpartition("/")[2].rpartition(":")[2],)))
        largest = max((int(values.max()) for values in labels if len(values)), default=0)
        if largest >= _MOST_CLASSES:
            raise DataError(f"{name} has the label {largest:,}; {_MOST_CLASSES - 1:,} is the largest of a class")
        return Learned(_class_names(names, largest + 1, name), name)
    if all(((values == 0) | (values == 1)).all() for values in labels):
        classes = _class_names(names, width, name)
        if all((values.sum(1, dtype=np.int64) == 1).all() for values in labels):  # one-hot
            return Learned(classes, name)
        if len(classes) > width:
            raise DataError(f"{name} has {width} columns, but {len(classes)} classes are named; name as many")
        return Learned(classes, name, Targets(Kind.flags, tuple(classes)))
    return Learned((), name, Targets(Kind.numbers, tuple(str(number) for number in range(width))))


def _class_names(names: Sequence[str] | None, count: int, name: str) -> Sequence[str]:
    """The names of so many classes or more."""
    if names is not None and len(names) < count:
        raise DataError(f"{name} has the label {count - 1}, but {len(names)} classes are named; add the missing names")
    return names or [*map(str, range(count))]


# Samples from an array of images and one of labels.

_BLOCK_BYTES = 16 << 20  # of images in memory at a time, or one chunk
_ENCODED_BYTES = 1 << 15  # of an encoded image, where only reading it tells
_ENCODED_ROWS = 256


def contents_of(names: ArrayNames, split: str, config: ArraysConfig, reader: Callable[[str], StoredArray]) -> Contents:
    """What is to be copied of a split; a DataError if images or labels have a dtype or shape that can't be taken."""
    image, label = names.pair(split)
    images, labels = reader(image), reader(label)
    encode, num_bytes, rows = _encoding(images)
    if len(images) != len(labels):
        raise DataError(
            f"{images.name} has {len(images):,} images, {labels.name} {len(labels):,} labels; correct either"
        )
    own = flat(labels)
    of_all = [(own if name == label else flat(reader(name))) for name in names.labels()]
    form = infer_targets(of_all, labels.name, config.classes)
    classes, targets = form.take(own)

    def records() -> Iterator[Record]:
        for number, data in enumerate(map(encode, chain.from_iterable(images.blocks(rows)))):
            target = b"" if targets is None else targets[number].tobytes()
            yield Record(b"%08d" % number, int(classes[number]), data, target)

    about = RAW if images.dtype == np.uint8 else images.about
    return Contents(records(), len(images), num_bytes, form.classes, form.targets, about)


def _encoding(images: StoredArray) -> tuple[Callable[[Any], bytes], int, int]:
    """What makes a sample's bytes of a row, the bytes of all, and how many rows to read at a time."""
    shape, dtype, chunk = images.shape, images.dtype, images.chunk_rows
    if dtype.kind == "O" and len(shape) == 1:
        total = len(images) * _ENCODED_BYTES if images.num_bytes is None else images.num_bytes
        return _encoded, total, max(1, _ENCODED_ROWS // chunk) * chunk
    sizes = f"{images.name} is {dtype.name}, {shape}"
    if dtype != np.uint8:
        fix = "write them anew as uint8, e.g. (255 * images).round().astype('uint8') if they are from 0 to 1"
        raise DataError(f"{sizes}; images are read as uint8 from 0 to 255: {fix}")
    channels_first = len(shape) == 4 and shape[3] not in (1, 3) and shape[1] in (1, 3)
    if not channels_first and len(shape) != 3 and not (len(shape) == 4 and shape[3] in (1, 3)):
        raise DataError(f"{sizes}; images are read of shape (N, H, W), (N, H, W, 3) or (N, 3, H, W): reshape them")
    if 0 in shape[1:]:
        raise DataError(f"{sizes}: its images have no pixels; leave it out")
    row = math.prod(shape[1:])
    rows = max(1, _BLOCK_BYTES // row // chunk) * chunk
    return _planes if channels_first else raw_image, len(images) * (row + 16), rows


def _planes(image: NDArray[np.uint8]) -> bytes:
    return raw_image(np.ascontiguousarray(np.moveaxis(image, 0, 2)))


def _encoded(image: Any) -> bytes:
    return image.encode() if isinstance(image, str) else bytes(image)  # vlen uint8 are arrays


class ArraysSource(ImportedSource):
    """Arrays in a file, or in the files of a folder; a format lists those of one file."""

    config: ArraysConfig
    endings: ClassVar[tuple[str, ...]]  # of the names of its files, in a folder
    wanted: ClassVar[str]  # what such a folder has, for messages

    @classmethod
    @abstractmethod
    def is_one(cls, path: Path) -> bool:
        """Whether a file is in this format."""

    @abstractmethod
    def arrays_of(self, path: Path) -> Mapping[str, Callable[[], StoredArray]]:
        """What opens the arrays of a file, by their names; the empty one is that of the file."""

    @classmethod
    def files_of(cls, folder: Path) -> list[Path]:
        """The files of this format in a folder, sorted."""
        return sorted(file for file in folder.iterdir() if file.suffix in cls.endings and cls.is_one(file))

    @classmethod
    def claims(cls, root: Path) -> bool:
        """A file, or a folder of some of which one has a split in its name, if no folder has."""
        if not root.is_dir():
            return cls.is_one(root)
        named = any(has_split(file.stem) for file in cls.files_of(root))
        return named and not any((root / split).is_dir() for split in vocabulary.SPLIT_WORDS)

    def originals(self) -> Sequence[Path]:
        root = expand_root(self.config)
        if found := [root] if root.is_file() else self.files_of(root):
            return found
        raise ConfigError(f"data.root: '{self.config.root}' has no {self.wanted}; set data.root=PATH")

    def contents(self, files: Sequence[Path]) -> Contents:
        arrays: dict[str, Callable[[], StoredArray]] = {}
        for path in files:
            before = "" if len(files) == 1 else f"{path.name}/"
            arrays |= {(before + name if name else path.stem): each for name, each in self.arrays_of(path).items()}
        names = ArrayNames([*arrays], str(self.config.root), self.config)
        return contents_of(names, self.split, self.config, lambda name: arrays[name]())

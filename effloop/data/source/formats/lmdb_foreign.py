"""LMDB environments that other programs wrote: all samples, to be copied once.

A value is (image, label), or a dict of both, by pickle, as folder2lmdb writes it, or an image whose label is in a file
or in its key (`CLASS/NAME.jpg`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from effloop.data.image.header import read_header
from effloop.data.source.base import printable
from effloop.data.source.formats.lmdb_pages import Tree, Value
from effloop.data.source.formats.pickles import Array, unpickle
from effloop.data.source.storage.imported import ORIGINAL, RAW, raw_image
from effloop.data.source.storage.targets import Targets, row_of
from effloop.data.source.storage.writing import Record
from effloop.data.source.tables import encoded, open_table, shown
from effloop.data.source.vocabulary import IMAGE_KEYS, IMAGE_PATH, LABEL, LABEL_KEYS
from effloop.errors import ConfigError, DataError

_NOT_SAMPLES = frozenset({b"length", b"num-samples", b"num_samples", b"classes"})
"""Keys of what describes an environment, as those between two underscores do."""

_SIGNATURES = (b"\xff\xd8", b"\x89PNG", b"RIFF", b"BM", b"GIF8")


class Foreign:
    """The samples of an environment.

    Args:
        tree: of the environment.
        names: of the classes, in the order of their labels, as `data.classes` gives them.
        labels: a file with labels, where the environment has none.

    Attributes:
        count: how many they are.
        num_bytes: of their values together.
        about: how the images are encoded, as of `Contents`.
        classes: names; None where labels are numbers without names.

    Raises:
        ConfigError: there is no such file of labels.
        DataError: no samples, or values that aren't read.
    """

    def __init__(self, tree: Tree, names: Sequence[str] | None, labels: Path | None) -> None:
        self._tree, self._names = tree, names
        self.count = self.num_bytes = 0
        self._lengths = set[int]()  # of keys that are numbers; 0 where one is none
        for value in self._samples(None):
            self.count, self.num_bytes = self.count + 1, self.num_bytes + value.size
            self._lengths.add(len(value.key) if value.key.isdigit() else 0)
        if not self.count:
            raise DataError(
                f"{tree.path} has no samples in its main database, which alone is read (no named one); write them there"
            )
        first = next(self._in_order())
        self._alone = _is_image(self._data(first))
        self._raw = not self._alone and not isinstance(self._pair(first)[0], bytes)
        self.about = RAW if self._raw else ORIGINAL
        self._label_of: Callable[[bytes, Any], Any] = lambda _, label: label
        self.classes: list[str] | None = None if names is None else [*names]
        if labels is not None:
            of_file = LabelFile(labels, lambda key: tree.find(key) is not None, names)
            self._label_of, self.classes = lambda key, _: of_file[key], self.classes or of_file.classes
        elif self._alone:
            folders = self._folders()
            places = {folder: place for place, folder in enumerate(folders)}
            self._label_of, self.classes = lambda key, _: places[_folder(key)], [*map(printable, folders)]

    def _samples(self, length: int | None) -> Iterator[Value]:
        """The values that are samples, with keys of this length, in LMDB's order."""
        for value in self._tree:
            is_other = (value.key[:2] == b"__" and value.key[-2:] == b"__") or value.key in _NOT_SAMPLES
            if not is_other and length in (None, len(value.key)):
                yield value

    def _in_order(self) -> Iterator[Value]:
        """All samples; numbers for keys in the order of the numbers: LMDB has `10` before `9`."""
        return chain.from_iterable(map(self._samples, [None] if 0 in self._lengths else sorted(self._lengths)))

    def records(self, targets: Targets) -> Iterator[Record]:
        """All samples, those with numbers for keys in the order of the numbers.

        Raises:
            DataError: a value can't be read; the message has file and key.
        """
        self._check_count()
        places = {name: place for place, name in enumerate(self._names or ())}
        for value in self._in_order():
            image, label = self._pair(value)
            if isinstance(image, bytes) == self._raw:
                raise self._wrong(value, "isn't stored as the first one is; write the environment again, all alike")
            try:
                learned = _learned(self._label_of(value.key, label), targets, places)
                yield Record(value.key, learned[0], _encoded(image), learned[1])
            except DataError as error:
                raise self._wrong(value, str(error)) from None

    def labels_end(self) -> int:
        """One more than the largest label; raises as `records`."""
        return 1 + max(record.label for record in self.records(Targets()))

    def _pair(self, value: Value) -> tuple[bytes | NDArray[Any], Any]:
        """Image and label of a value."""
        data = self._data(value)
        if self._alone:
            return data, None  # whether it is an image is checked as in all formats
        if data[:1] not in (b"\x80", b"(", b"]", b"}"):
            raise self._wrong(value, "is no image and no pickle of (image, label); write it as one")
        try:
            return _pair_of(unpickle(data))
        except DataError as error:
            raise self._wrong(value, str(error)) from None

    def _data(self, value: Value) -> bytes:
        return self._tree.data[value.offset : value.offset + value.size]

    def _folders(self) -> list[bytes]:
        """The folders in keys, in the order of their labels."""
        found = {_folder(value.key) for value in self._samples(None)}
        if b"" in found:
            raise DataError(
                f"{self._tree.path} holds images without labels: set data=lmdb data.labels=FILE, with a row for each: "
                "key, label"
            )
        order = [os.fsencode(name) for name in self._names or ()]
        if order and (missing := found - {*order}):
            raise DataError(
                f"{self._tree.path} has the class '{printable(min(missing))}', which data.classes doesn't name; add it"
            )
        return order or sorted(found)

    def _check_count(self) -> None:
        value = self._tree.find(b"__len__")
        if value is None:
            return
        data = self._data(value)
        try:
            said = int(data) if len(data) < 20 and data.isdigit() else unpickle(data)
        except DataError as error:
            raise self._wrong(value, str(error)) from None
        if type(said) is int and said != self.count:
            raise DataError(
                f"{self._tree.path} says {said:,} samples in __len__, it holds {self.count:,}; write it again"
            )

    def _wrong(self, value: Value, what: str) -> DataError:
        return DataError(f"{self._tree.path}: the value of '{printable(value.key[:200])}' {what}")


class LabelFile:
    """Name -> label, from CSV, TSV, JSON lines, parquet, or lines `NAME LABEL`.

    Labels that are all whole numbers are classes' numbers; otherwise they are classes' names, which are sorted.

    Args:
        path: of the file.
        is_name: whether a text is the name of a sample, as in a first row that has no columns' names.
        names: of the classes, in order, where `data.classes` gives them.

    Attributes:
        classes: their names; None where labels are numbers.

    Raises:
        ConfigError: there is no such file.
        DataError: it can't be read.
    """

    def __init__(self, path: Path, is_name: Callable[[bytes], bool], names: Sequence[str] | None = None) -> None:
        self._path = path
        if not path.is_file():
            raise ConfigError(
                f"data.labels: '{path}' is not there; set data.labels=FILE (a column, of other formats, is data.label)"
            )

        def is_data(fields: Sequence[str]) -> bool:
            return is_name(encoded(fields[0].strip())) or (len(fields) == 1 and len(fields[0].split()) == 2)

        table = open_table(path, is_data)
        lower = [name.lower() for name in table.columns]
        name = next((lower.index(usual) for usual in IMAGE_PATH if usual in lower), 0)
        label = next((lower.index(usual) for usual in LABEL if usual in lower and lower.index(usual) != name), None)
        label = int(name == 0) if label is None else label
        several = len(lower) > 1
        found: dict[bytes, str] = {}
        for number, row in table.rows([name, label] if several else [0]):
            fields = [*row] if several else row[0].rsplit(None, 1)
            if len(fields) != 2 or not fields[1].strip():
                raise DataError(f"{table.at(number)}: no name and label; write both in each row")
            text = fields[1].strip()
            if found.setdefault(encoded(fields[0].strip()), text) != text:
                raise DataError(f"{table.at(number)}: '{shown(fields[0])}' comes twice, with another label; remove one")
        texts = set(found.values())
        numbers = all(text.isascii() and text.isdigit() and len(text) < 10 for text in texts)
        self.classes = None if numbers else [*(names or sorted(texts))]
        places = {text: int(text) if numbers else place for place, text in enumerate(self.classes or texts)}
        if missing := texts - places.keys():
            raise DataError(f"{path} has the class '{shown(min(missing))}', which data.classes doesn't name; add it")
        self._labels = {key: places[text] for key, text in found.items()}

    def __getitem__(self, key: bytes) -> int:
        """The label of a sample, by its key, or by its key without an extension.

        Raises:
            DataError: there is none; the message has the key.
        """
        label = self._labels.get(key, self._labels.get(os.path.splitext(key)[0]))
        if label is None:
            raise DataError(f"{self._path} has no label for '{printable(key)}'; add a row for each sample")
        return label


def _folder(key: bytes) -> bytes:
    """The class in a key like `train/CLASS/NAME.jpg`; empty without a folder."""
    return key.rpartition(b"/")[0].rpartition(b"/")[2]


def _pair_of(found: Any) -> tuple[bytes | NDArray[Any], Any]:
    """Image and label; the image may be a list of one, as a `DataLoader` gives it."""
    if isinstance(found, dict):
        keys = {(key.decode("latin-1") if isinstance(key, bytes) else str(key)).lower(): key for key in found}
        names = [next((keys[usual] for usual in usuals if usual in keys), None) for usuals in (IMAGE_KEYS, LABEL_KEYS)]
        if None not in names:
            found = tuple(found[name] for name in names)
    if isinstance(found, tuple | list) and len(found) == 2:
        image, label = found
        image = image[0] if isinstance(image, tuple | list) and len(image) == 1 else image
        if isinstance(image, bytes | bytearray | Array):
            label = label.values.tolist() if isinstance(label, Array) else label
            return (image.values if isinstance(image, Array) else bytes(image)), label
    what = f"{len(found)} values" if isinstance(found, tuple | list | dict) else "one value"
    raise DataError(f"holds {what}, not (image, label); write it again so")


def _encoded(image: bytes | NDArray[Any]) -> bytes:
    if isinstance(image, bytes):
        return image
    if image.ndim == 3 and image.shape[2] not in (1, 3) and image.shape[0] in (1, 3):
        image = np.ascontiguousarray(image.transpose(1, 2, 0))  # of channels first
    if image.dtype != np.uint8 or image.ndim not in (2, 3) or (image.ndim == 3 and image.shape[2] not in (1, 3)):
        raise DataError(
            f"holds an array of {image.dtype} and shape {image.shape}; allowed are uint8 pixels, (height, width) or "
            "(height, width, 1 or 3)"
        )
    return raw_image(image)


def _learned(label: Any, targets: Targets, places: dict[str, int]) -> tuple[int, bytes]:
    """Label and target, as of `Record`."""
    if targets:
        return 0, row_of(label, targets)
    if isinstance(label, list) and len(label) == 1:
        label = label[0]
    label = label.item() if isinstance(label, np.integer) else label
    label = label.decode("utf-8", "backslashreplace") if isinstance(label, bytes) else label
    if isinstance(label, str) and places:
        if label not in places:
            raise DataError(f"has the label '{label[:80]}', which data.classes doesn't name; add it")
        return places[label], b""
    if type(label) is not int or label < 0:
        what = repr(label) if isinstance(label, int | float | str | None) else f"a {type(label).__name__}"
        raise DataError(
            f"has the label {what[:80]}; allowed are whole numbers from 0, or set data=lmdb data.labels=FILE, or "
            "the names of all classes: data.classes=[NAME,…]"
        )
    return label, b""


def _is_image(data: bytes) -> bool:
    if data.startswith(_SIGNATURES):  # a damaged one, too
        return True
    try:
        read_header(data)
    except DataError:
        return False
    return True

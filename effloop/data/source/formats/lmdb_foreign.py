"""LMDB environments that others wrote: where the images in their values are, and their labels.

A value is (image, label) by pickle or `pyarrow.serialize`, as folder2lmdb writes it, a `Datum` of Caffe's, or an image
whose label is in a file or in its key (`CLASS/NAME.jpg`). An image is read where it lies. What isn't an encoded image
as it stands, raw pixels or bytes that a pickle holds as text, is made one whenever it is read.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from effloop.data.source.base import printable
from effloop.data.source.formats.lmdb_labels import Labels
from effloop.data.source.formats.lmdb_pages import Tree, Value
from effloop.data.source.formats.lmdb_values import Sample, image_alone, parsed, reader_of
from effloop.data.source.formats.protobuf import BrokenMessageError
from effloop.data.source.storage.columns import BlobSpool, Spool
from effloop.data.source.storage.index import Entry
from effloop.data.source.storage.pickled_arrays import Array, Bytes
from effloop.data.source.storage.targets import Targets, row_of
from effloop.errors import DataError

_LONGEST_NUMBER = 18  # digits
_NOT_SAMPLES = frozenset({b"length", b"num-samples", b"num_samples", b"classes"})
"""Keys of what describes an environment, as those between two underscores do."""


class Foreign:
    """The samples of an environment.

    Args:
        tree: of the environment.
        labels: opens the file of labels; None where the environment has them.
        names: of the classes, in the order of their labels, as `data.classes` says; None if it doesn't.
    """

    def __init__(self, tree: Tree, labels: Callable[[Tree], Labels] | None, names: Sequence[str] | None = None) -> None:
        self._tree, self._labels_of, self._names = tree, labels, names
        self._places = {name: place for place, name in enumerate(names or ())}
        first = next(self._values(), None)
        if first is None:
            raise DataError(
                f"{tree.path} has no samples in its main database, which alone is read (no named one); write them there"
            )
        self._read = self._reader(first)
        self.made = self._sample(first).made
        self._labels: Labels | None = None
        self._folders: dict[bytes, int] | None = None

    def classes(self) -> list[str] | None:
        """Names of the classes; None where labels are numbers."""
        if self._labels_of is not None:
            self._labels = self._labels_of(self._tree)
            return [*self._names] if self._names else self._labels.classes
        if self._read is not image_alone:
            return [*self._names] if self._names else None
        names = {_folder(value.key) for value in self._values()}
        if b"" in names:
            raise DataError(
                f"{self._tree.path} holds images without labels: set data=lmdb data.labels=FILE, with a row for each: "
                "key, label"
            )
        found = self._order(names)
        self._folders = {name: place for place, name in enumerate(found)}
        return [printable(name) for name in found]

    def entries(self, targets: Targets) -> Iterator[Entry]:
        """All samples, those with numbers for keys in the order of the numbers."""
        self.classes()
        count = 0
        for value in self._ordered():
            sample = self._sample(value)
            if sample.made != self.made:
                raise self._wrong(value, "isn't stored as the first one is; write the environment again, all alike")
            try:
                label, target = self._learned(value.key, sample, targets)
            except DataError as error:
                raise self._wrong(value, str(error)) from None
            yield Entry(value.key, label, 0, sample.offset, sample.size, None, target)
            count += 1
        self._check_count(count)

    def _order(self, names: set[bytes]) -> list[bytes]:
        """The folders in the order of their labels."""
        if not self._names:
            return sorted(names)
        order = [os.fsencode(name) for name in self._names]
        if missing := names - {*order}:
            raise DataError(
                f"{self._tree.path} has the class '{printable(min(missing))}', which data.classes doesn't name; add it"
            )
        return order

    def _learned(self, key: bytes, sample: Sample, targets: Targets) -> tuple[int, bytes]:
        if self._labels is not None:
            return self._labels[key], b""
        if self._folders is not None:
            return self._folders[_folder(key)], b""
        label = sample.label
        if isinstance(label, Array):
            label = label.values(self._tree.data).tolist()
            label = label[0] if isinstance(label, list) and len(label) == 1 and not targets else label
        if targets:
            return 0, row_of(label, targets)
        if isinstance(label, str | Bytes) and self._places:
            text = label if isinstance(label, str) else label.read(self._tree.data).decode("utf-8", "backslashreplace")
            if text not in self._places:
                raise DataError(f"has the label '{text[:80]}', which data.classes doesn't name; add it")
            return self._places[text], b""
        if type(label) is not int or label < 0:
            what = repr(label) if isinstance(label, int | float | str | None) else f"a {type(label).__name__}"
            raise DataError(
                f"has the label {what[:80]}; allowed are whole numbers from 0, or set data=lmdb data.labels=FILE, or "
                "the names of all classes: data.classes=[NAME,…]"
            )
        return label, b""

    def _sample(self, value: Value) -> Sample:
        try:
            return self._read(self._tree.data, value.offset, value.offset + value.size)
        except BrokenMessageError:
            raise self._wrong(value, "is no image, no pickle of (image, label) and no Datum; write it as one") from None
        except DataError as error:
            raise self._wrong(value, str(error)) from None

    def _reader(self, first: Value) -> Callable[[mmap.mmap, int, int], Sample]:
        """What reads values like the first one."""
        pickled = self._tree.find(b"__keys__") is not None or self._tree.find(b"__len__") is not None
        try:
            return reader_of(self._tree.data, first.offset, first.offset + first.size, pickled=pickled)
        except DataError as error:
            raise self._wrong(first, str(error)) from None

    def _values(self) -> Iterator[Value]:
        """All but what describes the environment, such as `__len__`."""
        return (
            value
            for value in self._tree
            if not (value.key[:2] == b"__" and value.key[-2:] == b"__") and value.key not in _NOT_SAMPLES
        )

    def _ordered(self) -> Iterator[Value]:
        keys, offsets, sizes, numbers = BlobSpool(), Spool("Q"), Spool("Q"), Spool("Q")
        numbered = True
        for value in self._values():
            keys.append(value.key)
            offsets.append(value.offset)
            sizes.append(value.size)
            numbered = numbered and value.key.isdigit() and len(value.key) <= _LONGEST_NUMBER
            numbers.append(int(value.key) if numbered else 0)
        blobs, offset, size = keys.blobs(), offsets.array(), sizes.array()
        order: Sequence[int] | NDArray[Any] = range(len(offset))
        if numbered:
            order = np.argsort(numbers.array(), kind="stable")
        for place in order:
            yield Value(bytes(blobs[int(place)]), int(offset[place]), int(size[place]))

    def _check_count(self, found: int) -> None:
        value = self._tree.find(b"__len__")
        if value is None:
            return
        try:
            said = parsed(self._tree.data, value.offset, value.offset + value.size)
        except DataError as error:
            raise self._wrong(value, str(error)) from None
        if type(said) is int and said != found:
            raise DataError(f"{self._tree.path} says {said:,} samples in __len__, it holds {found:,}; write it again")

    def _wrong(self, value: Value, what: str) -> DataError:
        return DataError(f"{self._tree.path}: the value of '{printable(value.key[:200])}' {what}")


def _folder(key: bytes) -> bytes:
    """The class in a key like `train/CLASS/NAME.jpg`; empty without a folder."""
    return key.rpartition(b"/")[0].rpartition(b"/")[2]

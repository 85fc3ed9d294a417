"""LMDB environments that others wrote: where the images in their values are, and their labels.

A value is (image, label) by pickle or `pyarrow.serialize`, as folder2lmdb writes it, a `Datum` of Caffe's, or an image
whose label is in a file or in its key (`CLASS/NAME.jpg`). An image is read where it lies. What isn't an encoded image
as it stands, raw pixels or bytes that a pickle holds as text, is made one whenever it is read.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from effloop.data.image.encoded import EncodedImages
from effloop.data.image.header import Encoded, pnm_header, read_header
from effloop.data.source.base import printable
from effloop.data.source.formats.arrow_values import is_serialized, read_serialized
from effloop.data.source.formats.datum import read_datum
from effloop.data.source.formats.lmdb_labels import Labels
from effloop.data.source.formats.lmdb_pages import Tree, Value
from effloop.data.source.formats.protobuf import BrokenMessageError
from effloop.data.source.storage.columns import ColumnFile
from effloop.data.source.storage.index import Entry
from effloop.data.source.storage.mapped import MappedFiles, Payload, ScatteredPayload
from effloop.data.source.storage.pickled_arrays import Array, Bytes
from effloop.data.source.storage.pickles import read_pickle
from effloop.data.source.storage.spool import BlobSpool, Spool
from effloop.data.source.storage.targets import Targets, row_of
from effloop.errors import DataError

MADE = "made"
"""In a header's `about`: how images are made of values, as in `MAKERS`."""

_OPERATIONS = 1 << 12  # of the pickle of a sample: an image and a label take 20
_PICKLE, _DATUM = "pickle", "datum"
_LONGEST_NUMBER = 18  # digits
_SIGNATURES = (b"\xff\xd8", b"\x89PNG", b"RIFF", b"BM", b"GIF8")


class _Sample(NamedTuple):
    """Where an image is, or where the value that it is made of begins (`made` says how), its size, and its label."""

    offset: int
    size: int
    made: str | None
    label: Any


class Foreign:
    """The samples of an environment.

    Args:
        tree: of the environment.
        labels: opens the file of labels; None where the environment has them.
    """

    def __init__(self, tree: Tree, labels: Callable[[Tree], Labels] | None) -> None:
        self._tree, self._labels_of = tree, labels
        first = next(self._values(), None)
        if first is None:
            raise DataError(f"{tree.path} has no samples; write it again")
        self._read = self._reader(first)
        self.made = self._sample(first).made
        self._labels: Labels | None = None
        self._folders: dict[bytes, int] | None = None

    def classes(self) -> list[str] | None:
        """Names of the classes; None where labels are numbers."""
        if self._labels_of is not None:
            self._labels = self._labels_of(self._tree)
            return self._labels.classes
        if self._read is not _image:
            return None
        names = {_folder(value.key) for value in self._values()}
        if b"" in names:
            raise DataError(
                f"{self._tree.path} holds images without labels: set data=lmdb data.labels=FILE, with a row for each: "
                "key, label"
            )
        found = sorted(names)
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

    def _learned(self, key: bytes, sample: _Sample, targets: Targets) -> tuple[int, bytes]:
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
        if type(label) is not int or label < 0:
            what = repr(label) if isinstance(label, int | float | str | None) else f"a {type(label).__name__}"
            raise DataError(
                f"has the label {what[:80]}; allowed are whole numbers from 0, or set data=lmdb data.labels=FILE"
            )
        return label, b""

    def _sample(self, value: Value) -> _Sample:
        try:
            return self._read(self._tree.data, value.offset, value.offset + value.size)
        except BrokenMessageError:
            raise self._wrong(value, "is no image, no pickle of (image, label) and no Datum; write it as one") from None
        except DataError as error:
            raise self._wrong(value, str(error)) from None

    def _reader(self, first: Value) -> Callable[[mmap.mmap, int, int], _Sample]:
        """What reads values like the first one."""
        start = self._tree.data[first.offset : first.offset + min(2, first.size)]
        end = first.offset + first.size
        if _is_image(self._tree.data[first.offset : end]):
            return _image
        if is_serialized(self._tree.data, first.offset, end):
            return _serialized
        pickled = start[:1] == b"\x80" or self._tree.find(b"__keys__") or self._tree.find(b"__len__")
        return _pickled if pickled or start[:1] in (b"(", b"]") else _datum

    def _values(self) -> Iterator[Value]:
        """All but what describes the environment, such as `__len__`."""
        return (value for value in self._tree if not (value.key[:2] == b"__" and value.key[-2:] == b"__"))

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
            said = _parsed(self._tree.data, value.offset, value.offset + value.size)
        except DataError as error:
            raise self._wrong(value, str(error)) from None
        if type(said) is int and said != found:
            raise DataError(f"{self._tree.path} says {said:,} samples in __len__, it holds {found:,}; write it again")

    def _wrong(self, value: Value, what: str) -> DataError:
        return DataError(f"{self._tree.path}: the value of '{printable(value.key[:200])}' {what}")


def _image(data: mmap.mmap, start: int, end: int) -> _Sample:
    del data  # whether it is an image is checked as in all formats
    return _Sample(start, end - start, None, None)


def _pickled(data: mmap.mmap, start: int, end: int) -> _Sample:
    return _of_pickle(read_pickle(data, start, end, _OPERATIONS), start, data)


def _serialized(data: mmap.mmap, start: int, end: int) -> _Sample:
    return _of_pickle(read_serialized(data, start, end), start, data)


def _parsed(data: mmap.mmap, start: int, end: int) -> Any:
    """A value that isn't a sample, such as `__len__`."""
    if is_serialized(data, start, end):
        return read_serialized(data, start, end)
    return read_pickle(data, start, end, _OPERATIONS)


def _of_pickle(found: Any, start: int, data: mmap.mmap) -> _Sample:
    image, label = _pair(found)
    if isinstance(image, Bytes) and image.own is None:
        return _Sample(image.offset, image.size, None, label)
    return _Sample(start, len(_made_of(image, data)), _PICKLE, label)


def _made_of(image: Bytes | Array, data: mmap.mmap) -> bytes:
    """The encoded image that a pickle's bytes or pixels are."""
    if isinstance(image, Bytes):
        return image.read(data)
    pixels = image.values(data)
    if pixels.dtype != np.uint8 or pixels.ndim not in (2, 3) or (pixels.ndim == 3 and pixels.shape[2] not in (1, 3)):
        raise DataError(
            f"holds an array of {pixels.dtype} and shape {pixels.shape}; allowed are uint8 pixels, (height, width) or "
            "(height, width, 1 or 3)"
        )
    height, width = pixels.shape[:2]
    return pnm_header(height, width, 1 if pixels.ndim == 2 else pixels.shape[2]) + pixels.tobytes()


def _datum(data: mmap.mmap, start: int, end: int) -> _Sample:
    found = read_datum(data, start, end)
    if found.encoded:
        return _Sample(found.offset, found.size, None, found.label)
    return _Sample(start, found.pnm_size(), _DATUM, found.label)


def _unpickled(data: mmap.mmap, start: int) -> bytes:
    return _made_of(_pair(read_pickle(data, start, most=_OPERATIONS))[0], data)


def _pair(found: Any) -> tuple[Bytes | Array, Any]:
    """Image and label; the image may be a list of one, as a `DataLoader` gives it."""
    if isinstance(found, tuple | list) and len(found) == 2:
        image, label = found
        if isinstance(image, tuple | list) and len(image) == 1:
            image = image[0]
        if isinstance(image, Bytes | Array):
            return image, label
    what = f"{len(found)} values" if isinstance(found, tuple | list | dict) else "one value"
    raise DataError(f"holds {what}, not (image, label); write it again so")


def _of_datum(data: mmap.mmap, start: int) -> bytes:
    return read_datum(data, start, len(data), until_data=True).pnm(data)


MAKERS = {_PICKLE: _unpickled, _DATUM: _of_datum}
"""What makes an image of the value that begins at an offset."""


class MadePayload(ScatteredPayload):
    """Images that are made when they are read; `offset` is where their values begin, `size` what is made has.

    Args:
        files: what is read.
        index: where.
        made: as in the header.
    """

    def __init__(self, files: MappedFiles, index: ColumnFile, made: str) -> None:
        super().__init__(files, *(index.unsigned(name) for name in ("file", "offset", "size")))
        self._make = MAKERS[made]

    def parts(self, index: int) -> list[tuple[mmap.mmap, int, int]]:
        """Where to read ahead: a value's size isn't known."""
        file, offset = self._files[int(self._file[index])], int(self._offset[index])
        return [self._part(int(self._file[index]), offset, min(int(self._size[index]), max(1, len(file) - offset)))]

    def __getitem__(self, index: int) -> Encoded:
        ((file, offset, _),) = self.parts(index)
        made = self._make(file, offset)
        if len(made) != self._size[index]:
            raise DataError(f"is damaged: it makes {len(made):,} bytes, expected are {int(self._size[index]):,}")
        return made

    def run(self, samples: NDArray[np.int64]) -> EncodedImages:
        return Payload.run(self, samples)


def _folder(key: bytes) -> bytes:
    """The class in a key like `train/CLASS/NAME.jpg`; empty without a folder."""
    return key.rpartition(b"/")[0].rpartition(b"/")[2]


def _is_image(data: bytes) -> bool:
    if data.startswith(_SIGNATURES):  # a damaged one, too
        return True
    try:
        read_header(data)
    except DataError:
        return False
    return True

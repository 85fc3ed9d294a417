"""TFRecord files of `tf.train.Example`, without TensorFlow.

A file is records end to end: u64 length, u32 checksum of these eight bytes, data, u32 checksum of the data;
little-endian (tensorflow/core/lib/io/record_writer.h). A checksum is a masked CRC-32C. Data is an `Example`
(example.py).
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from effloop.data.image.header import Encoded, read_header
from effloop.data.source.base import Kind, printable, sources
from effloop.data.source.root import begins_with
from effloop.data.source.storage.checksum import crc32c
from effloop.data.source.storage.index import Entry, IndexWriter, write_index, write_names
from effloop.data.source.storage.indexed import IndexedSource
from effloop.data.source.storage.mapped import MappedFiles
from effloop.data.source.storage.packed import PackedConfig
from effloop.data.source.storage.shards import any_shard, check_complete
from effloop.data.source.storage.targets import CLASSES, Targets, flags_of, row_of
from effloop.data.source.storage.writing import SHARD_BYTES, Dataset, Record, register_writer
from effloop.errors import DataError

_64_BITS = (1 << 64) - 1

# The wire format of protobuf: the fields of a message, each a varint of its number and kind (its tag), then its value.
#
# Kind 2 is "length, then bytes", 0 a varint, 1 and 5 are 8 and 4 bytes.

Message = bytes | mmap.mmap
"""What holds a message."""


class BrokenMessageError(DataError):
    """What holds no message of protobuf's."""

    def __init__(self) -> None:
        super().__init__("holds a protobuf message that can't be parsed")


def fields(data: Message, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Tag, first byte and end of every field of the message `data[at:end]`.

    Raises:
        BrokenMessageError: it is none.
    """
    while at < end:
        tag, at = varint(data, at, end) if data[at] > 127 else (data[at], at + 1)
        kind = tag & 7
        if kind == 2:
            # Most have one byte: not calling varint for these makes a scan 1.2 times as fast.
            size, at = (data[at], at + 1) if at < end and data[at] < 128 else varint(data, at, end)
            stop = at + size
        elif kind == 0:
            _, stop = varint(data, at, end)
        else:
            stop = at + {1: 8, 5: 4}.get(kind, len(data))  # 3 and 4, groups, are in no message that is read
        if stop > end or tag < 8:
            raise BrokenMessageError
        yield tag, at, stop
        at = stop


def varint(data: Message, at: int, end: int) -> tuple[int, int]:
    """The unsigned 64-bit integer at `at`, and where it ends.

    Raises:
        BrokenMessageError: it doesn't end.
    """
    value = shift = 0
    while at < end and shift < 70:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value & _64_BITS, at
    raise BrokenMessageError


# What TensorFlow Datasets writes beside its TFRecord files: `features.json`, which describes their features, and
# `FEATURE.labels.txt`, the names of the classes.

_FEATURES = "features.json"
_KEYS = ("file_name", "filename", "image/filename", "id", "image_id")


class Features(NamedTuple):
    """Names of the features that have the image, the label and, maybe, the key."""

    image: str
    label: str
    key: str


def files_of(folder: Path) -> list[Path]:
    """The files beside the records of a folder that are read."""
    return [file for file in (folder / _FEATURES, *sorted(folder.glob("*.labels.txt"))) if file.is_file()]


def features_of(folder: Path, image: str | None, label: str | None) -> Features | None:
    """The features of a folder that TensorFlow Datasets wrote; None for any other.

    Args:
        folder: it.
        image: the one that is chosen; None looks for the only one of its kind.
        label: the same.

    Raises:
        DataError: it has no single image or label.
    """
    path = folder / _FEATURES
    if not path.is_file():
        return None
    try:
        found = json.loads(path.read_bytes())
        content = found.get("content", found.get("featuresDict"))  # of older releases, as text
        found = (json.loads(content) if isinstance(content, str) else content)["features"]
        kinds = {name: str(feature["pythonClassName"]).rpartition(".")[2] for name, feature in found.items()}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise DataError(f"{path} doesn't describe features as TensorFlow Datasets does; remove or correct it") from None
    key = next((name for name in _KEYS if kinds.get(name) == "Text"), "")
    return Features(
        image or _one(kinds, "Image", "image", path), label or _one(kinds, "ClassLabel", "label", path), key
    )


def names_of(folder: Path, label: str) -> list[str] | None:
    """The names of the classes that feature `label` has; None if they aren't there.

    Raises:
        DataError: the file isn't UTF-8.
    """
    path = folder / f"{label}.labels.txt"
    if not path.is_file():
        return None
    try:
        names = (name.strip() for name in path.read_text(encoding="utf-8").split("\n"))
        return [name for name in names if name]  # as TensorFlow Datasets reads them
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start:,}; write it again") from None


def _one(kinds: dict[str, Any], kind: str, usual: str, path: Path) -> str:
    names = [name for name, found in kinds.items() if found == kind]
    if usual in names:
        return usual
    if len(names) != 1:
        what = ", ".join(names) if names else "none"
        raise DataError(f"{path} has {what} of the kind {kind}; set data=tfrecord data.{usual}=NAME of one feature")
    return names[0]


# A `tf.train.Example`: locates its features in a record, and encodes one.
#
# The protobuf message (tensorflow/core/example/example.proto and feature.proto); a field is a varint of its number and
# kind (its tag; kind 2 is "length, then bytes"), then its value:
#
#     Example {Features = 1}                    Feature {one of BytesList = 1, FloatList = 2, Int64List = 3}
#     Features {repeated entry = 1}             BytesList {repeated bytes = 1}
#     entry {string name = 1; Feature = 2}      Int64List {repeated int64 = 1, packed or not}; FloatList too, of float

Span = tuple[int, int]
"""First byte and end of a field in a record."""

_FIRST, _SECOND, _FIRST_VARINT = 1 << 3 | 2, 2 << 3 | 2, 1 << 3
_BYTES, _FLOATS, _INTEGERS = 1 << 3 | 2, 2 << 3 | 2, 3 << 3 | 2
_FLOAT_FIELDS = (_FIRST, 1 << 3 | 5)  # packed or not
_KINDS = {_BYTES: "bytes", _FLOATS: "floats", _INTEGERS: "integers"}
_LONGEST = (1 << 31) - 1  # of a message


class Example:
    """The features of one record.

    Args:
        data: the record.

    Raises:
        DataError: not such a message; callers put the record's name before the error's message.
    """

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._features: dict[bytes, Span] = {}
        for tag, start, end in fields(data, 0, len(data)):
            for entry, first, stop in fields(data, start, end) if tag == _FIRST else ():
                if entry == _FIRST:
                    parts = {part: (begin, close) for part, begin, close in fields(data, first, stop)}
                    # Of two with the same name the last is valid, as always in protobuf.
                    self._features[data[slice(*parts.get(_FIRST, (0, 0)))]] = parts.get(_SECOND, (0, 0))

    def text(self, name: str, option: str) -> bytes:
        """The bytes of feature `name`; empty if there is no such feature."""
        span = self._value(name, _BYTES, option)
        return self._data[slice(*span)] if span else b""

    def span(self, name: str, option: str) -> Span:
        """Where the bytes of feature `name` are in the record.

        Raises:
            DataError: no such feature, or not a single value of bytes; the message has the `option` to set.
        """
        return self._needed(name, _BYTES, option)

    def integer(self, name: str, option: str) -> int:
        """The integer of feature `name`.

        Raises:
            DataError: no such feature, or not a single integer; the message has the `option` to set.
        """
        value, _ = varint(self._data, *self._needed(name, _INTEGERS, option))
        return value - (value >> 63 << 64)  # two's complement

    def integers(self, name: str, option: str) -> list[int]:
        """All integers of feature `name`; empty if there is no such feature.

        Raises:
            DataError: it isn't of integers; the message has the `option` to set.
        """
        found = list[int]()
        for tag, start, end in self._values(name, _INTEGERS, option):
            while tag in (_FIRST, _FIRST_VARINT) and start < end:
                value, start = varint(self._data, start, end)
                found.append(value - (value >> 63 << 64))
        return found

    def floats(self, name: str, option: str) -> list[float]:
        """All numbers of feature `name`; empty if there is no such feature.

        Raises:
            DataError: it isn't of floats; the message has the `option` to set.
        """
        data = self._data
        parts = [data[start:end] for tag, start, end in self._values(name, _FLOATS, option) if tag in _FLOAT_FIELDS]
        whole = b"".join(parts)
        if len(whole) % 4:
            raise BrokenMessageError
        return [number for (number,) in struct.iter_unpack("<f", whole)]

    def _values(self, name: str, wanted: int, option: str) -> Iterator[tuple[int, int, int]]:
        """The fields of the list that a feature is, which must be of this kind."""
        data = self._data
        feature = self._features.get(name.encode(errors="surrogateescape"), (0, 0))
        lists = [(tag, start, end) for tag, start, end in fields(data, *feature) if tag in _KINDS]
        for kind, start, end in lists[-1:]:  # "one of": the last is valid
            if kind != wanted:
                raise _other_kind(name, kind, wanted, option)
            yield from fields(data, start, end)

    def _value(self, name: str, wanted: int, option: str) -> Span | None:
        """Where a feature's only value is; None if the feature is missing or empty."""
        data, kind = self._data, wanted
        span: Span | None = None
        count = 0
        for tag, start, end in fields(data, *self._features.get(name.encode(errors="surrogateescape"), (0, 0))):
            if tag in _KINDS:
                if tag != kind:
                    kind, span, count = tag, None, 0  # "one of": the last is valid
                for value, first, stop in fields(data, start, end):
                    if value in (_FIRST, _FIRST_VARINT) and (first < stop or kind != _INTEGERS):
                        span = span or (first, stop)
                        count += _count_varints(data, first, stop) if kind == _INTEGERS else 1
        if kind != wanted:
            raise _other_kind(name, kind, wanted, option)
        if count > 1:
            raise DataError(f"has {count:,} values in '{name}', not one; set {option}=NAME of another feature")
        return span

    def _needed(self, name: str, kind: int, option: str) -> Span:
        span = self._value(name, kind, option)
        if span is None:
            names = ", ".join(sorted(map(printable, self._features))[:12]) or "none"
            raise DataError(f"has no feature '{name}', or an empty one; it has {names}: set {option}=NAME")
        return span


def _other_kind(name: str, kind: int, wanted: int, option: str) -> DataError:
    return DataError(f"has {_KINDS[kind]} in '{name}', not {_KINDS[wanted]}; set {option}=NAME of another feature")


def _count_varints(data: bytes, at: int, end: int) -> int:
    """Number of packed integers in `data[at:end]`, at least one; vectorized, because a list may have millions."""
    _, first_end = varint(data, at, end)
    if first_end == end:
        return 1
    if data[end - 1] > 127:
        raise BrokenMessageError
    return int(np.count_nonzero(np.frombuffer(data, np.uint8, end - at, at) < 128))


def example_before(record: Record, classes: Sequence[str], targets: Targets = CLASSES) -> bytes:
    """The bytes of an Example of this record that precede its image, which comes last.

    Raises:
        DataError: larger than protobuf allows.
    """
    size = len(record.data)
    features = _learned(record, classes, targets)
    features += _small(b"image/filename", _BYTES, record.key)
    features += _small(b"image/format", _BYTES, _format_of(record.data))
    features += _before(b"image/encoded", _BYTES, size)
    example = _length(_FIRST, len(features) + size) + features
    if len(example) + size > _LONGEST:
        raise DataError(
            f"{printable(record.key)} has {size:,} bytes; a tf.train.Example takes {_LONGEST:,} in all: "
            "leave it out, or convert to another format"
        )
    return example


def _learned(record: Record, classes: Sequence[str], targets: Targets) -> bytes:
    """`image/class/label` and `image/class/text`: the class, or all that a sample has; or its numbers; nothing where
    there are masks.
    """
    if targets.kind is Kind.masks:
        return b""
    if targets.kind is Kind.numbers:
        return _small(b"image/class/label", _FLOATS, record.target)
    labels = np.flatnonzero(targets.values(record.target)).tolist() if targets else [record.label]
    # other labels than those of a class are refused by the index
    texts = [
        classes[label].encode("utf-8", "backslashreplace") if 0 <= label < len(classes) else b"" for label in labels
    ]
    packed = b"".join(_as_varint(label & _64_BITS) for label in labels)
    return _small(b"image/class/label", _INTEGERS, packed) + _small(b"image/class/text", _BYTES, *texts)


def _small(name: bytes, kind: int, *values: bytes) -> bytes:
    """A whole feature: values of bytes, or one of packed numbers."""
    coded = b"".join(_length(_FIRST, len(value)) + value for value in values)
    feature = _length(kind, len(coded)) + coded
    entry = _length(_FIRST, len(name)) + name + _length(_SECOND, len(feature)) + feature
    return _length(_FIRST, len(entry)) + entry


def _before(name: bytes, kind: int, size: int) -> bytes:
    """The bytes before a feature's only value of `size` bytes."""
    value = _length(_FIRST, size)
    values = _length(kind, len(value) + size) + value
    feature = _length(_SECOND, len(values) + size) + values
    entry = _length(_FIRST, len(name)) + name + feature
    return _length(_FIRST, len(entry) + size) + entry


def _length(tag: int, size: int) -> bytes:
    return bytes([tag]) + _as_varint(size)


def _as_varint(value: int) -> bytes:
    coded = bytearray()
    while value > 127:
        coded.append(value & 127 | 128)
        value >>= 7
    return bytes([*coded, value])


def _format_of(data: Encoded) -> bytes:
    """JPEG, PNG and so on; empty if it isn't an image."""
    try:
        return read_header(data).format.encode()
    except DataError:
        return b""


_HEAD, _CHECK = struct.Struct("<QI"), struct.Struct("<I")
_FIVE = "[0-9]" * 5
_ENDINGS = ("*.tfrecord", "*.tfrecords", f"*-{_FIVE}-of-{_FIVE}")
_ARRAY_RECORD = ".array_record"
_COMPRESSED_ENDINGS = ("*.tfrecord.gz", "*.tfrecords.gz")
_NO_EXAMPLE = "holds no tf.train.Example: its protobuf can't be parsed; data=tfrecord reads these only"
_COMPRESSIONS = {b"\x1f\x8b": "gzip", b"\x78\x01": "zlib", b"\x78\x9c": "zlib", b"\x78\xda": "zlib"}


@dataclass
class TFRecordConfig(PackedConfig):
    """Fields of `data=tfrecord`: which features of an Example are read.

    A folder of TensorFlow Datasets says them in its `features.json`, where they aren't set.

    Attributes:
        image: feature with the encoded image.
        label: feature with the label, an integer. If labels start at 1, class 0 stays empty. Where targets aren't
            classes: the integers of all classes that a sample has, or its numbers.
        key: feature with the key of a sample; without it, the key is FILE/NUMBER.
    """

    image: str = "image/encoded"
    label: str = "image/class/label"
    key: str = "image/filename"


@sources.register("tfrecord", TFRecordConfig)
class TFRecordSource(IndexedSource):
    """TFRecord files of tf.train.Example, as TensorFlow and DALI read them; checksums are compared."""

    config: TFRecordConfig
    duplicate_fix = "remove one of the two, or set data=tfrecord data.key=NAME (of no feature, to number the samples)"

    def shards(self, root: Path) -> list[Path]:
        files = self.find(root, _ENDINGS) or self.find(root, _COMPRESSED_ENDINGS)
        if other := next((file for file in files if _ARRAY_RECORD in file.name), None):
            raise DataError(
                f"{other} is an ArrayRecord file, which isn't read; prepare the dataset with file_format='tfrecord'"
            )
        check_complete(files)
        return files

    def sidecars(self, files: Sequence[Path]) -> list[Path]:
        return files_of(self.base())

    def class_names(self, files: Sequence[Path], targets: Targets) -> list[str] | None:
        return None if targets else names_of(self.base(), self._features().label)

    def _features(self) -> Features:
        """Those that are set, or else as TensorFlow Datasets describes them, or else the usual ones."""
        config, usual = self.config, TFRecordConfig()
        image = config.image if config.image != usual.image else None
        label = config.label if config.label != usual.label else None
        found = features_of(self.base(), image, label)
        if found is None:
            return Features(config.image, config.label, config.key)
        return found if config.key == usual.key else found._replace(key=config.key)

    def scan_file(self, files: Sequence[Path], number: int, targets: Targets) -> Iterator[Entry]:
        file, features = files[number], self._features()
        for count, (offset, data) in enumerate(_records(file)):
            key = b""
            try:
                example = Example(data)
                key = example.text(features.key, "data=tfrecord data.key")
                start, end = example.span(features.image, "data=tfrecord data.image")
                label, target = self._learned(example, features.label, targets)
            except BrokenMessageError:
                raise DataError(f"{file}: record {count} {_NO_EXAMPLE}") from None
            except DataError as error:
                name = f" ({printable(key)})" if key else ""
                raise DataError(f"{file}: record {count}{name} {error}") from None
            key = key or f"{file.name}/{count}".encode(errors="surrogateescape")
            # The record's checksum can't verify the image alone: it gets its own, for 5 % of the scan's time.
            checksum = crc32c(data[start:end])
            yield Entry(key, label, number, offset + start, end - start, checksum, target)

    def _learned(self, example: Example, feature: str, targets: Targets) -> tuple[int, bytes]:
        """Label and target of a record, as of `Record`."""
        option = "data=tfrecord data.label"
        if targets.kind is Kind.flags:
            return 0, flags_of(example.integers(feature, option), len(targets.names))
        if targets.kind is Kind.numbers:
            return 0, row_of(example.floats(feature, option), targets)
        label = example.integer(feature, option)
        if not 0 <= label < 1 << 32:
            raise DataError(f"has the label {label}; allowed are 0 to {(1 << 32) - 1}")
        return label, b""

    @classmethod
    def claims(cls, root: Path) -> bool:
        first = any_shard(root, _ENDINGS)
        if first is None:
            return False
        by_name = _ARRAY_RECORD in first.name or begins_with(first, b"\x1f\x8b")  # which are refused
        return by_name or _begins_with_a_record(first)


@register_writer("tfrecord")
def write_tfrecord(path: Path, dataset: Dataset, shard_bytes: int = SHARD_BYTES) -> None:
    """A folder: SPLIT-00000-of-00003.tfrecord and so on with DALI's index of each, SPLIT.index, and classes.txt."""
    path.mkdir()
    write_names(path, dataset)
    for split in dataset.splits:
        index = IndexWriter.of(dataset, path)
        files = _write_shards(path / split, dataset, shard_bytes, index)
        write_index(path, split, dataset, files, index)


def _write_shards(base: Path, dataset: Dataset, shard_bytes: int, index: IndexWriter) -> list[Path]:
    """Write the files of the split `base.name`, each with a `file.idx` that has a line "offset size" per record."""
    records, count, files = iter(dataset.splits[base.name]), 0, []
    for first in records:
        with open(f"{base}-{count:05}", "wb") as file, open(f"{base}-{count:05}.idx", "w") as offsets:
            for record in chain([first], records):
                start, before, data = (
                    file.tell(),
                    example_before(record, dataset.classes, dataset.targets),
                    bytes(record.data),
                )
                place = start + _HEAD.size + len(before)
                index.add_entry(Entry.of(record, count, place))
                length = (len(before) + len(data)).to_bytes(8, "little")
                file.write(length + _CHECK.pack(_masked(length)) + before)
                file.write(data)
                file.write(_CHECK.pack(_masked(before + data)))
                offsets.write(f"{start} {file.tell() - start}\n")
                if file.tell() >= shard_bytes:
                    break
        count += 1
    for number in range(count):  # the number of files is part of their names, and known only now
        part, file_name = f"{base}-{number:05}", f"{base}-{number:05}-of-{count:05}.tfrecord"
        os.rename(part, file_name)
        os.rename(f"{part}.idx", f"{file_name}.idx")
        files.append(Path(file_name))
    return files


def _records(path: Path) -> Iterator[tuple[int, bytes]]:
    """(offset of the data, data) of each record, both checksums verified."""
    if not path.stat().st_size:
        return  # written without any record
    file = MappedFiles([path])[0]
    at = count = 0
    while at < len(file):
        where, start = f"{path}: record {count}", at + _HEAD.size
        if start > len(file):
            raise DataError(f"{where} is cut: {len(file) - at} bytes are left; copy the file again")
        length, checksum = _HEAD.unpack_from(file, at)
        if _masked(file[at : at + 8]) != checksum:
            if at == 0 and file[:2] in _COMPRESSIONS:
                raise DataError(f"{path} is compressed ({_COMPRESSIONS[file[:2]]}); write it again without compression")
            raise DataError(f"{where} is damaged: its length doesn't match its checksum; copy the file again")
        end = start + length
        if end + 4 > len(file):
            raise DataError(
                f"{where} is cut: data and checksum have {length + 4:,} bytes, {len(file) - start:,} are left; "
                "copy the file again"
            )
        data = file[start:end]
        if _masked(data) != _CHECK.unpack_from(file, end)[0]:
            raise DataError(f"{where} is damaged: its data doesn't match its checksum; copy the file again")
        yield start, data
        at, count = end + 4, count + 1


def _masked(data: bytes) -> int:
    """The checksum that TFRecord stores: masked, because a CRC of data that contains CRCs is weak."""
    checksum = crc32c(data)
    return ((checksum >> 15 | checksum << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _begins_with_a_record(path: Path) -> bool:
    with open(path, "rb") as file:
        head = file.read(_HEAD.size)
    return len(head) == _HEAD.size and _masked(head[:8]) == _HEAD.unpack(head)[1]

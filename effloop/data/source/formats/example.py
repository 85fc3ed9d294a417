"""A `tf.train.Example`: locates its features in a record, and encodes one.

The protobuf message (tensorflow/core/example/example.proto and feature.proto); a field is a varint of its number and
kind (its tag; kind 2 is "length, then bytes"), then its value:

    Example {Features = 1}                    Feature {one of BytesList = 1, FloatList = 2, Int64List = 3}
    Features {repeated entry = 1}             BytesList {repeated bytes = 1}
    entry {string name = 1; Feature = 2}      Int64List {repeated int64 = 1, packed or not}; FloatList too, of float
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

import numpy as np

from effloop.data.image.header import Encoded, read_header
from effloop.data.source.base import Kind, printable
from effloop.data.source.formats.protobuf import BrokenMessageError, fields, varint
from effloop.data.source.storage.targets import CLASSES, Targets
from effloop.data.source.storage.writing import Record
from effloop.errors import DataError

Span = tuple[int, int]
"""First byte and end of a field in a record."""

_FIRST, _SECOND, _FIRST_VARINT = 1 << 3 | 2, 2 << 3 | 2, 1 << 3
_BYTES, _FLOATS, _INTEGERS = 1 << 3 | 2, 2 << 3 | 2, 3 << 3 | 2
_FLOAT_FIELDS = (_FIRST, 1 << 3 | 5)  # packed or not
_KINDS = {_BYTES: "bytes", _FLOATS: "floats", _INTEGERS: "integers"}
_LONGEST = (1 << 31) - 1  # of a message
_64_BITS = (1 << 64) - 1


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

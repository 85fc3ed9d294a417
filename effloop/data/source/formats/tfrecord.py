"""TFRecord files of `tf.train.Example`, without TensorFlow.

A file is records end to end: u64 length, u32 checksum of these eight bytes, data, u32 checksum of the data;
little-endian (tensorflow/core/lib/io/record_writer.h). A checksum is a masked CRC-32C. Data is a `tf.train.Example`.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from effloop.data.image.header import Encoded, read_header
from effloop.data.source.base import Kind, printable, sources
from effloop.data.source.storage import columns, indexed, writing
from effloop.data.source.storage.packed import MappedFiles, PackedConfig
from effloop.data.source.storage.targets import CLASSES, Targets, flags_of, row_of
from effloop.errors import DataError

_SCHEMA = """
BytesList: bytes* value
FloatList: float* value
Int64List: int64* value
Feature: BytesList bytes_list, FloatList float_list, Int64List int64_list
Entry: bytes name, Feature feature
Features: Entry* feature
Example: Features features
Packed: BytesList bytes_list, bytes float_list, bytes int64_list
PackedEntry: bytes name, Packed feature
PackedFeatures: PackedEntry* feature
PackedExample: PackedFeatures features
"""
"""tensorflow/core/example/example.proto and feature.proto, whose map is coded as entries; `Packed` is for writing:
protobuf leaves out an empty list that is packed, which TensorFlow and DALI want to be there.
"""

_KINDS = {"bytes_list": "bytes", "float_list": "floats", "int64_list": "integers"}
_LONGEST = (1 << 31) - 1  # bytes of a message
_ROOM = 1 << 20  # for what isn't the image
_HEAD_BYTES = 64  # of an image that are searched for


@cache
def _messages() -> dict[str, Any]:
    """The classes of the messages."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(name="effloop/example.proto", package="effloop", syntax="proto3")
    scalars = {"bytes": 12, "float": 2, "int64": 3}
    for name, _, fields in (line.partition(": ") for line in _SCHEMA.split("\n") if line):
        message = file.message_type.add(name=name)
        for number, field in enumerate(fields.split(", "), 1):
            kind, _, label = field.partition(" ")
            made = message.field.add(name=label, number=number, label=3 if kind.endswith("*") else 1, type=11)
            kind = kind.rstrip("*")
            if kind in scalars:
                made.type = scalars[kind]
            else:
                made.type_name = f".effloop.{kind}"
            if name == "Feature":
                made.oneof_index = 0
        if name == "Feature":
            message.oneof_decl.add(name="kind")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    found = pool.FindFileByName(file.name).message_types_by_name
    return {name: message_factory.GetMessageClass(each) for name, each in found.items()}


class Example:
    """The features of one record.

    Raises:
        DataError: not such a message; callers put the record's name before the error's message.
    """

    def __init__(self, data: bytes) -> None:
        from google.protobuf.message import DecodeError

        try:
            entries = _messages()["Example"].FromString(data).features.feature
        except DecodeError:
            raise DataError(
                "holds no tf.train.Example: its protobuf can't be parsed; data=tfrecord reads these only"
            ) from None
        self._data = data
        self._features = {entry.name: entry.feature for entry in entries}  # of two with the same name the last is valid

    def values(self, name: str, wanted: str, key: str) -> Sequence[Any]:
        """All values of feature `name`; empty if there is no such feature."""
        feature = self._features.get(name.encode(errors="surrogateescape"))
        kind = wanted if feature is None else feature.WhichOneof("kind") or wanted
        if kind != wanted:
            raise DataError(f"has {_KINDS[kind]} in '{name}', not {_KINDS[wanted]}; {_fix(key)} of another feature")
        return () if feature is None else getattr(feature, wanted).value

    def value(self, name: str, wanted: str, key: str) -> Any:
        """The only value of feature `name`; raises as `values`, or if there is none or several."""
        found = self.values(name, wanted, key)
        if len(found) > 1:
            raise DataError(f"has {len(found):,} values in '{name}', not one; {_fix(key)} of another feature")
        if not found:
            names = ", ".join(sorted(map(printable, self._features))[:12]) or "none"
            raise DataError(f"has no feature '{name}', or an empty one; it has {names}: {_fix(key)}")
        return found[0]

    def span(self, name: str) -> tuple[int, int]:
        """First byte and end, in the record, of the image in feature `name`; raises as `value`."""
        value = self.value(name, "bytes_list", "image")
        at = self._data.find(value[:_HEAD_BYTES])  # faster than to search for all of it
        if self._data[at : at + len(value)] != value:  # once: in zeros the head is everywhere
            at = self._data.find(value, at + 1)
        return at, at + len(value)


def _fix(key: str) -> str:
    return f"set data=tfrecord data.{key}=NAME"


def encode_example(record: writing.Record, classes: Sequence[str], targets: Targets = CLASSES) -> bytes:
    """The Example of a record, which its image ends."""
    if len(record.data) > _LONGEST - _ROOM:
        raise DataError(
            f"{printable(record.key)} has {len(record.data):,} bytes; a tf.train.Example takes {_LONGEST:,} in all: "
            "leave it out, or convert to another format"
        )
    messages = _messages()

    def of_bytes(*values: bytes) -> dict[str, Any]:
        return {"bytes_list": messages["BytesList"](value=values)}

    features: dict[str, dict[str, Any]] = {}
    if targets.kind is Kind.numbers:
        numbers = messages["FloatList"](value=targets.values(record.target).tolist())
        features["image/class/label"] = {"float_list": numbers.SerializeToString()}
    elif targets.kind is not Kind.masks:
        labels = np.flatnonzero(targets.values(record.target)).tolist() if targets else [record.label]
        packed = messages["Int64List"](value=labels).SerializeToString()
        features["image/class/label"] = {"int64_list": packed or b"\x0a\x00"}
        # other labels than those of a class are refused by the index
        names = (classes[label] if 0 <= label < len(classes) else "" for label in labels)
        features["image/class/text"] = of_bytes(*(name.encode("utf-8", "backslashreplace") for name in names))
    features["image/filename"] = of_bytes(record.key)
    features["image/format"] = of_bytes(_format_of(record.data))
    features["image/encoded"] = of_bytes(bytes(record.data))
    entries = [
        messages["PackedEntry"](name=name.encode(), feature=messages["Packed"](**feature))
        for name, feature in features.items()
    ]
    made = messages["PackedExample"](features=messages["PackedFeatures"](feature=entries))
    return bytes(made.SerializeToString())


def _format_of(data: Encoded) -> bytes:
    """JPEG, PNG and so on; empty if it isn't an image."""
    try:
        return read_header(data).format.encode()
    except DataError:
        return b""


_FEATURES, _LABELS = "features.json", ".labels.txt"
"""What TensorFlow Datasets writes beside its files: a description of their features, and names of the classes."""

_KEYS = ("file_name", "filename", "image/filename", "id", "image_id")
_HEAD, _CHECK = struct.Struct("<QI"), struct.Struct("<I")
_FIVE = "[0-9]" * 5
_ENDINGS = ("*.tfrecord", "*.tfrecords", f"*-{_FIVE}-of-{_FIVE}")
_ARRAY_RECORD = ".array_record"
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
class TFRecordSource(indexed.IndexedSource):
    """TFRecord files of tf.train.Example, as TensorFlow and DALI read them; checksums are compared."""

    config: TFRecordConfig
    duplicate_fix = "remove one of the two, or set data=tfrecord data.key=NAME (of no feature, to number the samples)"

    def shards(self, root: Path) -> list[Path]:
        files = self.find(root, _ENDINGS) or self.find(root, ["*.tfrecord.gz", "*.tfrecords.gz"])
        if other := next((file for file in files if _ARRAY_RECORD in file.name), None):
            raise DataError(
                f"{other} is an ArrayRecord file, which isn't read; prepare the dataset with file_format='tfrecord'"
            )
        indexed.check_complete(files)
        return files

    def sidecars(self, files: Sequence[Path]) -> list[Path]:
        return [file for file in (self.base() / _FEATURES, *sorted(self.base().glob(f"*{_LABELS}"))) if file.is_file()]

    def class_names(self, files: Sequence[Path], targets: Targets) -> list[str] | None:
        text = None if targets else indexed.read_text(self.base() / f"{self._features()[1]}{_LABELS}")
        return None if text is None else [name.strip() for name in text.split("\n") if name.strip()]

    def _features(self) -> tuple[str, str, str]:
        """Image, label and key: those that are set, or as TensorFlow Datasets describes them, or the usual ones."""
        config, usual, path = self.config, TFRecordConfig(), self.base() / _FEATURES
        if not path.is_file():
            return config.image, config.label, config.key
        try:
            found = json.loads(path.read_bytes())
            content = found.get("content", found.get("featuresDict"))  # of older releases, as text
            found = (json.loads(content) if isinstance(content, str) else content)["features"]
            kinds = {name: str(feature["pythonClassName"]).rpartition(".")[2] for name, feature in found.items()}
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            raise DataError(
                f"{path} doesn't describe features as TensorFlow Datasets does; remove or correct it"
            ) from None

        def one(kind: str, key: str) -> str:
            names = [name for name, each in kinds.items() if each == kind]
            if getattr(config, key) != getattr(usual, key):
                return str(getattr(config, key))
            if key not in names and len(names) != 1:
                what = ", ".join(names) or "none"
                raise DataError(f"{path} has {what} of the kind {kind}; {_fix(key)} of one feature")
            return key if key in names else names[0]

        key = next((name for name in _KEYS if kinds.get(name) == "Text"), "")
        return one("Image", "image"), one("ClassLabel", "label"), key if config.key == usual.key else config.key

    def scan_file(self, files: Sequence[Path], number: int, targets: Targets) -> Iterator[indexed.Entry]:
        file, (image_in, label_in, key_in) = files[number], self._features()
        for count, (offset, data) in enumerate(_records(file)):
            key = b""
            try:
                example = Example(data)
                key = next(iter(example.values(key_in, "bytes_list", "key")), b"")
                start, end = example.span(image_in)
                label, target = self._learned(example, label_in, targets)
            except DataError as error:
                name = f" ({printable(key)})" if key else ""
                raise DataError(f"{file}: record {count}{name} {error}") from None
            key = key or f"{file.name}/{count}".encode(errors="surrogateescape")
            # The record's checksum can't verify the image alone: it gets its own, for 5 % of the scan's time.
            checksum = columns.crc32c(data[start:end])
            yield indexed.Entry(key, label, number, offset + start, end - start, checksum, target)

    def _learned(self, example: Example, feature: str, targets: Targets) -> tuple[int, bytes]:
        """Label and target of a record, as of `Record`."""
        if targets.kind is Kind.flags:
            return 0, flags_of(example.values(feature, "int64_list", "label"), len(targets.names))
        if targets.kind is Kind.numbers:
            return 0, row_of([*example.values(feature, "float_list", "label")], targets)
        label = example.value(feature, "int64_list", "label")
        if not 0 <= label < 1 << 32:
            raise DataError(f"has the label {label}; allowed are 0 to {(1 << 32) - 1}")
        return label, b""

    @classmethod
    def claims(cls, root: Path) -> bool:
        first = indexed.any_shard(root, _ENDINGS)
        if first is None:
            return False
        with open(first, "rb") as file:
            head = file.read(_HEAD.size)
        if _ARRAY_RECORD in first.name or head[:2] in _COMPRESSIONS:  # which are refused
            return True
        return len(head) == _HEAD.size and _masked(head[:8]) == _HEAD.unpack(head)[1]


@writing.register_writer("tfrecord")
def write_tfrecord(path: Path, dataset: writing.Dataset) -> None:
    """A folder: SPLIT-00000-of-00003.tfrecord and so on with DALI's index of each, SPLIT.index, and classes.txt."""
    path.mkdir()
    indexed.write_names(path, dataset)
    for split in dataset.splits:
        index = indexed.IndexWriter.of(dataset, path)
        files = _write_shards(path / split, dataset, index)
        indexed.write_index(path, split, dataset, files, index)


def _write_shards(base: Path, dataset: writing.Dataset, index: indexed.IndexWriter) -> list[Path]:
    """Write the files of the split `base.name`, each with a `file.idx` that has a line "offset size" per record."""
    parts, files = list[str](), list[Path]()
    for number, records in dataset.files(base.name):
        part = f"{base}-{number:05}"
        with open(part, "wb") as file, open(f"{part}.idx", "w") as offsets:
            for record in records:
                start, example = file.tell(), encode_example(record, dataset.classes, dataset.targets)
                index.add_entry(
                    indexed.Entry.of(record, len(parts), start + _HEAD.size + len(example) - len(record.data))
                )
                length = len(example).to_bytes(8, "little")
                file.write(length + _CHECK.pack(_masked(length)) + example + _CHECK.pack(_masked(example)))
                offsets.write(f"{start} {file.tell() - start}\n")
                if file.tell() >= dataset.shard_bytes:
                    break
        parts.append(part)
    for part in parts:  # the number of files is part of their names, and known only now
        file_name = f"{part}-of-{dataset.num_files(base.name, len(parts)):05}.tfrecord"
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
        start, left, what = at + _HEAD.size, len(file) - at, ""
        length, checksum = _HEAD.unpack_from(file, at) if left >= _HEAD.size else (0, 0)
        end = start + length
        if left < _HEAD.size:
            what = f"is cut: {left} bytes are left"
        elif _masked(file[at : at + 8]) != checksum:
            if at == 0 and file[:2] in _COMPRESSIONS:
                raise DataError(f"{path} is compressed ({_COMPRESSIONS[file[:2]]}); write it again without compression")
            what = "is damaged: its length doesn't match its checksum"
        elif end + 4 > len(file):
            what = f"is cut: data and checksum have {length + 4:,} bytes, {len(file) - start:,} are left"
        elif _masked(data := file[start:end]) != _CHECK.unpack_from(file, end)[0]:
            what = "is damaged: its data doesn't match its checksum"
        if what:
            raise DataError(f"{path}: record {count} {what}; copy the file again")
        yield start, data
        at, count = end + 4, count + 1


def _masked(data: bytes) -> int:
    """The checksum that TFRecord stores: masked, because a CRC of data that contains CRCs is weak."""
    checksum = columns.crc32c(data)
    return ((checksum >> 15 | checksum << 17) + 0xA282EAD8) & 0xFFFFFFFF

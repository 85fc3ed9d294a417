"""TFRecord files of `tf.train.Example`, without TensorFlow.

A file is records end to end: u64 length, u32 checksum of these eight bytes, data, u32 checksum of the data;
little-endian (tensorflow/core/lib/io/record_writer.h). A checksum is a masked CRC-32C. Data is an `Example`
(example.py).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from effloop.data.source.base import Kind, printable, sources
from effloop.data.source.formats import tfds
from effloop.data.source.formats.example import Example, example_before
from effloop.data.source.formats.protobuf import BrokenMessageError
from effloop.data.source.root import begins_with
from effloop.data.source.storage.checksum import crc32c
from effloop.data.source.storage.index import Entry, IndexWriter, write_index, write_names
from effloop.data.source.storage.indexed import IndexedSource
from effloop.data.source.storage.mapped import MappedFiles
from effloop.data.source.storage.scanned import IndexedConfig
from effloop.data.source.storage.shards import any_shard, check_complete
from effloop.data.source.storage.targets import Targets, flags_of, row_of
from effloop.data.source.storage.writing import SHARD_BYTES, Dataset, register_writer
from effloop.errors import DataError

_HEAD, _CHECK = struct.Struct("<QI"), struct.Struct("<I")
_FIVE = "[0-9]" * 5
_ENDINGS = ("*.tfrecord", "*.tfrecords", f"*-{_FIVE}-of-{_FIVE}")
_ARRAY_RECORD = ".array_record"
_COMPRESSED_ENDINGS = ("*.tfrecord.gz", "*.tfrecords.gz")
_NO_EXAMPLE = "holds no tf.train.Example: its protobuf can't be parsed; data=tfrecord reads these only"
_COMPRESSIONS = {b"\x1f\x8b": "gzip", b"\x78\x01": "zlib", b"\x78\x9c": "zlib", b"\x78\xda": "zlib"}


@dataclass
class TFRecordConfig(IndexedConfig):
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
        return tfds.files_of(self.base())

    def class_names(self, files: Sequence[Path], targets: Targets) -> list[str] | None:
        return None if targets else tfds.names_of(self.base(), self._features().label)

    def _features(self) -> tfds.Features:
        """Those that are set, or else as TensorFlow Datasets describes them, or else the usual ones."""
        config, usual = self.config, TFRecordConfig()
        image = config.image if config.image != usual.image else None
        label = config.label if config.label != usual.label else None
        found = tfds.features_of(self.base(), image, label)
        if found is None:
            return tfds.Features(config.image, config.label, config.key)
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

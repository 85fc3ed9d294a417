"""MXNet's RecordIO files of images, without MXNet.

A file is frames: u32 magic, u32 with a kind in the upper 3 bits and a length in the lower 29, that many bytes, zeros
up to a multiple of 4; little-endian (dmlc-core/include/dmlc/recordio.h). A record is one frame of kind 0. If it
contains the magic at a multiple of 4, it is split there into frames of the kinds 1, 2, ..., 2, 3, without the magic
between them. A record is u32 count, f32 label, u64 number, u64 second number, `count` f32 labels (0: the label is in
the header), and the image (mxnet/recordio.py, IRHeader). Several labels are what `targets.json` says.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from effloop.data.image.encoded import EncodedImages
from effloop.data.image.header import Encoded
from effloop.data.source.base import Kind, printable, sources
from effloop.data.source.root import begins_with
from effloop.data.source.storage import columns, indexed, packed, writing
from effloop.data.source.storage.targets import NAME as TARGETS
from effloop.data.source.storage.targets import Targets, row_of
from effloop.errors import DataError


def _names(path: Path) -> dict[int, bytes] | None:
    """{number of a record: its name}, from the .lst of im2rec (number, labels and path between tabs); None without."""
    if not path.is_file():
        return None
    found = dict[int, bytes]()
    with path.open("rb") as lines:
        for place, text in enumerate(lines, start=1):
            number, *fields = text.rstrip(b"\r\n").split(b"\t")
            if len(fields) < 2 or not number.isdigit() or len(number) > 19 or int(number) in found:  # 19 are below 2^64
                raise DataError(
                    f"{path}: line {place} isn't a new number, labels and a path between tabs; write it again"
                )
            found[int(number)] = fields[-1]
    return found


_MAGIC = struct.pack("<I", 0xCED7230A)
_FRAME, _HEADER, _LABEL = struct.Struct("<4sI"), struct.Struct("<IfQQ"), struct.Struct("<f")
_WHOLE, _FIRST, _MIDDLE, _LAST = range(4)
_LONGEST = (1 << 29) - 1  # bytes of a record, dmlc's limit
_LARGEST_LABEL = 1 << 24  # up to here a float32 holds every integer


@sources.register("recordio", packed.PackedConfig)
class RecordIOSource(indexed.IndexedSource):
    """MXNet's RecordIO (.rec) of images with their labels; .lst names the samples, if it is there."""

    def shards(self, root: Path) -> list[Path]:
        file = root / f"{self.split}.rec"
        return [file] if file.is_file() else self.find(root, ["*.rec"])

    def sidecars(self, files: Sequence[Path]) -> list[Path]:
        return [other for file in files if (other := file.with_suffix(".lst")).is_file()]

    def payload(self, files: packed.MappedFiles, index: columns.ColumnFile) -> packed.Payload:
        return _FramedPayload(files, index)

    def scan_file(self, files: Sequence[Path], number: int, targets: Targets) -> Iterator[indexed.Entry]:
        path = files[number]
        names = _names(path.with_suffix(".lst"))
        prefix = b"" if len(files) == 1 else f"{path.stem}/".encode(errors="surrogateescape")
        for start, parts, record in _records(path):
            try:
                identity, labels, payload = _unpack(record)
                key = prefix + b"%d" % identity if names is None else names.get(identity)
                if key is None:
                    raise DataError(f"has the number {identity}, which its .lst doesn't name; remove that")
                label, target = (0, row_of(labels, targets)) if targets else (_class(labels), b"")
            except DataError as error:
                raise DataError(f"{path}: the record at byte {start:,} {error}") from None
            # Frames start at multiples of 4: an odd offset marks a sample in several frames from offset - 1 on.
            offset = start + 1 if len(parts) > 1 else parts[0][0] + payload
            size, checksum = len(record) - payload, columns.crc32c(record[payload:])
            yield indexed.Entry(key, label, number, offset, size, checksum, target)

    @classmethod
    def claims(cls, root: Path) -> bool:
        first = indexed.any_shard(root, ["*.rec"])
        return first is not None and begins_with(first, _MAGIC)


class _FramedPayload(packed.ScatteredPayload):
    """Samples at (file, offset, size); an odd offset is that of the first of several frames, plus 1."""

    def __init__(self, files: packed.MappedFiles, index: columns.ColumnFile) -> None:
        super().__init__(files, *(index.unsigned(name) for name in ("file", "offset", "size")))
        self._labels = len(packed.targets_in(index.meta["header"]).names) or 1

    def __getitem__(self, index: int) -> Encoded:
        ((file, offset, size),) = self.parts(index)
        if offset % 2 == 0:
            return super().__getitem__(index)
        parts, _ = _frames(file, offset - 1)
        record = _join(file, parts)
        if len(record) - size not in (_HEADER.size, _HEADER.size + self._labels * _LABEL.size):
            raise DataError(f"is damaged: its frames hold {len(record):,} bytes, a header and {size:,} should be there")
        return record[len(record) - size :]

    def run(self, samples: NDArray[np.int64]) -> EncodedImages:
        if (self._offset[samples] % 2).any():
            return packed.Payload.run(self, samples)
        return super().run(samples)


@writing.register_writer("recordio")
def write_recordio(path: Path, dataset: writing.Dataset) -> None:
    """A folder: SPLIT.rec, SPLIT.idx and SPLIT.lst as im2rec writes them, SPLIT.index, and classes.txt."""
    path.mkdir()
    indexed.write_names(path, dataset)
    for split, records in dataset.splits.items():
        index, file = indexed.IndexWriter.of(dataset, path), path / f"{split}.rec"
        idx, lst = file.with_suffix(".idx"), file.with_suffix(".lst")
        # One file, of any size: MXNet and DALI read a single one with its .idx.
        with open(file, "wb") as rec, open(idx, "w") as starts, open(lst, "wb") as names:
            for number, record in enumerate(records):
                if record.label > _LARGEST_LABEL:
                    raise DataError(
                        f"{printable(record.key)} has the label {record.label}; RecordIO stores labels as float32, "
                        f"exact up to {_LARGEST_LABEL}: convert to another format"
                    )
                start, data, labels = rec.tell(), bytes(record.data), b""
                if dataset.targets and dataset.targets.kind is not Kind.masks:  # these follow the header
                    labels = dataset.targets.values(record.target).astype("<f4").tobytes()
                # In the .lst; nine digits give a float32 back.
                text = b"\t".join(b"%.9g" % label for (label,) in _LABEL.iter_unpack(labels)) or b"%f" % record.label
                # The checksum is informational: tools that replace the image keep the header, so nothing relies on it.
                header = _HEADER.pack(len(labels) // _LABEL.size, record.label, number, columns.crc32c(data)) + labels
                frames = _frames_of(header + data, record)
                offset = start + 1 if len(frames) > 1 else start + _FRAME.size + len(header)
                index.add_entry(indexed.Entry.of(record, 0, offset))
                rec.writelines(frames)
                starts.write(f"{number}\t{start}\n")
                names.write(b"%d\t%s\t%s\n" % (number, text, _name(record.key, number)))
        indexed.write_index(path, split, dataset, [file], index)


def _name(key: bytes, number: int) -> bytes:
    """The key, if a line of the .lst can hold it and im2rec's strip() keeps it; otherwise the number."""
    text = key.decode("utf-8", "replace")
    return key if text.encode() == key and text.isprintable() and text.strip() == text != "" else b"%d" % number


def _frames_of(data: bytes, record: writing.Record) -> list[bytes]:
    if len(data) > _LONGEST:
        raise DataError(
            f"{printable(record.key)} has {len(record.data):,} bytes; a record of RecordIO takes {_LONGEST:,} in all: "
            "leave it out, or convert to another format"
        )
    cuts, at = [-4], data.find(_MAGIC)
    while at >= 0:
        if at % 4 == 0:
            cuts.append(at)
        at = data.find(_MAGIC, at + 1)
    parts = [data[before + 4 : after] for before, after in pairwise([*cuts, len(data)])]
    kinds = [_WHOLE] if len(parts) == 1 else [_FIRST, *[_MIDDLE] * (len(parts) - 2), _LAST]
    return [
        _FRAME.pack(_MAGIC, kind << 29 | len(part)) + part + bytes(-len(part) % 4)
        for kind, part in zip(kinds, parts, strict=True)
    ]


def _records(path: Path) -> Iterator[tuple[int, list[tuple[int, int]], bytes]]:
    """Where each record starts, its parts (first byte, end), and its bytes."""
    if not path.stat().st_size:
        return
    file, at = packed.MappedFiles([path])[0], 0
    while at < len(file):
        start = at
        try:
            parts, at = _frames(file, start)
        except DataError as error:
            raise DataError(f"{path}: the record at byte {start:,} {error}; copy the file again") from None
        yield start, parts, _join(file, parts)


def _frames(file: mmap.mmap, at: int) -> tuple[list[tuple[int, int]], int]:
    """The parts (first byte, end) of the record that starts at `at`, and where the next one starts."""
    parts, size = list[tuple[int, int]](), 0
    while True:
        start = at + _FRAME.size
        if start > len(file):
            raise DataError(f"is cut: at byte {at:,}, {max(0, len(file) - at)} bytes are left of a frame")
        magic, coded = _FRAME.unpack_from(file, at)
        kind, length = coded >> 29, coded & _LONGEST
        if magic != _MAGIC or kind not in ((_MIDDLE, _LAST) if parts else (_WHOLE, _FIRST)):
            raise DataError(f"is damaged: no frame that belongs to it starts at byte {at:,}")
        if start + length > len(file):
            raise DataError(f"is cut: a frame has {length:,} bytes, {len(file) - start:,} are left")
        size += length
        if size > _LONGEST:
            raise DataError(f"is damaged: its frames hold more than {_LONGEST:,} bytes, what a record may have")
        parts.append((start, start + length))
        at = start + length + -length % 4
        if kind in (_WHOLE, _LAST):
            return parts, at


def _join(file: mmap.mmap, parts: Sequence[tuple[int, int]]) -> bytes:
    return _MAGIC.join(file[start:end] for start, end in parts)


def _unpack(record: bytes) -> tuple[int, list[float], int]:
    """A record's number, its labels, and where its image starts."""
    if len(record) < _HEADER.size:
        raise DataError(f"holds no image: it has {len(record)} bytes, its header alone has {_HEADER.size}")
    count, label, identity, _ = _HEADER.unpack_from(record)
    payload = _HEADER.size + count * _LABEL.size
    if len(record) < payload:
        raise DataError("holds no image: its labels are cut")
    labels = [label for (label,) in _LABEL.iter_unpack(record[_HEADER.size : payload])]
    return identity, labels or [label], payload


def _class(labels: Sequence[float]) -> int:
    """The class that is a record's only label."""
    if len(labels) > 1:
        raise DataError(f"has {len(labels):,} labels, a class is one; say in data.root/{TARGETS} what they are")
    (label,) = labels
    if not label.is_integer() or not 0 <= label <= _LARGEST_LABEL:
        raise DataError(f"has the label {label:g}; allowed are whole numbers from 0 to {_LARGEST_LABEL}")
    return int(label)

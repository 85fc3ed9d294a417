"""Writes tar archives that webdataset, DALI and Python's tarfile read alike."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO

from effloop.data.image import other
from effloop.data.image.header import Encoded, extension
from effloop.data.image.mask import decode_mask
from effloop.data.image.png import png_bytes
from effloop.data.source.base import Kind, printable
from effloop.data.source.folder import EXTENSIONS
from effloop.data.source.formats import ustar
from effloop.data.source.formats.tar import LISTS, MASK
from effloop.data.source.storage.index import Entry, IndexWriter, write_index, write_names
from effloop.data.source.storage.targets import Targets
from effloop.data.source.storage.writing import SHARD_BYTES, Dataset, Record, Records, register_writer
from effloop.errors import DataError


@register_writer("tar")
def write_tar(path: Path, dataset: Dataset, shard_bytes: int = SHARD_BYTES) -> None:
    """A folder: shards SPLIT-000000.tar and so on, SPLIT.index, and classes.txt."""
    path.mkdir()
    for split, records in dataset.splits.items():
        index, shards = IndexWriter.of(dataset, path), _ShardWriter(path, split, shard_bytes)
        try:
            for entry in _write_records(records, shards, dataset.targets):
                index.add_entry(entry)
        finally:
            shards.close()
        write_index(path, split, dataset, shards.files, index)
    write_names(path, dataset)


def _write_records(records: Records, shards: _ShardWriter, targets: Targets) -> Iterator[Entry]:
    """Write all records; yields where the image of each one is."""
    names = _MemberNames(len(records))
    for number, record in enumerate(records):
        if (size := len(record.data)) >= 1 << 33:
            raise DataError(f"'{printable(record.key)}' has {size:,} bytes; a tar holds members below 8 GiB")
        stem = names(record.key, number)
        offset = shards.add(stem + _extension(record), record.data)
        entry = Entry.of(record, len(shards.files) - 1, offset)
        if targets.kind is Kind.masks:
            mask = png_bytes(decode_mask(record.mask))  # which any reader can decode
            entry = entry._replace(mask=mask, mask_offset=shards.add(stem + f".{MASK}".encode(), mask))
        elif targets:
            shards.add(stem + f".{LISTS}".encode(), json.dumps(targets.values(record.target).tolist()).encode())
        else:
            shards.add(stem + b".cls", b"%d" % record.label)
        yield entry
        shards.close_if_full()


class _ShardWriter:
    """Writes the archives of a split, one after the other."""

    def __init__(self, folder: Path, split: str, shard_bytes: int) -> None:
        self._folder, self._split, self._shard_bytes = folder, split, shard_bytes
        self._file: BinaryIO | None = None
        self.files: list[Path] = []

    def add(self, name: bytes, data: Encoded) -> int:
        """Append a member; returns the offset of its first byte."""
        if self._file is None:
            self.files.append(self._folder / f"{self._split}-{len(self.files):06}.tar")
            self._file = open(self.files[-1], "xb")  # noqa: SIM115  closed by `close`
        self._file.write(ustar.header(name, len(data)))
        offset = self._file.tell()
        self._file.write(data)
        self._file.write(bytes(ustar.padding(len(data))))
        return offset

    def close_if_full(self) -> None:
        """Start another archive with the next member if this one has reached its size."""
        if self._file is not None and self._file.tell() >= self._shard_bytes:
            self.close()

    def close(self) -> None:
        """Complete the current archive."""
        if self._file is not None:
            with self._file:
                self._file.write(ustar.END)
            self._file = None


class _MemberNames:
    """Names of samples in an archive: their keys where every reader takes them unchanged, otherwise their numbers.

    No two names of a split are the same up to their first dot. The names so far are 64-bit hashes in a table of 16
    to 32 bytes per sample; if two keys have the same hash, one of the samples is numbered.

    Args:
        count: number of samples.
    """

    def __init__(self, count: int) -> None:
        self._table = memoryview(bytearray(8 << (2 * count).bit_length())).cast("Q")
        self._last = len(self._table) - 1

    def __call__(self, key: bytes, number: int) -> bytes:
        """The name of sample `number`, without its extension."""
        stem = key[: key.rfind(b".")]
        return stem if _is_safe(key, stem) and self._is_new(stem) else b"%09d" % number

    def _is_new(self, stem: bytes) -> bool:
        value = int.from_bytes(blake2b(stem, digest_size=8).digest(), "little") or 1  # 0 marks a free slot
        at = value & self._last
        while self._table[at]:
            if self._table[at] == value:
                return False
            at = (at + 1) & self._last
        self._table[at] = value
        return True


_UNSAFE = re.compile(
    rb"""
    (^|/) \.{0,2} (/|$)     # a path that is absolute, leads upwards or isn't normalized
    | \.[^/]*$              # a dot in the base name, where readers would split it
    | ^__[^/]*__(/|$)       # webdataset skips it
    | ^\d{9,10}$            # could be the number of another sample
    | [ ]                   # separates the columns of DALI's index
    """,
    re.VERBOSE,
)


def _is_safe(key: bytes, stem: bytes) -> bool:
    """Whether webdataset, DALI, its `wds2idx` and Python's tarfile all read this name unchanged."""
    if not key.lower().endswith(EXTENSIONS) or _UNSAFE.search(stem) or not ustar.fits(stem + b".jpeg"):
        return False
    try:
        return key.decode().isprintable()
    except UnicodeDecodeError:
        return False


def _extension(record: Record) -> bytes:
    """The key's own extension if it matches the image or it isn't an image, otherwise the image's."""
    dot = record.key.rfind(b".")
    own = record.key[dot:] if record.key.lower().endswith(EXTENSIONS) else b""
    try:
        found = f".{extension(record.data)}"
    except DataError:
        return own or b".jpg"
    fits = own and other.EXTENSIONS[own.lower().decode()] == other.EXTENSIONS.get(found)
    return own if fits else found.encode()

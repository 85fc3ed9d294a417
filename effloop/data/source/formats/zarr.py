"""Folders of arrays in chunks: zarr v3, zarr v2 and n5, read and written without a library of theirs.

A split is a group, its header an attribute; the encoded images are one array of bytes in chunks of up
to 256 MiB, and every column is an array of one chunk. Uncompressed, a chunk is the values, so it is mapped.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from effloop.data.image.header import Encoded
from effloop.data.source.base import expand_root, sources
from effloop.data.source.formats.zarr_dialects import N5, ZARR2, ZARR3, Dialect, Layout
from effloop.data.source.storage.arrays import (
    COLUMNS,
    DTYPES,
    Array,
    check_header_crc32c,
    header_crc32c,
    no_split,
    pack,
    write_payload,
)
from effloop.data.source.storage.packed import MappedFiles, Packed, PackedConfig, PackedSource, Piece
from effloop.data.source.storage.writing import SHARD_BYTES, Dataset, Ledger, writes
from effloop.errors import ConfigError, DataError

HEADER, CHECKSUM = "effloop", "effloop_crc32c"
"""Attributes of a split's group: the header, and the CRC-32C of its JSON."""

_DIALECTS = (ZARR3, ZARR2, N5)
_CHUNK = 256 << 20  # ImageNet's originals, 148 GB, are 550 of these; other readers hold a chunk in memory
_BLOCK = 1 << 20  # values of a column that are turned into the format's byte order at a time


@dataclass
class ZarrConfig(PackedConfig):
    """`data=zarr`: nothing beyond what every packed source has."""


@sources.register("zarr", ZarrConfig)
class ZarrSource(PackedSource):
    """A folder of zarr v3, zarr v2 or n5 with a group per split, its chunks mapped."""

    def open_split(self) -> Packed:
        root = expand_root(self.config)
        if not root.is_dir():
            raise ConfigError(
                f"data.root: '{self.config.root}' is a file; data=zarr reads a folder: set data.root=FOLDER"
            )
        dialect = _dialect(root)
        if dialect is None:
            raise DataError(
                f"{root} is no zarr or n5 folder: it has no zarr.json, no .zgroup and no attributes.json of n5; "
                "set data.root=PATH"
            )
        folder, where = root / self.split, f"{root}:{self.split}"
        attributes = dialect.attributes(folder)
        if HEADER not in attributes:
            raise no_split(root, self.split, _splits(root, dialect))
        header = check_header_crc32c(attributes[HEADER], attributes.get(CHECKSUM), where)
        layouts = {name: dialect.layout(folder / name) for name in DTYPES}
        files: list[Path] = []
        arrays = {}
        for name, layout in layouts.items():
            if layout is None:
                continue
            if name != "payload" and layout.count > layout.chunk:
                raise DataError(f"{folder / name} is in several chunks, only one can be mapped; convert it again")
            arrays[name] = Array(len(files), dialect.prefix, layout.dtype, layout.count)
            files += _chunk_files(dialect, folder / name, layout)
        payload = layouts["payload"]
        pieces = [] if payload is None else _pieces(arrays["payload"], payload)
        return pack(header, where, MappedFiles(files), arrays, pieces)

    @classmethod
    def claims(cls, root: Path) -> bool:
        return root.is_dir() and _dialect(root) is not None


def _dialect(root: Path) -> Dialect | None:
    return next((dialect for dialect in _DIALECTS if dialect.is_root(root)), None)


def _splits(root: Path, dialect: Dialect) -> list[str]:
    return [child.name for child in sorted(root.iterdir()) if child.is_dir() and HEADER in dialect.attributes(child)]


def _chunk_files(dialect: Dialect, folder: Path, layout: Layout) -> list[Path]:
    """The files of an array, all there and as long as they should be.

    Raises:
        DataError: one isn't. (A chunk that isn't there is a stretch of zeros to zarr, but not to images.)
    """
    files: list[Path] = []
    for start in range(0, layout.count, layout.chunk):
        path = folder / f"{layout.names}{len(files)}"
        count = layout.chunk if dialect.padded else min(layout.chunk, layout.count - start)
        expected = dialect.prefix + count * layout.dtype.itemsize
        try:
            size = path.stat().st_size
        except PermissionError as error:
            raise DataError(f"{path} can't be read: {error.strerror}") from None
        except OSError as error:
            raise DataError(
                f"{path} is missing ({error.strerror}); it should have {expected:,} bytes: put it back or convert again"
            ) from None
        if size != expected:
            raise DataError(f"{path} has {size:,} bytes, it should have {expected:,}: put it back or convert again")
        files.append(path)
    return files


def _pieces(payload: Array, layout: Layout) -> list[Piece]:
    starts = range(0, layout.count, layout.chunk)
    return [
        Piece(payload.file + number, payload.offset, min(layout.chunk, layout.count - start))
        for number, start in enumerate(starts)
    ]


@writes("zarr")
def write_zarr(path: Path, dataset: Dataset, shard_bytes: int = SHARD_BYTES) -> None:
    """A folder of zarr v3."""
    _write(ZARR3, path, dataset, shard_bytes)


@writes("zarr2")
def write_zarr2(path: Path, dataset: Dataset, shard_bytes: int = SHARD_BYTES) -> None:
    """A folder of zarr v2."""
    _write(ZARR2, path, dataset, shard_bytes)


@writes("n5")
def write_n5(path: Path, dataset: Dataset, shard_bytes: int = SHARD_BYTES) -> None:
    """A folder of n5."""
    _write(N5, path, dataset, shard_bytes)


def _write(dialect: Dialect, path: Path, dataset: Dataset, shard_bytes: int) -> None:
    dialect.write_root(path)
    for split, records in dataset.splits.items():
        folder, ledger = path / split, Ledger(len(dataset.classes), path)
        chunk = _even(records.num_bytes, min(shard_bytes, _CHUNK))
        layout = Layout(np.dtype(np.uint8), records.num_bytes, chunk, dialect.names)
        with _writing(dialect, folder / "payload", layout) as chunks:
            write_payload(records, ledger, chunks.append)
        columns = ledger.columns()
        for name in COLUMNS:
            values = columns[name]
            dtype = values.dtype.newbyteorder(dialect.order)
            layout = Layout(dtype, len(values), max(1, len(values)), dialect.names)
            with _writing(dialect, folder / name, layout) as chunks:
                for start in range(0, len(values), _BLOCK):
                    chunks.append(values[start : start + _BLOCK].astype(layout.dtype).tobytes())
        header = dataset.header(ledger.fingerprint())
        dialect.write_group(folder, {HEADER: header, CHECKSUM: header_crc32c(header)})


def _even(count: int, most: int) -> int:
    """The length of chunks of about the same length, so that the last is not filled up with much."""
    chunks = max(1, -(-count // most))
    return max(1, -(-count // chunks))


@contextmanager
def _writing(dialect: Dialect, folder: Path, layout: Layout) -> Iterator[_Chunks]:
    dialect.write_array(folder, layout)
    chunks = _Chunks(dialect, folder, layout)
    try:
        yield chunks
        chunks.fill_up()
    finally:
        chunks.close()


class _Chunks:
    """Takes an array's bytes and spreads them over its chunks."""

    def __init__(self, dialect: Dialect, folder: Path, layout: Layout) -> None:
        self._dialect, self._folder, self._layout = dialect, folder, layout
        self._file: BinaryIO | None = None
        self._number = self._room = 0

    def append(self, data: Encoded) -> None:
        """Add some bytes, to one chunk or to several."""
        rest = memoryview(data)
        while rest:
            if not self._room:
                self._next()
            assert self._file is not None
            self._file.write(rest[: self._room])
            written = min(len(rest), self._room)
            self._room -= written
            rest = rest[written:]

    def _next(self) -> None:
        self.close()
        layout = self._layout
        path = self._folder / f"{layout.names}{self._number}"
        path.parent.mkdir(exist_ok=True)
        self._file = path.open("xb")
        self._file.write(self._dialect.head(min(layout.chunk, layout.count - self._number * layout.chunk)))
        self._room = layout.chunk * layout.dtype.itemsize
        self._number += 1

    def fill_up(self) -> None:
        """Make the last chunk as long as the others, where the format has it so; the zeros take no space."""
        if self._file is not None and self._dialect.padded:
            self._file.truncate(self._dialect.prefix + self._layout.chunk * self._layout.dtype.itemsize)

    def close(self) -> None:
        """Close the file that is being written."""
        if self._file is not None:
            self._file.close()

"""Folders of arrays in chunks: zarr v3, zarr v2 and n5.

A split is a group with the header as an attribute; the encoded images are an array of bytes in chunks of up to 256
MiB, and every column is an array of one chunk. An uncompressed chunk contains nothing but values, so it is mapped.

Of other programs' folders the arrays are copied (`zarr_arrays`). For EffLoop's own the package `zarr` isn't used:
importing it takes 0.13 s and opening a split 2.4 ms instead of 0.25, it starts five
threads (processes are forked later), it doesn't read n5, and its metadata has other bytes than what is written here.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from effloop.data.image.header import Encoded
from effloop.data.source.base import sources
from effloop.data.source.formats.array_names import ArraysConfig
from effloop.data.source.formats.zarr_arrays import arrays_in, nodes_in
from effloop.data.source.formats.zarr_dialects import N5, ZARR2, ZARR3, Dialect, Layout
from effloop.data.source.root import expand_root, files_in, root_folder
from effloop.data.source.storage.arrays import (
    DIMENSIONS,
    DTYPES,
    INDEXES,
    Array,
    check_header_crc32c,
    header_crc32c,
    no_split,
    pack,
    write_payload,
)
from effloop.data.source.storage.imported import Contents, ImportedSource
from effloop.data.source.storage.mapped import Extent, MappedFiles
from effloop.data.source.storage.packed import Split
from effloop.data.source.storage.writing import SHARD_BYTES, Dataset, SplitColumns, register_writer
from effloop.errors import DataError

HEADER, CHECKSUM = "effloop", "effloop_crc32c"
"""Attributes of a split's group: the header, and the CRC-32C of its JSON."""

_DIALECTS = (ZARR3, ZARR2, N5)
_CHUNK = 256 << 20  # ImageNet's originals, 148 GB, are 550 of these; other readers hold a chunk in memory
_LARGEST = (1 << 31) - 1  # bytes of entropy indexes in their one chunk, which n5 counts in 32 bits; more are left out
_BLOCK = 1 << 20  # values of a column whose byte order is converted at a time


@sources.register("zarr", ArraysConfig)
class ZarrSource(ImportedSource):
    """A folder of zarr v3, v2 or n5: EffLoop's chunks are mapped, arrays of other programs are copied once."""

    config: ArraysConfig

    def open_split(self) -> Split:
        if nodes_in(root := expand_root(self.config)) and (root.is_file() or _dialect(root) is None):
            return super().open_split()
        root = root_folder(self.config)
        dialect = _dialect(root)
        if dialect is None:
            raise DataError(
                f"{root} is no zarr or n5 folder: it has no zarr.json, no .zgroup and no attributes.json of n5; "
                "set data.root=PATH"
            )
        folder, where = root / self.split, f"{root}:{self.split}"
        attributes = dialect.attributes(folder)
        if HEADER not in attributes:
            there = _splits(root, dialect)
            if there:
                raise no_split(root, self.split, there)
            return super().open_split()
        header = check_header_crc32c(attributes[HEADER], attributes.get(CHECKSUM), where)
        files: list[Path] = []
        arrays: dict[str, Array] = {}
        extents: list[Extent] = []
        for name in DTYPES:
            layout = dialect.layout(folder / name, DIMENSIONS.get(name, 1))
            if layout is None:
                continue
            array = arrays[name] = Array(len(files), dialect.header_bytes(layout), layout.dtype, layout.count)
            if name != "payload" and layout.count > layout.chunk:
                raise DataError(f"{folder / name} is in several chunks, only one can be mapped; convert it again")
            files += _chunk_files(dialect, folder / name, layout)
            if name == "payload":  # after its files were found: only then is its length believable
                extents = _extents(array, layout)
        return pack(header, where, MappedFiles(files), arrays, extents)

    def originals(self) -> Sequence[Path]:
        root = expand_root(self.config)
        return [root] if root.is_file() else files_in(root)

    def contents(self, files: Sequence[Path]) -> Contents:
        return arrays_in(expand_root(self.config), self.split, self.config)

    @classmethod
    def claims(cls, root: Path) -> bool:
        return (root.is_dir() and _dialect(root) is not None) or bool(nodes_in(root))


def _dialect(root: Path) -> Dialect | None:
    return next((dialect for dialect in _DIALECTS if dialect.is_root(root)), None)


def _splits(root: Path, dialect: Dialect) -> list[str]:
    return [child.name for child in sorted(root.iterdir()) if child.is_dir() and HEADER in dialect.attributes(child)]


def _chunk_files(dialect: Dialect, folder: Path, layout: Layout) -> list[Path]:
    """The files of an array, all of the expected size; zarr would read a missing one as zeros, which aren't images."""
    files: list[Path] = []
    for start in range(0, layout.count, layout.chunk):
        path = folder / layout.name(len(files))
        count = layout.chunk if dialect.padded else min(layout.chunk, layout.count - start)
        expected = dialect.header_bytes(layout) + count * layout.dtype.itemsize
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


def _extents(payload: Array, layout: Layout) -> list[Extent]:
    starts = range(0, layout.count, layout.chunk)
    return [
        Extent(payload.file + number, payload.offset, min(layout.chunk, layout.count - start))
        for number, start in enumerate(starts)
    ]


@register_writer("zarr")
def write_zarr(path: Path, dataset: Dataset, shard_bytes: int = SHARD_BYTES) -> None:
    """A folder of zarr v3."""
    _write(ZARR3, path, dataset, shard_bytes)


@register_writer("zarr2")
def write_zarr2(path: Path, dataset: Dataset, shard_bytes: int = SHARD_BYTES) -> None:
    """A folder of zarr v2."""
    _write(ZARR2, path, dataset, shard_bytes)


@register_writer("n5")
def write_n5(path: Path, dataset: Dataset, shard_bytes: int = SHARD_BYTES) -> None:
    """A folder of n5."""
    _write(N5, path, dataset, shard_bytes)


def _write(dialect: Dialect, path: Path, dataset: Dataset, shard_bytes: int) -> None:
    dialect.write_group(path, dialect.root)
    for split, records in dataset.splits.items():
        folder, collected = path / split, SplitColumns.of(dataset, path)
        chunk = _even(records.num_bytes, min(shard_bytes, _CHUNK))
        layout = Layout(np.dtype(np.uint8), records.num_bytes, chunk, dialect.prefix)
        with _ChunkWriter(dialect, folder / "payload", layout) as chunks:
            write_payload(records, collected, chunks.append)
        columns = collected.columns()
        if "entropy" in columns and columns["entropy"].size > _LARGEST:
            columns = {name: values for name, values in columns.items() if name not in INDEXES}
        for name, values in columns.items():
            layout = dialect.layout_of(values)
            with _ChunkWriter(dialect, folder / name, layout) as chunks:
                values = values.reshape(-1)
                for start in range(0, len(values), _BLOCK):
                    chunks.append(values[start : start + _BLOCK].astype(layout.dtype).tobytes())
        header = dataset.header(collected.fingerprint(), collected.checksums())
        dialect.write_group(folder, {HEADER: header, CHECKSUM: header_crc32c(header)})


def _even(count: int, most: int) -> int:
    """The length of chunks of nearly equal length, so that the last one needs little padding."""
    chunks = max(1, -(-count // most))
    return max(1, -(-count // chunks))


class _ChunkWriter:
    """Writes an array's metadata, and spreads its bytes over its chunks."""

    def __init__(self, dialect: Dialect, folder: Path, layout: Layout) -> None:
        self._dialect, self._folder, self._layout = dialect, folder, layout
        self._file: BinaryIO | None = None
        self._number = self._room = 0

    def __enter__(self) -> _ChunkWriter:
        self._dialect.write_array(self._folder, self._layout)
        return self

    def append(self, data: Encoded) -> None:
        """Append bytes, to one chunk or to several."""
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
        if self._file is not None:
            self._file.close()
        layout = self._layout
        path = self._folder / layout.name(self._number)
        path.parent.mkdir(exist_ok=True, parents=True)
        self._file = path.open("xb")
        count = min(layout.chunk, layout.count - self._number * layout.chunk)
        self._file.write(self._dialect.chunk_header(layout, count))
        self._room = layout.chunk * layout.dtype.itemsize
        self._number += 1

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close the last chunk, padded to the length of the others if the format requires it; zeros take no space."""
        if self._file is None:
            return
        with self._file:
            if kind is None and self._dialect.padded:
                self._file.truncate(
                    self._dialect.header_bytes(self._layout) + self._layout.chunk * self._layout.dtype.itemsize
                )

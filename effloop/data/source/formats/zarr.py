"""Folders of arrays in chunks: zarr v3, zarr v2 and n5.

A split is a group with the header as an attribute; the encoded images are an array of bytes in chunks of up to 256
MiB, and every column is an array of one chunk. An uncompressed chunk contains nothing but values, so it is mapped.
Metadata is what is written here, and compared with that, not parsed: any other array is one of another program, which
is copied once (`zarr_foreign`), by its package. That isn't used for EffLoop's own: importing `zarr` takes 0.13 s,
opening a split 2.4 ms instead of 0.25, and it starts five threads, while processes are forked later.

https://zarr-specs.readthedocs.io/en/latest/v3/core/index.html, .../v2/v2.0.html and
https://github.com/saalfeldlab/n5#file-system-specification
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
from numpy.typing import NDArray

from effloop.data.image.header import Encoded
from effloop.data.source.base import sources
from effloop.data.source.formats.arrays import ArraysConfig
from effloop.data.source.formats.zarr_foreign import arrays_in, nodes_in, read_json, write_json
from effloop.data.source.root import expand_root, files_in, root_folder
from effloop.data.source.storage.arrays import (
    DTYPES,
    INDEXES,
    Array,
    check_header_crc32c,
    header_crc32c,
    pack,
    write_payload,
)
from effloop.data.source.storage.imported import Contents, ImportedSource
from effloop.data.source.storage.mapped import Extent, MappedFiles
from effloop.data.source.storage.packed import Split, no_split
from effloop.data.source.storage.writing import SHARD_BYTES, Dataset, SplitColumns, register_writer
from effloop.errors import DataError

HEADER, CHECKSUM = "effloop", "effloop_crc32c"
"""Attributes of a split's group: the header, and the CRC-32C of its JSON."""

_CHUNK = 256 << 20  # ImageNet's originals, 148 GB, are 550 of these; other readers hold a chunk in memory
_LARGEST = (1 << 31) - 1  # bytes of a block of n5, which counts them in 32 bits
_BLOCK = 1 << 20  # values of a column whose byte order is converted at a time


@dataclass(frozen=True)
class Layout:
    """An uncompressed array: dtype, number of values, values in a chunk, and the shape of a row, for several
    dimensions, of which the first alone is cut into chunks.
    """

    dtype: np.dtype[Any]
    count: int
    chunk: int
    row: tuple[int, ...] = ()

    def shape(self, count: int) -> list[int]:
        """The shape of an array, or a chunk, of `count` values."""
        return [count // math.prod(self.row), *self.row]


@dataclass(frozen=True)
class Dialect:
    """One of the formats.

    Attributes:
        marker: the file that makes a folder a dataset of this format.
        array_file: the file with an array's metadata.
        attributes_file: the one with a group's attributes.
        group: attributes -> the content of that file.
        array: a layout -> the metadata of an array.
        sizes: that -> (shape of the array, shape of a chunk, dtype).
        chunk_name: number of a chunk, number of dimensions -> its file in the array's folder.
        order: byte order of the values.
        padded: whether the last chunk is as long as the others.
        root: attributes of the root group.
    """

    marker: str
    array_file: str
    attributes_file: str
    group: Callable[[Mapping[str, Any]], Mapping[str, Any]]
    array: Callable[[Layout], dict[str, Any]]
    sizes: Callable[[Mapping[str, Any]], tuple[list[int], list[int], str]]
    chunk_name: Callable[[int, int], str]
    order: Literal["<", ">"] = "<"
    padded: bool = True
    root: Mapping[str, Any] = field(default_factory=dict)

    def attributes(self, folder: Path) -> Mapping[str, Any]:
        """The attributes of a group; empty if there is no such group; raises a DataError if they are damaged."""
        found: Any = read_json(folder / self.attributes_file) if (folder / self.marker).is_file() else None
        found = (found or {}).get("attributes", {}) if self is ZARR3 else found
        return found if isinstance(found, dict) else {}

    def is_root(self, root: Path) -> bool:
        """Whether a folder is a dataset of this format, not necessarily written by EffLoop."""
        try:
            return (root / self.marker).is_file() and (not self.root or "n5" in self.attributes(root))
        except DataError:
            return not self.root

    def layout(self, folder: Path) -> Layout | None:
        """The layout of an array; None if there is no such array.

        Raises:
            DataError: its metadata isn't what is written here.
        """
        meta = read_json(folder / self.array_file)
        if meta is None:
            return None
        try:
            shape, chunk, dtype = self.sizes(meta)
            if all(type(length) is int and length >= 0 for length in (*shape, *chunk)):
                row = tuple(shape[1:])
                order = np.dtype(dtype).newbyteorder(self.order)
                layout = Layout(order, math.prod(shape), math.prod(chunk), row)
                if self.array(layout) == meta and layout.chunk:
                    return layout
        except (LookupError, TypeError, ValueError, ArithmeticError):
            pass
        raise DataError(
            f"{folder / self.array_file} is not as `convert` writes it, such as compressed or of another shape, so it "
            "can't be mapped; convert it again"
        )

    def chunk_header(self, layout: Layout, count: int) -> bytes:
        """The bytes of a chunk before its `count` values: in n5 its mode, number of dimensions, and their lengths."""
        if self is not N5:
            return b""
        shape = layout.shape(count)[::-1]
        return struct.pack(f">HH{len(shape)}I", 0, len(shape), *shape)

    def chunk_bytes(self, layout: Layout, start: int) -> int:
        """The size of the chunk that begins with the value `start`."""
        count = layout.chunk if self.padded else min(layout.chunk, layout.count - start)
        return len(self.chunk_header(layout, 0)) + count * layout.dtype.itemsize

    def write_group(self, folder: Path, attributes: Mapping[str, Any]) -> None:
        """Write a group's metadata; its folder may exist already."""
        if self.marker != self.attributes_file:
            write_json(folder / self.marker, {"zarr_format": 2})
        write_json(folder / self.attributes_file, self.group(attributes))


def _zarr3(layout: Layout) -> dict[str, Any]:
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": layout.shape(layout.count),
        "data_type": layout.dtype.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": layout.shape(layout.chunk)}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": np.zeros((), layout.dtype).item(),
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
        "attributes": {},
    }


def _zarr2(layout: Layout) -> dict[str, Any]:
    return {
        "zarr_format": 2,
        "shape": layout.shape(layout.count),
        "chunks": layout.shape(layout.chunk),
        "dtype": layout.dtype.str,
        "compressor": None,
        "fill_value": np.zeros((), layout.dtype).item(),
        "filters": None,
        "order": "C",
    }


def _n5(layout: Layout) -> dict[str, Any]:
    return {
        "dimensions": layout.shape(layout.count)[::-1],
        "blockSize": layout.shape(layout.chunk)[::-1],
        "dataType": layout.dtype.name,
        "compression": {"type": "raw"},
    }


ZARR3 = Dialect(
    marker="zarr.json",
    array_file="zarr.json",
    attributes_file="zarr.json",
    group=lambda attributes: {"zarr_format": 3, "node_type": "group", "attributes": dict(attributes)},
    array=_zarr3,
    sizes=lambda meta: (meta["shape"], meta["chunk_grid"]["configuration"]["chunk_shape"], meta["data_type"]),
    chunk_name=lambda number, dimensions: "c/" + "/".join([str(number), *["0"] * (dimensions - 1)]),
)
ZARR2 = Dialect(
    marker=".zgroup",
    array_file=".zarray",
    attributes_file=".zattrs",
    group=lambda attributes: attributes,
    array=_zarr2,
    sizes=lambda meta: (meta["shape"], meta["chunks"], meta["dtype"]),
    chunk_name=lambda number, dimensions: ".".join([str(number), *["0"] * (dimensions - 1)]),
)
N5 = Dialect(
    marker="attributes.json",
    array_file="attributes.json",
    attributes_file="attributes.json",
    group=lambda attributes: attributes,
    array=_n5,
    sizes=lambda meta: (meta["dimensions"][::-1], meta["blockSize"][::-1], meta["dataType"]),
    chunk_name=lambda number, dimensions: "/".join([str(number), *["0"] * (dimensions - 1)]),
    order=">",
    padded=False,
    root={"n5": "4.0.0"},
)
_DIALECTS = (ZARR3, ZARR2, N5)


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
            if there := _splits(root, dialect):
                raise no_split(root, self.split, there)
            return super().open_split()
        header = check_header_crc32c(attributes[HEADER], attributes.get(CHECKSUM), where)
        files: list[Path] = []
        arrays: dict[str, Array] = {}
        extents: list[Extent] = []
        for name in DTYPES:
            layout = dialect.layout(folder / name)
            if layout is None:
                continue
            before = len(dialect.chunk_header(layout, 0))
            arrays[name] = Array(len(files), before, layout.dtype, layout.count)
            if name != "payload" and layout.count > layout.chunk:
                raise DataError(f"{folder / name} is in several chunks, only one can be mapped; convert it again")
            chunks = _chunk_files(dialect, folder / name, layout)
            if name == "payload":  # after its files were found: only then is its length believable
                starts = range(0, layout.count, layout.chunk)
                extents = [
                    Extent(len(files) + number, before, min(layout.chunk, layout.count - start))
                    for number, start in enumerate(starts)
                ]
            files += chunks
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
        path = folder / dialect.chunk_name(len(files), 1 + len(layout.row))
        expected = dialect.chunk_bytes(layout, start)
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
        layout = Layout(np.dtype(np.uint8), records.num_bytes, chunk)
        with _ChunkWriter(dialect, folder / "payload", layout) as chunks:
            write_payload(records, collected, chunks.append)
        columns = collected.columns()
        if "entropy" in columns and columns["entropy"].size > _LARGEST:
            columns = {name: values for name, values in columns.items() if name not in INDEXES}
        for name, values in columns.items():
            layout = _one_chunk(dialect, values)
            with _ChunkWriter(dialect, folder / name, layout) as chunks:
                values = values.reshape(-1)
                for start in range(0, len(values), _BLOCK):
                    chunks.append(values[start : start + _BLOCK].astype(layout.dtype).tobytes())
        header = dataset.header(collected.fingerprint(), collected.checksums())
        dialect.write_group(folder, {HEADER: header, CHECKSUM: header_crc32c(header)})


def _one_chunk(dialect: Dialect, values: NDArray[Any]) -> Layout:
    """The layout by which a column is written."""
    dtype = values.dtype.newbyteorder(dialect.order)
    return Layout(dtype, values.size, max(1, values.size), values.shape[1:])


def _even(count: int, most: int) -> int:
    """The length of chunks of nearly equal length, so that the last one needs little padding."""
    chunks = max(1, -(-count // most))
    return max(1, -(-count // chunks))


class _ChunkWriter:
    """Writes an array's metadata, and spreads its bytes over its chunks.

    Raises:
        DataError: the format doesn't allow chunks of this size.
    """

    def __init__(self, dialect: Dialect, folder: Path, layout: Layout) -> None:
        self._dialect, self._folder, self._layout = dialect, folder, layout
        self._file: BinaryIO | None = None
        self._number = self._room = 0

    def __enter__(self) -> _ChunkWriter:
        size = self._dialect.chunk_bytes(self._layout, 0)
        if self._dialect is N5 and size > _LARGEST:
            raise DataError(
                f"{self._folder} would take {size:,} bytes in one block, n5 allows {_LARGEST:,}; choose another format"
            )
        write_json(self._folder / self._dialect.array_file, self._dialect.array(self._layout))
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
        path = self._folder / self._dialect.chunk_name(self._number, 1 + len(layout.row))
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
                self._file.truncate(self._dialect.chunk_bytes(self._layout, 0))

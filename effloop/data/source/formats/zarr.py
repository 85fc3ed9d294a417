"""Folders of arrays in chunks: zarr v3, zarr v2 and n5.

A split is a group with the header as an attribute; the encoded images are an array of bytes in chunks of up to 256
MiB, and every column is an array of one chunk. An uncompressed chunk contains nothing but values, so it is mapped.
Metadata is what is written here, and compared with that, not parsed. Any other array is one of another program, which
is copied once, by the package `zarr` or, of n5, `tensorstore`. These aren't used for EffLoop's own: importing `zarr`
takes 0.13 s, opening a split 2.4 ms instead of 0.25, and it starts five threads, while processes are forked later.

https://zarr-specs.readthedocs.io/en/latest/v3/core/index.html, .../v2/v2.0.html and
https://github.com/saalfeldlab/n5#file-system-specification
"""

from __future__ import annotations

import json
import math
import struct
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Literal, Self

import numpy as np
from numpy.typing import NDArray

from effloop.data.image.header import Encoded
from effloop.data.source.base import sources
from effloop.data.source.formats.arrays import ArrayNames, ArraysConfig, StoredArray, contents_of, has_split
from effloop.data.source.root import begins_with, expand_root, files_in, root_folder
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
from effloop.errors import DataError, optional_package, reason, warn

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
        array: a layout -> the metadata of an array.
        sizes: that -> (shape of the array, shape of a chunk, dtype).
        separator: between the numbers in a chunk's name.
        prefix: before them.
        order: byte order of the values.
    """

    marker: str
    array_file: str
    attributes_file: str
    array: Callable[[Layout], dict[str, Any]]
    sizes: Callable[[Mapping[str, Any]], tuple[list[int], list[int], str]]
    separator: str = "/"
    prefix: str = ""
    order: Literal["<", ">"] = "<"

    def attributes(self, folder: Path) -> Mapping[str, Any]:
        """The attributes of a group; empty if there is no such group; raises a DataError if they are damaged."""
        found: Any = read_json(folder / self.attributes_file) if (folder / self.marker).is_file() else None
        found = (found or {}).get("attributes", {}) if self is ZARR3 else found
        return found if isinstance(found, dict) else {}

    def is_root(self, root: Path) -> bool:
        """Whether a folder is a dataset of this format, not necessarily written by EffLoop."""
        try:
            return (root / self.marker).is_file() and (self is not N5 or "n5" in self.attributes(root))
        except DataError:
            return self is not N5

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
                order = np.dtype(dtype).newbyteorder(self.order)
                layout = Layout(order, math.prod(shape), math.prod(chunk), tuple(shape[1:]))
                if self.array(layout) == meta and layout.chunk:
                    return layout
        except (LookupError, TypeError, ValueError, ArithmeticError):
            pass
        raise DataError(
            f"{folder / self.array_file} is not as `convert` writes it, such as compressed or of another shape, so it "
            "can't be mapped; convert it again"
        )

    def chunk_path(self, folder: Path, number: int, layout: Layout) -> Path:
        """The file of a chunk."""
        return folder / (self.prefix + self.separator.join([str(number), *["0"] * len(layout.row)]))

    def chunk_header(self, layout: Layout, count: int) -> bytes:
        """The bytes of a chunk before its `count` values: in n5 its mode, number of dimensions, and their lengths."""
        if self is not N5:
            return b""
        shape = layout.shape(count)[::-1]
        return struct.pack(f">HH{len(shape)}I", 0, len(shape), *shape)

    def chunk_bytes(self, layout: Layout, start: int) -> int:
        """The size of the chunk that begins with the value `start`: of n5 the last one is shorter, not padded."""
        count = min(layout.chunk, layout.count - start) if self is N5 else layout.chunk
        return len(self.chunk_header(layout, 0)) + count * layout.dtype.itemsize

    def write_group(self, folder: Path, attributes: Mapping[str, Any]) -> None:
        """Write a group's metadata; its folder may exist already."""
        if self is ZARR3:
            attributes = {"zarr_format": 3, "node_type": "group", "attributes": dict(attributes)}
        if self is ZARR2:
            write_json(folder / self.marker, {"zarr_format": 2})
        write_json(folder / self.attributes_file, attributes)


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
    *("zarr.json",) * 3,
    array=_zarr3,
    sizes=lambda meta: (meta["shape"], meta["chunk_grid"]["configuration"]["chunk_shape"], meta["data_type"]),
    prefix="c/",
)
ZARR2 = Dialect(
    *(".zgroup", ".zarray", ".zattrs"),
    array=_zarr2,
    sizes=lambda meta: (meta["shape"], meta["chunks"], meta["dtype"]),
    separator=".",
)
N5 = Dialect(
    *("attributes.json",) * 3,
    array=_n5,
    sizes=lambda meta: (meta["dimensions"][::-1], meta["blockSize"][::-1], meta["dataType"]),
    order=">",
)


@sources.register("zarr", ArraysConfig)
class ZarrSource(ImportedSource):
    """A folder of zarr v3, v2 or n5: EffLoop's chunks are mapped, arrays of other programs are copied once."""

    config: ArraysConfig

    def open_split(self) -> Split:
        root = expand_root(self.config)
        dialect = None if root.is_file() else _dialect(root)
        if dialect is None:
            if nodes_in(root):
                return super().open_split()
            raise DataError(
                f"{root_folder(self.config)} is no zarr or n5 folder: it has no zarr.json, no .zgroup and no "
                "attributes.json of n5; set data.root=PATH"
            )
        folder, where = root / self.split, f"{root}:{self.split}"
        attributes = dialect.attributes(folder)
        if HEADER not in attributes:
            there = [each.name for each in sorted(root.iterdir()) if HEADER in dialect.attributes(each)]
            if there:
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
            before, first = len(dialect.chunk_header(layout, 0)), len(files)
            arrays[name] = Array(first, before, layout.dtype, layout.count)
            if name != "payload" and layout.count > layout.chunk:
                raise DataError(f"{folder / name} is in several chunks, only one can be mapped; convert it again")
            for number, start in enumerate(range(0, layout.count, layout.chunk)):
                files.append(_checked(dialect.chunk_path(folder / name, number, layout), dialect, layout, start))
                if name == "payload":
                    extents.append(Extent(first + number, before, min(layout.chunk, layout.count - start)))
        return pack(header, where, MappedFiles(files), arrays, extents if "payload" in arrays else None)

    def originals(self) -> Sequence[Path]:
        return files_in(expand_root(self.config))

    def contents(self, files: Sequence[Path]) -> Contents:
        root = expand_root(self.config)
        if all(path.is_dir() and not _is_zarr(path) for path in nodes_in(root)):
            arrays: Mapping[str, StoredArray] = _n5_arrays(root)
            names = ArrayNames([*arrays], str(self.config.root), self.config)
            _turn(arrays, root, names.labels())
        else:
            arrays = _zarr_arrays(root)
            names = ArrayNames([*arrays], str(self.config.root), self.config)
        return contents_of(names, self.split, self.config, arrays.__getitem__)

    @classmethod
    def claims(cls, root: Path) -> bool:
        return (root.is_dir() and _dialect(root) is not None) or bool(nodes_in(root))


def _dialect(root: Path) -> Dialect | None:
    return next((dialect for dialect in (ZARR3, ZARR2, N5) if dialect.is_root(root)), None)


def _checked(path: Path, dialect: Dialect, layout: Layout, start: int) -> Path:
    """A chunk's file, which has the expected size; zarr would read a missing one as zeros, which aren't images."""
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
    return path


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
    dialect.write_group(path, {"n5": "4.0.0"} if dialect is N5 else {})
    for split, records in dataset.splits.items():
        folder, collected, size = path / split, SplitColumns.of(dataset, path), records.num_bytes
        chunks = max(1, -(-size // min(shard_bytes, _CHUNK)))  # of nearly equal length: the last needs little padding
        layout = Layout(np.dtype(np.uint8), size, max(1, -(-size // chunks)))
        with ChunkWriter(dialect, folder / "payload", layout) as payload:
            write_payload(records, collected, payload.append)
        columns = collected.columns()
        if "entropy" in columns and columns["entropy"].size > _LARGEST:
            columns = {name: values for name, values in columns.items() if name not in INDEXES}
        for name, values in columns.items():
            dtype = values.dtype.newbyteorder(dialect.order)
            layout = Layout(dtype, values.size, max(1, values.size), values.shape[1:])
            with ChunkWriter(dialect, folder / name, layout) as column:
                for start in range(0, values.size, _BLOCK):
                    column.append(values.reshape(-1)[start : start + _BLOCK].astype(dtype).tobytes())
        header = dataset.header(collected.fingerprint(), collected.checksums())
        dialect.write_group(folder, {HEADER: header, CHECKSUM: header_crc32c(header)})


class ChunkWriter:
    """Writes an array's metadata, and spreads its bytes over its chunks.

    Raises:
        DataError: the format doesn't allow chunks of this size.
    """

    def __init__(self, dialect: Dialect, folder: Path, layout: Layout) -> None:
        self._dialect, self._folder, self._layout = dialect, folder, layout
        self._file: BinaryIO | None = None
        self._number = self._room = 0

    def __enter__(self) -> Self:
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
            file = self._file if self._room and self._file else self._next()
            written = file.write(rest[: self._room])
            self._room -= written
            rest = rest[written:]

    def _next(self) -> BinaryIO:
        if self._file is not None:
            self._file.close()
        layout = self._layout
        path = self._dialect.chunk_path(self._folder, self._number, layout)
        path.parent.mkdir(exist_ok=True, parents=True)
        self._file = path.open("xb")
        count = min(layout.chunk, layout.count - self._number * layout.chunk)
        self._file.write(self._dialect.chunk_header(layout, count))
        self._room = layout.chunk * layout.dtype.itemsize
        self._number += 1
        return self._file

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close the last chunk, padded to the length of the others if the format requires it; zeros take no space."""
        if self._file is not None:
            with self._file:
                if kind is None and self._dialect is not N5:
                    self._file.truncate(self._dialect.chunk_bytes(self._layout, 0))


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write metadata, as all three formats have it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n")


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file; None if there is no such file; a DataError if it is damaged."""
    try:
        content = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise DataError(f"{path} can't be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise DataError(f"{path} is damaged: it doesn't hold metadata as JSON; put it back or convert again")
    return content


# Zarr and n5 of other programs, whatever their chunks and codecs.

_MARKERS = ("zarr.json", ".zgroup", ".zarray")  # files that a group or an array has
_ENDINGS = (".zarr", ".n5", ".zip")
_DEEPEST = 8  # groups in groups
_LOOKED_AT = 8


def nodes_in(root: Path) -> list[Path]:
    """Groups, arrays and archives of zarr or n5 that say that a path holds them: itself, or some in it.

    In a folder that is neither, those are looked at that have a split in their name, or one of the usual endings, and
    the first few in these.
    """
    if _is_node(root):
        return [root]
    chosen = sorted(root.iterdir()) if root.is_dir() else []
    chosen = [path for path in chosen if path.suffix in _ENDINGS or has_split(path.name)]
    inner = [child for path in chosen if path.is_dir() for child in islice(path.iterdir(), _LOOKED_AT)]
    return [path for path in (*chosen, *inner) if _is_node(path)]


def _is_node(path: Path) -> bool:
    if path.is_file():
        return _is_archive(path)
    try:
        return _is_zarr(path) or bool({"n5", "dimensions"} & (read_json(path / "attributes.json") or {}).keys())
    except DataError:
        return False


def _is_zarr(path: Path) -> bool:
    return any((path / marker).is_file() for marker in _MARKERS)


def _is_archive(path: Path) -> bool:
    """Whether a file is a zip archive of a group or an array."""
    if not begins_with(path, b"PK\x03\x04"):
        return False
    try:
        with zipfile.ZipFile(path) as archive:
            return any(marker in archive.NameToInfo for marker in _MARKERS)
    except (zipfile.BadZipFile, ValueError, NotImplementedError, OSError):
        return False


@contextmanager
def _reading(path: str, package: str) -> Iterator[None]:
    """Errors of a package about damaged metadata or chunks become a `DataError`."""
    try:
        with warnings.catch_warnings(action="ignore"):  # about other files in the folder
            yield
    except (OSError, LookupError, RuntimeError, ValueError, TypeError, OverflowError, zipfile.BadZipFile) as error:
        raise DataError(f"{path} can't be read by {package}: {reason(error)[:200]}; get it again") from None


class _ZarrArray(StoredArray):
    def __init__(self, name: str, array: Any) -> None:
        self.name, self._array = name, array
        self.shape, self.dtype = tuple(array.shape), np.dtype(array.dtype)
        self.chunk_rows = array.chunks[0] if array.chunks else 1

    def check_written(self) -> None:
        with _reading(self.name, "zarr"):
            there, needed = self._array.nchunks_initialized, self._array.nchunks
        if there < needed and len(self.shape) > 1:  # of labels, zarr leaves out chunks of zeros as a rule
            warn(
                f"{self.name}: {there:,} of {needed:,} chunks are there, the others are black images; if they aren't "
                "meant to be, get or write them again"
            )

    def blocks(self, rows: int) -> Iterator[NDArray[Any]]:
        if "pickle" in json.dumps(self._array.metadata.to_dict(), default=repr):  # a codec that would run code
            raise DataError(f"{self.name} holds pickled objects, which could run code: save it anew as plain values")
        for start in range(0, len(self), rows):
            with _reading(self.name, "zarr"):
                found = np.asarray(self._array[start : start + rows])
            yield found.astype(object) if found.dtype.kind == "T" else found


def _zarr_arrays(root: Path) -> dict[str, StoredArray]:
    zarr = optional_package("zarr", "data=zarr, of a folder that EffLoop didn't write,", "effloop[zarr]")

    def members(path: Path, depth: int) -> dict[str, Any]:
        """All nodes by their path: of a group, an archive of one, or a folder with several of these."""
        if path.is_file() or _is_zarr(path):
            node = zarr.open(zarr.storage.ZipStore(path, mode="r") if path.is_file() else str(path), mode="r")
            return {"": node} if isinstance(node, zarr.Array) else dict(node.members(max_depth=_DEEPEST))
        found: dict[str, Any] = {}
        for child in sorted(path.iterdir()) if depth < _DEEPEST else ():
            if child.is_dir() or _is_archive(child):
                for name, node in members(child, depth + 1).items():
                    found[f"{child.name}/{name}".rstrip("/")] = node
        return found

    with _reading(str(root), "zarr"):
        nodes = members(root, 0).items()
        return {name: _ZarrArray(f"{root}/{name}", node) for name, node in nodes if isinstance(node, zarr.Array)}


class _N5Array(StoredArray):
    """An array in blocks, with the dimensions as n5 lists them until it is turned around."""

    def __init__(self, folder: Path) -> None:
        store = optional_package("tensorstore", "N5 of other programs", "effloop[n5]")
        self.name = str(folder)
        spec = {"driver": "n5", "kvstore": {"driver": "file", "path": str(folder)}}
        with _reading(self.name, "tensorstore"):
            self.set(store.open(spec, open=True, read=True).result())

    def set(self, array: Any) -> None:
        self.array, self.shape, self.dtype = array, tuple(array.shape), array.dtype.numpy_dtype
        self.chunk_rows = array.chunk_layout.read_chunk.shape[0] if self.shape else 1

    def blocks(self, rows: int) -> Iterator[NDArray[Any]]:
        for start in range(0, len(self), rows):
            with _reading(self.name, "tensorstore"):
                yield np.asarray(self.array[start : min(start + rows, len(self))].read().result())


def _n5_arrays(root: Path) -> dict[str, _N5Array]:
    files = (file for depth in range(_DEEPEST) for file in sorted(root.glob("*/" * depth + "attributes.json")))
    folders = [file.parent for file in files if "dimensions" in (read_json(file) or {})]
    return {folder.relative_to(root).as_posix(): _N5Array(folder) for folder in folders}


def _turn(arrays: Mapping[str, StoredArray], root: Path, labels: Sequence[str]) -> None:
    """Turn dimensions around, as z5py and zarr have them: n5 lists the fastest first, so that N images are (W, H, N).

    What tensorstore wrote has (N, H, W). Which it is, the number of labels says, of all arrays together.

    Raises:
        DataError: both are as likely.
    """
    others = [array.shape for name, array in arrays.items() if len(array.shape) > 1 and name not in labels]
    counts = [arrays[name].shape for name in labels if arrays[name].shape]
    plain, turned = (len({shape[end] for shape in counts} & {shape[end] for shape in others}) for end in (0, -1))
    if plain and plain == turned:
        raise DataError(
            f"{root} has images of as many pixels as it has samples, so that their dimensions can't be told: write it "
            "as Zarr, or with another number of samples"
        )
    for array in arrays.values() if turned >= plain else ():
        assert isinstance(array, _N5Array)
        array.set(array.array.T)

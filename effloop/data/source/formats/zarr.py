"""Folders of arrays in chunks: zarr v3, zarr v2 and n5.

A split is a group with the header as an attribute; the encoded images are an array of bytes in chunks of up to 256
MiB, and every column is an array of one chunk. An uncompressed chunk contains nothing but values, so it is mapped.
Metadata is what is written here, and compared with that, not parsed. Any other array of zarr is one of another program,
which is copied once, by the package `zarr`. It isn't used for EffLoop's own: importing it takes 0.13 s, opening a split
2.4 ms instead of 0.25, and it starts five threads, while processes are forked later.

https://zarr-specs.readthedocs.io/en/latest/v3/core/index.html, .../v2/v2.0.html and
https://github.com/saalfeldlab/n5#file-system-specification
"""

from __future__ import annotations

import json
import math
import os
import struct
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from effloop.data.image.header import Encoded
from effloop.data.source.base import sources
from effloop.data.source.formats.arrays import ArrayNames, ArraysConfig, StoredArray, contents_of, has_split
from effloop.data.source.root import files_in, root_folder
from effloop.data.source.storage import arrays as mapped
from effloop.data.source.storage import imported, packed, writing
from effloop.errors import DataError, optional_package, reason

HEADER, CHECKSUM = "effloop", "effloop_crc32c"  # attributes of a split's group: the header, and the CRC-32C of its JSON
_CHUNK = 256 << 20  # ImageNet's originals, 148 GB, are 550 of these; other readers hold a chunk in memory
_LARGEST = (1 << 31) - 1  # bytes of a block of n5, which counts them in 32 bits
_BLOCK = 1 << 20  # values of a column whose byte order is converted at a time


class Dialect(NamedTuple):
    """One of the formats."""

    attributes: str  # file of a group's attributes
    array: str  # file of an array's metadata
    prefix: str  # in front of the numbers in a chunk's name
    separator: str  # between these
    order: str  # of the bytes of a value


ZARR3 = Dialect("zarr.json", "zarr.json", "c/", "/", "<")
ZARR2 = Dialect(".zattrs", ".zarray", "", ".", "<")
N5 = Dialect("attributes.json", "attributes.json", "", "/", ">")
_DIALECTS = (ZARR3, ZARR2, N5)


def _metadata(dialect: Dialect, dtype: np.dtype[Any], shape: Sequence[int], chunk: Sequence[int]) -> dict[str, Any]:
    shape, chunk = [*shape], [*chunk]
    if dialect is N5:
        sizes = {"dimensions": shape[::-1], "blockSize": chunk[::-1]}
        return {**sizes, "dataType": dtype.name, "compression": {"type": "raw"}}
    fill = np.zeros((), dtype).item()
    if dialect is ZARR2:
        rest = {"compressor": None, "fill_value": fill, "filters": None, "order": "C"}
        return {"zarr_format": 2, "shape": shape, "chunks": chunk, "dtype": dtype.str, **rest}
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": shape,
        "data_type": dtype.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": fill,
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
        "attributes": {},
    }


def _layout(dialect: Dialect, file: Path, meta: Mapping[str, Any]) -> tuple[np.dtype[Any], list[int], list[int]]:
    """Dtype of an array, its shape, and that of a chunk; a DataError if its metadata isn't what is written here."""
    try:
        if dialect is N5:
            shape, chunk, dtype = meta["dimensions"][::-1], meta["blockSize"][::-1], meta["dataType"]
        else:
            shape = meta["shape"]
            chunk = meta["chunks"] if dialect is ZARR2 else meta["chunk_grid"]["configuration"]["chunk_shape"]
            dtype = meta["dtype" if dialect is ZARR2 else "data_type"]
        found = np.dtype(dtype).newbyteorder(dialect.order)
        lengths = all(type(length) is int and length >= 0 for length in (*shape, *chunk)) and chunk[0] > 0
        rows_only = len(chunk) == len(shape) and chunk[1:] == shape[1:]  # cut along the first dimension
        if lengths and rows_only and _metadata(dialect, found, shape, chunk) == meta:
            return found, shape, chunk
    except (LookupError, TypeError, ValueError, ArithmeticError):
        pass
    raise DataError(
        f"{file} is not as `convert` writes it, such as compressed or of another shape, so it can't be mapped; convert "
        "it again"
    )


def _chunk_path(dialect: Dialect, folder: Path, number: int, dimensions: int) -> Path:
    return folder / (dialect.prefix + dialect.separator.join([str(number), *["0"] * (dimensions - 1)]))


def _chunk_header(dialect: Dialect, shape: Sequence[int]) -> bytes:
    """What is in front of a chunk's values: in n5 its mode, number of dimensions, and their lengths."""
    return struct.pack(f">HH{len(shape)}I", 0, len(shape), *shape[::-1]) if dialect is N5 else b""


def _attributes(dialect: Dialect, folder: Path) -> Mapping[str, Any]:
    """The attributes of a group; empty if there is no such group; raises a DataError if they are damaged."""
    found: Any = read_json(folder / dialect.attributes) or {}
    found = found.get("attributes", {}) if dialect is ZARR3 else found
    return found if isinstance(found, dict) else {}


@sources.register("zarr", ArraysConfig)
class ZarrSource(imported.ImportedSource):
    """A folder of zarr v3, v2 or n5: EffLoop's chunks are mapped, zarr's arrays of other programs are copied once."""

    config: ArraysConfig

    def open_split(self) -> packed.Split:
        root = root_folder(self.config)
        folder, where = root / self.split, f"{root}:{self.split}"
        dialect = next((each for each in _DIALECTS if HEADER in _attributes(each, folder)), None)
        if dialect is not None:
            attributes = _attributes(dialect, folder)
            header = mapped.check_header_crc32c(attributes[HEADER], attributes.get(CHECKSUM), where)
            return _open(dialect, folder, header, where)
        if not _holds_arrays(root):
            raise DataError(f"{root} is no folder of zarr, and no n5 that EffLoop wrote; set data.root=PATH")
        there = [each for each in sorted(root.iterdir()) if any(HEADER in _attributes(of, each) for of in _DIALECTS)]
        if there:
            raise packed.no_split(root, self.split, [each.name for each in there])
        return super().open_split()

    @classmethod
    def claims(cls, root: Path) -> bool:
        return root.is_dir() and _holds_arrays(root)

    def originals(self) -> Sequence[Path]:
        return files_in(root_folder(self.config))

    def contents(self, files: Sequence[Path]) -> imported.Contents:
        root, arrays = Path(os.path.abspath(root_folder(self.config))), dict[str, StoredArray]()
        for file in files:
            meta = (read_json(file) or {}) if file.name in (ZARR2.array, ZARR3.array) else {}
            if file.name == ZARR2.array or meta.get("node_type") == "array":
                if "pickle" in json.dumps(meta):  # a codec that would run code
                    raise DataError(f"{file} holds pickled objects, which could run code: save it anew as plain values")
                arrays[file.parent.relative_to(root).as_posix()] = _stored(file.parent)
        names = ArrayNames([*arrays], str(self.config.root), self.config)
        return contents_of(names, self.split, self.config, arrays.__getitem__)


def _open(dialect: Dialect, folder: Path, header: Mapping[str, Any], where: str) -> packed.Split:
    files: list[Path] = []
    arrays: dict[str, mapped.Array] = {}
    payload: list[packed.Extent] | None = None
    for name in mapped.DTYPES:
        file = folder / name / dialect.array
        meta = read_json(file)
        if meta is None:
            continue
        dtype, shape, chunk = _layout(dialect, file, meta)
        before, extents = len(_chunk_header(dialect, [0] * len(shape))), list[packed.Extent]()
        for number, start in enumerate(range(0, shape[0], chunk[0])):
            rows = min(chunk[0], shape[0] - start)
            stored = rows if dialect is N5 else chunk[0]  # of n5 the last one is shorter, not padded
            size = before + stored * math.prod(shape[1:]) * dtype.itemsize
            extents.append(packed.Extent(len(files), before, rows))
            files.append(_checked(_chunk_path(dialect, folder / name, number, len(shape)), size))
        if name == "payload":
            payload = extents
        elif len(extents) > 1:
            raise DataError(f"{folder / name} is in several chunks, only one can be mapped; convert it again")
        arrays[name] = mapped.Array(len(files) - len(extents), before, dtype, math.prod(shape), len(shape))
    return mapped.pack(header, where, packed.MappedFiles(files), arrays, payload)


def _checked(path: Path, expected: int) -> Path:
    """A chunk's file, which has the expected size; zarr would read a missing one as zeros, which aren't images."""
    try:
        found = f"has {(size := path.stat().st_size):,} bytes"
    except OSError as error:
        size, found = -1, f"can't be read ({error.strerror})"
    if size != expected:
        raise DataError(f"{path} {found}, it should have {expected:,} bytes: put it back or convert again")
    return path


def _writer(dialect: Dialect) -> writing.Writer:
    def write(path: Path, dataset: writing.Dataset) -> None:
        _write_group(dialect, path, {"n5": "4.0.0"} if dialect is N5 else {})
        for split, records in dataset.splits.items():
            folder, collected, size = path / split, writing.SplitColumns.of(dataset, path), records.num_bytes
            chunks = max(1, -(-size // min(dataset.shard_bytes, _CHUNK)))  # nearly equal: the last needs no padding
            payload, rows = mapped.payload_of(records, collected), -(-size // chunks)
            _write_array(dialect, folder / "payload", np.dtype(np.uint8), [size], rows, payload)
            columns = collected.columns()
            if "entropy" in columns and columns["entropy"].size > _LARGEST:
                columns = {name: values for name, values in columns.items() if name not in mapped.INDEXES}
            for name, values in columns.items():
                dtype, flat = values.dtype.newbyteorder(dialect.order), values.reshape(-1)  # type: ignore[arg-type]
                blocks = (flat[at : at + _BLOCK].astype(dtype).tobytes() for at in range(0, flat.size, _BLOCK))
                _write_array(dialect, folder / name, dtype, values.shape, len(values), blocks)
            header = dataset.header(collected.fingerprint(), collected.checksums())
            _write_group(dialect, folder, {HEADER: header, CHECKSUM: mapped.header_crc32c(header)})

    return write


for _name, _dialect in (("zarr", ZARR3), ("zarr2", ZARR2), ("n5", N5)):
    writing.register_writer(_name)(_writer(_dialect))


def _write_group(dialect: Dialect, folder: Path, attributes: Mapping[str, Any]) -> None:
    """Write a group's metadata; its folder may exist already."""
    if dialect is ZARR3:
        attributes = {"zarr_format": 3, "node_type": "group", "attributes": dict(attributes)}
    if dialect is ZARR2:
        _write_json(folder / ".zgroup", {"zarr_format": 2})
    _write_json(folder / dialect.attributes, attributes)


def _write_array(
    dialect: Dialect, folder: Path, dtype: np.dtype[Any], shape: Sequence[int], rows: int, values: Iterable[Encoded]
) -> None:
    """An array's metadata, and its bytes in chunks of so many rows; a DataError if the format allows none of these."""
    chunk = [max(1, rows), *shape[1:]]
    size = math.prod(chunk) * dtype.itemsize
    if dialect is N5 and size > _LARGEST:
        raise DataError(f"{folder} would take {size:,} bytes in a block, n5 allows {_LARGEST:,}; use another format")
    _write_json(folder / dialect.array, _metadata(dialect, dtype, shape, chunk))
    file: BinaryIO | None = None
    room = number = 0
    for data in values:
        rest = memoryview(data)
        while rest:
            if not room or file is None:
                if file is not None:
                    file.close()
                path = _chunk_path(dialect, folder, number, len(shape))
                path.parent.mkdir(exist_ok=True, parents=True)
                file = path.open("xb")
                file.write(_chunk_header(dialect, [min(chunk[0], shape[0] - number * chunk[0]), *shape[1:]]))
                room, number = size, number + 1
            written = file.write(rest[:room])
            room, rest = room - written, rest[written:]
    if file is not None:
        with file:
            if dialect is not N5:  # the last chunk is as long as the others; zeros take no space
                file.truncate(size)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
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


_MARKERS = ("zarr.json", ".zgroup", ".zarray")
_LOOKED_AT = 8


def _holds_arrays(root: Path) -> bool:
    """Whether a folder is zarr, or has some, or is n5 with the version that is written here.

    Looked at are those in it that have a split in their name, or the usual ending, and the first few in these.
    """
    chosen = [path for path in root.iterdir() if path.suffix == ".zarr" or has_split(path.name)]
    inner = (child for path in chosen if path.is_dir() for child in islice(path.iterdir(), _LOOKED_AT))
    with suppress(DataError):  # of a file that is another program's
        if "n5" in (read_json(root / N5.attributes) or {}):
            return True
    return any((path / marker).is_file() for path in (root, *chosen, *inner) for marker in _MARKERS)


@contextmanager
def _reading(path: Path) -> Iterator[Any]:
    """The package, whose errors about damaged metadata or chunks become a `DataError`."""
    zarr = optional_package("zarr", "data=zarr, of a folder that EffLoop didn't write,", "effloop[zarr]")
    try:
        with warnings.catch_warnings(action="ignore"):  # about other files in the folder
            yield zarr
    except (OSError, LookupError, RuntimeError, ValueError, TypeError, OverflowError) as error:
        raise DataError(f"{path} can't be read by zarr: {reason(error)[:200]}; get it again") from None


def _stored(path: Path) -> StoredArray:
    with _reading(path) as zarr:
        array = zarr.open_array(str(path), mode="r")

    def blocks(rows: int) -> Iterator[NDArray[Any]]:
        for start in range(0, array.shape[0], rows):
            with _reading(path):
                found = np.asarray(array[start : start + rows])
            yield found.astype(object) if found.dtype.kind == "T" else found

    return StoredArray(str(path), array.shape, np.dtype(array.dtype), blocks, array.chunks[0] if array.chunks else 1)

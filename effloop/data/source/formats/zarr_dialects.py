"""The metadata, chunk names and chunk layout of zarr v3, zarr v2 and n5.

https://zarr-specs.readthedocs.io/en/latest/v3/core/index.html, .../v2/v2.0.html and
https://github.com/saalfeldlab/n5#file-system-specification
"""

from __future__ import annotations

import json
import math
import struct
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from effloop.errors import DataError


@dataclass(frozen=True)
class Layout:
    """An uncompressed array: dtype, number of values, values per chunk.

    `prefix` precedes a chunk's number in its path in the array's folder, `suffix` follows it; `row` is the shape of
    an array of several dimensions but for the first one, by which alone it is cut into chunks.
    """

    dtype: np.dtype[Any]
    count: int
    chunk: int
    prefix: str = ""
    suffix: str = ""
    row: tuple[int, ...] = ()

    def name(self, number: int) -> str:
        """The path of a chunk in the array's folder."""
        return f"{self.prefix}{number}{self.suffix}"

    def shape(self, count: int) -> list[int]:
        """The shape of an array, or a chunk, of `count` values."""
        return [count // math.prod(self.row), *self.row]


class Dialect(ABC):
    """What is specific to one of the formats."""

    marker: ClassVar[str]
    """The file that makes a folder a dataset of this format."""
    array_file: ClassVar[str]
    """The file with an array's metadata."""
    prefix: ClassVar[str] = ""
    """`Layout.prefix` of what is written."""
    separator: ClassVar[str] = "/"
    """What is between the numbers of a chunk's name, one for each dimension."""
    order: ClassVar[Literal["<", ">"]] = "<"
    """Byte order of what is written."""
    padded: ClassVar[bool] = True
    """Whether the last chunk is as long as the others."""
    root: ClassVar[Mapping[str, str]] = {}
    """Attributes of the root group."""

    def is_root(self, root: Path) -> bool:
        """Whether a folder is a dataset of this format, not necessarily written by EffLoop."""
        return (root / self.marker).is_file()

    @abstractmethod
    def attributes(self, folder: Path) -> Mapping[str, Any]:
        """The attributes of a group; empty if there is no such group.

        Raises:
            DataError: its metadata is damaged.
        """

    def layout(self, folder: Path, dimensions: int = 1) -> Layout | None:
        """The layout of an array; None if there is no such array.

        Raises:
            DataError: its metadata is damaged, or it is compressed or has another number of dimensions.
        """
        meta = _read(folder / self.array_file)
        return None if meta is None else self._parse(folder, meta, dimensions)

    def layout_of(self, values: NDArray[Any]) -> Layout:
        """The layout by which a column is written: one chunk."""
        dtype, row = values.dtype.newbyteorder(self.order), values.shape[1:]
        return Layout(dtype, values.size, max(1, values.size), self.prefix, f"{self.separator}0" * len(row), row)

    @abstractmethod
    def _parse(self, folder: Path, meta: Mapping[str, Any], dimensions: int) -> Layout: ...

    def header_bytes(self, layout: Layout) -> int:
        """Bytes of a chunk before its values."""
        return len(self.chunk_header(layout, 0))

    def chunk_header(self, layout: Layout, count: int) -> bytes:
        """The bytes of a chunk before its `count` values."""
        return b""

    @abstractmethod
    def write_group(self, folder: Path, attributes: Mapping[str, Any]) -> None:
        """Write a group's metadata; its folder may exist already."""

    def write_array(self, folder: Path, layout: Layout) -> None:
        """Write an array's metadata.

        Raises:
            DataError: the format doesn't allow chunks of this size.
        """
        _write(folder / self.array_file, self._metadata(folder, layout))

    @abstractmethod
    def _metadata(self, folder: Path, layout: Layout) -> dict[str, Any]: ...


class _Zarr3(Dialect):
    marker = array_file = "zarr.json"
    prefix = "c/"

    def attributes(self, folder: Path) -> Mapping[str, Any]:
        found: Any = (_read(folder / self.marker) or {}).get("attributes", {})
        return found if isinstance(found, dict) else {}

    def _parse(self, folder: Path, meta: Mapping[str, Any], dimensions: int) -> Layout:
        grid, keys = meta.get("chunk_grid"), meta.get("chunk_key_encoding")
        regular = grid.get("configuration") if isinstance(grid, dict) else None
        chunk = regular.get("chunk_shape") if isinstance(regular, dict) else None
        _only(folder, "chunk_grid", grid, [_regular(chunk)])
        _only(folder, "chunk_key_encoding", keys, [_keys("/"), _keys("."), {"name": "default"}])
        dtype = _dtype(folder, "data_type", meta.get("data_type"), "<", dimensions)
        _only(folder, "codecs", meta.get("codecs"), [_LITTLE, _BYTES] if dtype.itemsize == 1 else [_LITTLE])
        _only(folder, "storage_transformers", meta.get("storage_transformers", []), [[]])
        separator = "." if keys == _keys(".") else "/"
        count, chunk, row = _sizes(folder, {"shape": meta.get("shape"), "chunks": chunk}, dimensions)
        return Layout(dtype, count, chunk, f"c{separator}", f"{separator}0" * len(row), row)

    def write_group(self, folder: Path, attributes: Mapping[str, Any]) -> None:
        _write(folder / self.marker, {"zarr_format": 3, "node_type": "group", "attributes": dict(attributes)})

    def _metadata(self, folder: Path, layout: Layout) -> dict[str, Any]:
        return {
            "zarr_format": 3,
            "node_type": "array",
            "shape": layout.shape(layout.count),
            "data_type": layout.dtype.name,
            "chunk_grid": _regular(layout.shape(layout.chunk)),
            "chunk_key_encoding": _keys("/"),
            "fill_value": layout.dtype.type(0).item(),
            "codecs": _LITTLE,
            "attributes": {},
        }


_LITTLE = [{"name": "bytes", "configuration": {"endian": "little"}}]
_BYTES = [{"name": "bytes"}]  # values of one byte need no order


def _regular(chunk_shape: Any) -> dict[str, Any]:
    return {"name": "regular", "configuration": {"chunk_shape": chunk_shape}}


def _keys(separator: str) -> dict[str, Any]:
    return {"name": "default", "configuration": {"separator": separator}}


class _Zarr2(Dialect):
    marker, array_file = ".zgroup", ".zarray"
    separator = "."

    def attributes(self, folder: Path) -> Mapping[str, Any]:
        return (_read(folder / ".zattrs") or {}) if self.is_root(folder) else {}

    def _parse(self, folder: Path, meta: Mapping[str, Any], dimensions: int) -> Layout:
        _only(folder, "compressor", meta.get("compressor"), [None])
        _only(folder, "filters", meta.get("filters") or None, [None])
        dtype = meta.get("dtype")
        _only(folder, "dtype", dtype, ["|u1", "<u2", "<u4", "<u8", *(["<f4"] if dimensions > 1 else [])])
        if dimensions > 1:
            _only(folder, "order", meta.get("order"), ["C"])
        count, chunk, row = _sizes(folder, {field: meta.get(field) for field in ("shape", "chunks")}, dimensions)
        return Layout(np.dtype(dtype), count, chunk, suffix=f"{self.separator}0" * len(row), row=row)

    def write_group(self, folder: Path, attributes: Mapping[str, Any]) -> None:
        _write(folder / self.marker, {"zarr_format": 2})
        _write(folder / ".zattrs", attributes)

    def _metadata(self, folder: Path, layout: Layout) -> dict[str, Any]:
        return {
            "zarr_format": 2,
            "shape": layout.shape(layout.count),
            "chunks": layout.shape(layout.chunk),
            "dtype": layout.dtype.str,
            "compressor": None,
            "fill_value": layout.dtype.type(0).item(),
            "filters": None,
            "order": "C",
        }


class _N5(Dialect):
    marker = array_file = "attributes.json"
    order = ">"
    padded = False
    root = {"n5": "4.0.0"}

    _MAX_BLOCK = (1 << 31) - 1  # bytes, by the specification

    def is_root(self, root: Path) -> bool:
        try:
            return super().is_root(root) and "n5" in (_read(root / self.marker) or {})
        except DataError:
            return False

    def attributes(self, folder: Path) -> Mapping[str, Any]:
        return _read(folder / self.marker) or {}

    def _parse(self, folder: Path, meta: Mapping[str, Any], dimensions: int) -> Layout:
        _only(folder, "compression", meta.get("compression"), [{"type": "raw"}])
        dtype = _dtype(folder, "dataType", meta.get("dataType"), ">", dimensions)
        shapes = {field: meta.get(field) for field in ("dimensions", "blockSize")}
        count, chunk, row = _sizes(folder, shapes, dimensions, step=-1)
        return Layout(dtype, count, chunk, suffix="/0" * len(row), row=row)

    def chunk_header(self, layout: Layout, count: int) -> bytes:
        shape = layout.shape(count)[::-1]
        return struct.pack(f">HH{len(shape)}I", 0, len(shape), *shape)  # mode: plain values; dimensions; their lengths

    def write_group(self, folder: Path, attributes: Mapping[str, Any]) -> None:
        _write(folder / self.marker, attributes)

    def _metadata(self, folder: Path, layout: Layout) -> dict[str, Any]:
        size = self.header_bytes(layout) + layout.chunk * layout.dtype.itemsize
        if size > self._MAX_BLOCK:
            raise DataError(
                f"{folder} would take {size:,} bytes in one block, n5 allows {self._MAX_BLOCK:,}; choose another format"
            )
        return {
            "dimensions": layout.shape(layout.count)[::-1],
            "blockSize": layout.shape(layout.chunk)[::-1],
            "dataType": layout.dtype.name,
            "compression": {"type": "raw"},
        }


ZARR3, ZARR2, N5 = _Zarr3(), _Zarr2(), _N5()


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n")


def _read(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file; None if there is no such file."""
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


def _only(folder: Path, field: str, found: Any, allowed: list[Any]) -> None:
    if found not in allowed:
        raise DataError(
            f"{folder} has the {field} {json.dumps(found)[:100]}, only {' or '.join(map(json.dumps, allowed))} can be "
            "mapped; convert it again"
        )


def _dtype(folder: Path, field: str, found: Any, order: Literal["<", ">"], dimensions: int) -> np.dtype[Any]:
    _only(folder, field, found, ["uint8", "uint16", "uint32", "uint64", *(["float32"] if dimensions > 1 else [])])
    dtype: np.dtype[Any] = np.dtype(found)
    return dtype.newbyteorder(order)


def _sizes(folder: Path, shapes: Mapping[str, Any], dimensions: int, step: int = 1) -> tuple[int, int, tuple[int, ...]]:
    """Values of an array, values of a chunk, and the shape of a row: from the shapes of the array and of a chunk.

    With a `step` of -1 the last dimension comes first in them.
    """
    for least, (field, found) in enumerate(shapes.items()):
        whole = isinstance(found, list) and all(type(length) is int and length >= least for length in found)
        if not whole or len(found) != dimensions:
            wanted = "one number" if dimensions == 1 else "two numbers"
            raise DataError(f"{folder} has the {field} {json.dumps(found)[:100]}, not {wanted}; convert it again")
    (count, *row), (chunk, *columns) = (found[::step] for found in shapes.values())
    if row != columns:
        raise DataError(f"{folder} is in several chunks, only one can be mapped; convert it again")
    return count * math.prod(row), chunk * math.prod(row), tuple(row)

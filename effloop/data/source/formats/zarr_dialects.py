"""How zarr v3, zarr v2 and n5 say what an array is: metadata, chunk names, what stands in a chunk.

https://zarr-specs.readthedocs.io/en/latest/v3/core/index.html, .../v2/v2.0.html and
https://github.com/saalfeldlab/n5#file-system-specification
"""

from __future__ import annotations

import json
import struct
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from effloop.errors import DataError


@dataclass(frozen=True)
class Layout:
    """A one-dimensional, uncompressed array: type, how many values, values in a chunk.

    `names` is what stands before a chunk's number in its path inside the array's folder.
    """

    dtype: np.dtype[Any]
    count: int
    chunk: int
    names: str = ""


class Dialect(ABC):
    """What one of the formats has in its own way."""

    mark: ClassVar[str]
    """The file that makes a folder a dataset of this format."""
    names: ClassVar[str] = ""
    """What is written as `Layout.names`."""
    order: ClassVar[Literal["<", ">"]] = "<"
    """Byte order of what is written."""
    prefix: ClassVar[int] = 0
    """Bytes in a chunk before its values."""
    padded: ClassVar[bool] = True
    """Whether the last chunk is as long as the others."""

    def is_root(self, root: Path) -> bool:
        """Whether a folder is a dataset of this format, not necessarily EffLoop's."""
        return (root / self.mark).is_file()

    @abstractmethod
    def attributes(self, folder: Path) -> Mapping[str, Any]:
        """A group's attributes; none if it isn't there.

        Raises:
            DataError: its metadata is damaged.
        """

    @abstractmethod
    def layout(self, folder: Path) -> Layout | None:
        """What an array is; None if it isn't there.

        Raises:
            DataError: its metadata is damaged, or it isn't uncompressed and one-dimensional.
        """

    def head(self, count: int) -> bytes:
        """What stands in a chunk of so many values before them."""
        return b""

    def write_root(self, folder: Path) -> None:
        """Begin a dataset."""
        self.write_group(folder, {})

    @abstractmethod
    def write_group(self, folder: Path, attributes: Mapping[str, Any]) -> None:
        """Write a group's metadata; its folder may be there already."""

    @abstractmethod
    def write_array(self, folder: Path, layout: Layout) -> None:
        """Write an array's metadata."""


class _Zarr3(Dialect):
    mark = "zarr.json"
    names = "c/"

    def attributes(self, folder: Path) -> Mapping[str, Any]:
        found: Any = (_read(folder / self.mark) or {}).get("attributes", {})
        return found if isinstance(found, dict) else {}

    def layout(self, folder: Path) -> Layout | None:
        meta = _read(folder / self.mark)
        if meta is None:
            return None
        grid, keys = meta.get("chunk_grid"), meta.get("chunk_key_encoding")
        regular = grid.get("configuration") if isinstance(grid, dict) else None
        chunk = regular.get("chunk_shape") if isinstance(regular, dict) else None
        _only(folder, "chunk_grid", grid, [{"name": "regular", "configuration": {"chunk_shape": chunk}}])
        _only(folder, "chunk_key_encoding", keys, [self._keys("/"), self._keys("."), {"name": "default"}])
        names = "c." if keys == self._keys(".") else "c/"
        dtype = _dtype(folder, "data_type", meta.get("data_type"), "<")
        _only(folder, "codecs", meta.get("codecs"), [_LITTLE, _BYTES] if dtype.itemsize == 1 else [_LITTLE])
        _only(folder, "storage_transformers", meta.get("storage_transformers", []), [[]])
        return Layout(dtype, _length(folder, "shape", meta.get("shape"), 0), _length(folder, "chunks", chunk, 1), names)

    def write_group(self, folder: Path, attributes: Mapping[str, Any]) -> None:
        _write(folder / self.mark, {"zarr_format": 3, "node_type": "group", "attributes": dict(attributes)})

    def write_array(self, folder: Path, layout: Layout) -> None:
        meta = {
            "zarr_format": 3,
            "node_type": "array",
            "shape": [layout.count],
            "data_type": layout.dtype.name,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [layout.chunk]}},
            "chunk_key_encoding": self._keys("/"),
            "fill_value": 0,
            "codecs": _LITTLE,
            "attributes": {},
        }
        _write(folder / self.mark, meta)

    @staticmethod
    def _keys(separator: str) -> dict[str, Any]:
        return {"name": "default", "configuration": {"separator": separator}}


_LITTLE = [{"name": "bytes", "configuration": {"endian": "little"}}]
_BYTES = [{"name": "bytes"}]  # what has one byte needs no order


class _Zarr2(Dialect):
    mark = ".zgroup"

    def attributes(self, folder: Path) -> Mapping[str, Any]:
        return (_read(folder / ".zattrs") or {}) if (folder / self.mark).is_file() else {}

    def layout(self, folder: Path) -> Layout | None:
        meta = _read(folder / ".zarray")
        if meta is None:
            return None
        _only(folder, "compressor", meta.get("compressor"), [None])
        _only(folder, "filters", meta.get("filters") or None, [None])
        dtype = meta.get("dtype")
        _only(folder, "dtype", dtype, ["|u1", "<u2", "<u4", "<u8"])
        count, chunk = _length(folder, "shape", meta.get("shape"), 0), _length(folder, "chunks", meta.get("chunks"), 1)
        return Layout(np.dtype(dtype), count, chunk)

    def write_group(self, folder: Path, attributes: Mapping[str, Any]) -> None:
        _write(folder / self.mark, {"zarr_format": 2})
        _write(folder / ".zattrs", attributes)

    def write_array(self, folder: Path, layout: Layout) -> None:
        meta = {
            "zarr_format": 2,
            "shape": [layout.count],
            "chunks": [layout.chunk],
            "dtype": layout.dtype.str,
            "compressor": None,
            "fill_value": 0,
            "filters": None,
            "order": "C",
        }
        _write(folder / ".zarray", meta)


class _N5(Dialect):
    mark = "attributes.json"
    order = ">"
    prefix = 8
    padded = False

    _LONGEST = (1 << 31) - 1
    """Bytes of a block, by the specification."""

    def is_root(self, root: Path) -> bool:
        if not super().is_root(root):
            return False
        try:
            return "n5" in (_read(root / self.mark) or {})
        except DataError:
            return False

    def attributes(self, folder: Path) -> Mapping[str, Any]:
        return _read(folder / self.mark) or {}

    def layout(self, folder: Path) -> Layout | None:
        meta = _read(folder / self.mark)
        if meta is None:
            return None
        _only(folder, "compression", meta.get("compression"), [{"type": "raw"}])
        dtype = _dtype(folder, "dataType", meta.get("dataType"), ">")
        count = _length(folder, "dimensions", meta.get("dimensions"), 0)
        return Layout(dtype, count, _length(folder, "blockSize", meta.get("blockSize"), 1))

    def head(self, count: int) -> bytes:
        return struct.pack(">HHI", 0, 1, count)  # mode: plain values; one dimension of so many

    def write_root(self, folder: Path) -> None:
        _write(folder / self.mark, {"n5": "4.0.0"})

    def write_group(self, folder: Path, attributes: Mapping[str, Any]) -> None:
        _write(folder / self.mark, attributes)

    def write_array(self, folder: Path, layout: Layout) -> None:
        size = self.prefix + layout.chunk * layout.dtype.itemsize
        if size > self._LONGEST:
            raise DataError(
                f"{folder} would take {size:,} bytes in one block, n5 allows {self._LONGEST:,}; choose another format"
            )
        meta = {
            "dimensions": [layout.count],
            "blockSize": [layout.chunk],
            "dataType": layout.dtype.name,
            "compression": {"type": "raw"},
        }
        _write(folder / self.mark, meta)


ZARR3, ZARR2, N5 = _Zarr3(), _Zarr2(), _N5()


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n")


def _read(path: Path) -> dict[str, Any] | None:
    """A file of JSON; None if it isn't there.

    Raises:
        DataError: it isn't JSON, or can't be read.
    """
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


def _dtype(folder: Path, field: str, found: Any, order: Literal["<", ">"]) -> np.dtype[Any]:
    _only(folder, field, found, ["uint8", "uint16", "uint32", "uint64"])
    dtype: np.dtype[Any] = np.dtype(found)
    return dtype.newbyteorder(order)


def _length(folder: Path, field: str, found: Any, least: int) -> int:
    """The one number of a shape."""
    if not isinstance(found, list) or len(found) != 1 or type(found[0]) is not int or found[0] < least:
        raise DataError(f"{folder} has the {field} {json.dumps(found)[:100]}, not one number; convert it again")
    length: int = found[0]
    return length

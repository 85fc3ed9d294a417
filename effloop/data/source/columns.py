"""A file of named numpy columns that is opened by mapping it: EffLoop's index and its `memmap` format.

Layout, little-endian: 8 bytes magic, u64 offset and u64 length of the header, u32 CRC-32 of the
header, padding to 64 bytes; the columns, each at a multiple of 64; the header, as JSON:
`{"version": 1, "meta": {...}, "columns": {name: [dtype, count, offset]}}`.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import tempfile
import zlib
from array import array
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from effloop.errors import DataError

MAGIC = b"EFFLOOP\x00"
VERSION = 1
_PREFIX = struct.Struct("<8sQQI")
_ALIGN = 64


class ColumnWriter:
    """Writes a file of columns; it appears under its name only when it is complete.

        with ColumnWriter(path, meta={"classes": ["cat", "dog"]}) as writer:
            writer.add("label", labels)
            with writer.blobs("payload") as append:
                append(data)

    Leaving the block by an exception leaves nothing behind.
    """

    def __init__(self, path: Path, meta: Mapping[str, Any]) -> None:
        self.path = path
        self._meta = dict(meta)
        self._columns: dict[str, list[Any]] = {}

    def __enter__(self) -> ColumnWriter:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # In the same folder, because a rename is atomic only within one file system.
        fd, name = tempfile.mkstemp(prefix=f".{self.path.name}.", suffix=".tmp", dir=self.path.parent)
        self._temporary = Path(name)
        self._file = os.fdopen(fd, "wb")
        self._align()
        return self

    def add(self, name: str, values: NDArray[Any]) -> None:
        """Append a one-dimensional column of a plain dtype."""
        self._start(name, values.dtype, len(values))
        self._file.write(np.ascontiguousarray(values).data)
        self._align()

    @contextmanager
    def blobs(self, name: str) -> Iterator[Callable[[bytes], None]]:
        """Append byte strings end to end as column `name`, and where each ends as `name_end`.

        The block gets the function that appends one.
        """
        ends = array("Q")
        start = end = self._file.tell()

        def append(blob: bytes) -> None:
            nonlocal end
            end += self._file.write(blob)
            ends.append(end - start)

        yield append
        self._columns[name] = ["|u1", end - start, start]
        self._align()
        self.add(f"{name}_end", np.frombuffer(ends, np.uint64))

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._finish()
                os.replace(self._temporary, self.path)
        finally:
            self._temporary.unlink(missing_ok=True)  # first: on a full disk, closing raises again
            self._file.close()

    def _finish(self) -> None:
        header = json.dumps({"version": VERSION, "meta": self._meta, "columns": self._columns}).encode()
        offset = self._file.tell()
        self._file.write(header)
        self._file.seek(0)
        self._file.write(_PREFIX.pack(MAGIC, offset, len(header), zlib.crc32(header)))
        self._file.flush()
        os.fchmod(self._file.fileno(), 0o644)  # mkstemp's 0600 would hide a shared dataset from others
        os.fsync(self._file.fileno())

    def _start(self, name: str, dtype: np.dtype[Any], count: int) -> None:
        self._columns[name] = [dtype.str, count, self._file.tell()]

    def _align(self) -> None:
        position = self._file.tell()
        self._file.write(b"\0" * (max(_ALIGN, -(-position // _ALIGN) * _ALIGN) - position))


class ColumnFile:
    """The columns of one file, memory-mapped read-only. Picklable: what travels is the path.

    Opening reads the header only, so it takes as long for ten samples as for a hundred million, and
    every process that opens the file shares its pages.

    Raises:
        DataError: missing, not such a file, of another version, or cut short.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open(path, "rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: an empty file can't be mapped
            raise DataError(f"{path} can't be opened: {getattr(error, 'strerror', None) or error}") from None
        header = self._read_header()
        self.meta: dict[str, Any] = header["meta"]
        self._columns: dict[str, list[Any]] = header["columns"]

    def _read_header(self) -> dict[str, Any]:
        if len(self._map) < _PREFIX.size or self._map[: len(MAGIC)] != MAGIC:
            raise DataError(f"{self.path} is not a file written by EffLoop")
        _, offset, length, checksum = _PREFIX.unpack_from(self._map)
        raw = self._map[offset : offset + length] if offset + length <= len(self._map) else b""
        if not raw or zlib.crc32(raw) != checksum:
            raise DataError(f"{self.path} is cut short or damaged: its header doesn't match its checksum")
        header: dict[str, Any] = json.loads(raw)
        if header["version"] != VERSION:
            raise DataError(
                f"{self.path} has format version {header['version']}, this EffLoop reads {VERSION}; convert it again"
            )
        return header

    def __getitem__(self, name: str) -> NDArray[Any]:
        """Column `name`: a read-only view of the file."""
        dtype, count, offset = self._columns[name]
        return np.frombuffer(self._map, np.dtype(dtype), count, offset)

    def blob(self, name: str) -> memoryview:
        """Column `name` of bytes, without a copy."""
        _, count, offset = self._columns[name]
        return memoryview(self._map)[offset : offset + count]

    def __reduce__(self) -> tuple[type[ColumnFile], tuple[Path]]:
        return (ColumnFile, (self.path,))


class Blobs:
    """Byte strings that stand end to end: item i is `data[ends[i-1]:ends[i]]`, without a copy."""

    def __init__(self, file: ColumnFile, name: str) -> None:
        self._data = file.blob(name)
        self.ends = file[f"{name}_end"]

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> memoryview:
        start = int(self.ends[index - 1]) if index else 0
        return self._data[start : int(self.ends[index])]


def smallest_uint(largest: int) -> np.dtype[Any]:
    """The smallest unsigned integer type that holds 0..largest."""
    return np.min_scalar_type(largest)

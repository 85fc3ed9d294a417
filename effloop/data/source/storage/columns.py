"""A file of named numpy columns, opened by mapping it: EffLoop's index and its `memmap` format.

Layout, little-endian: 8 bytes magic, u64 offset and u64 length of the header, u32 CRC-32 of the
header, padding to 64 bytes; the columns, each at a multiple of 64; the header, as JSON:
`{"version": 1, "meta": {...}, "columns": {name: [dtype, count, offset]}, "crc32c": {name: CRC-32C}}`.
A column that was streamed, as images are, has no checksum here; older files have none at all.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import struct
import tempfile
import weakref
import zlib
from array import array
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from effloop.data.image.encoded import EncodedImages
from effloop.data.image.header import Encoded
from effloop.data.in_progress import in_progress
from effloop.errors import DataError
from effloop.native import address, function, pointer
from effloop.system.files import replacing

_BLOCK = 1 << 20
_VALUES = 1 << 18  # bytes that are copied at a time: 3.9 GB/s, of 64 KiB 2.6, of 4 MiB 3.1
_END = 4096


def crc32c(data: Encoded) -> int:
    """CRC-32C (Castagnoli), without a copy and without the GIL: 6 µs for 110 KB; zlib's CRC-32 takes 45."""
    return extended(0, data)


def extended(checksum: int, data: Encoded) -> int:
    """The CRC-32C of what `checksum` is of, followed by `data`; the checksum of nothing is 0."""
    longer: int = function("effloop_crc32c", "upl", "u")(checksum, *pointer(data))
    return longer


def differs(images: EncodedImages, checksums: NDArray[Any]) -> bool:
    """Whether the CRC-32C of any of (N,) images isn't the one that is wanted, in one call without the GIL."""
    wanted = checksums.astype(np.uint64)
    arrays = (address(images.addresses), address(images.sizes), address(wanted))
    found: int = function("effloop_crc32c_differs", "ppplpp", "l")(*arrays, len(images), *in_progress.addresses())
    return found >= 0


def crc32c_of_values(values: NDArray[Any]) -> int:
    """CRC-32C of an array's values, little-endian, row after row: 3 GB/s, without a copy of all."""
    checksum, flat = 0, values.reshape(-1)
    step = _VALUES // max(1, values.itemsize)
    little = values.dtype.newbyteorder("<")
    for start in range(0, len(flat), step):
        piece = np.ascontiguousarray(flat[start : start + step], little)
        checksum = extended(checksum, piece.view(np.uint8).data)
    return checksum


def crc32c_of_file(path: Path) -> int:
    """CRC-32C of a whole file."""
    checksum = 0
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            checksum = extended(checksum, block)
    return checksum


def crc32c_of_ends(path: Path) -> int:
    """CRC-32C of a file's first and last 4 KiB: fast, and enough to tell one file from another."""
    with open(path, "rb") as file:
        first = crc32c(file.read(_END))
        file.seek(max(0, file.seek(0, 2) - _END))
        checksum: int = extended(first, file.read(_END))
        return checksum


MAGIC = b"EFFLOOP\x00"
VERSION = 1
_PREFIX = struct.Struct("<8sQQI")
_ALIGN = 64
_PLAIN = re.compile(r"\|[iu]1|[<>]([iu][248]|f[248])")  # `np.dtype.str` of numbers, never of objects

# Larger files are read page by page. Readahead fetched 75 % of a cold index of 3.6 GB (100 million samples) for
# 2,000 samples in shuffled order, in 2.2 s; without, 1.7 % in 1.2 s.
_READ_AHEAD_UP_TO = 64 << 20


class DamagedFileError(DataError):
    """A file of columns that is cut short or has changed since it was written."""


class ColumnWriter:
    """Writes a file of columns, which appears under its name only when it is complete.

        with ColumnWriter(path, meta={"classes": ["cat", "dog"]}) as writer:
            writer.add("label", labels)
            with writer.blobs("payload") as append:
                append(data)

    An exception in the block leaves no file behind.
    """

    def __init__(self, path: Path, meta: Mapping[str, Any]) -> None:
        self.path = path
        self._meta = dict(meta)
        self._columns: dict[str, list[Any]] = {}
        self._checksums: dict[str, int] = {}

    def __enter__(self) -> ColumnWriter:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._open = ExitStack()
        self._file = self._open.enter_context(replacing(self.path, sync=True))
        self._align()
        return self

    def add(self, name: str, values: NDArray[Any]) -> None:
        """Append a column of a plain dtype; of several dimensions, row after row."""
        self._columns[name] = [values.dtype.str, values.size, self._file.tell()]
        self._checksums[name] = crc32c_of_values(values)
        self._file.write(np.ascontiguousarray(values).data)
        self._align()

    @contextmanager
    def stream(self, name: str) -> Iterator[Callable[[Encoded], None]]:
        """Write byte strings end to end as column `name`; yields the function that appends one."""
        start = self._file.tell()

        def append(data: Encoded) -> None:
            self._file.write(data)

        yield append
        self._columns[name] = ["|u1", self._file.tell() - start, start]
        self._align()

    @contextmanager
    def blobs(self, name: str) -> Iterator[Callable[[bytes], None]]:
        """Write byte strings end to end as column `name`, and their ends as `name_end`; yields what appends one."""
        ends, end, checksum = array("Q"), 0, 0
        with self.stream(name) as add:

            def append(blob: bytes) -> None:
                nonlocal end, checksum
                add(blob)
                checksum = extended(checksum, blob)
                end += len(blob)
                ends.append(end)

            yield append
        self._checksums[name] = checksum
        self.add(f"{name}_end", np.frombuffer(ends, np.uint64))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        with self._open:
            if error is not None:
                raise error
            self._finish()

    def _finish(self) -> None:
        parts = {"version": VERSION, "meta": self._meta, "columns": self._columns, "crc32c": self._checksums}
        header = json.dumps(parts).encode()
        offset = self._file.tell()
        self._file.write(header)
        self._file.seek(0)
        self._file.write(_PREFIX.pack(MAGIC, offset, len(header), zlib.crc32(header)))

    def _align(self) -> None:
        position = self._file.tell()
        self._file.write(b"\0" * (max(_ALIGN, -(-position // _ALIGN) * _ALIGN) - position))


class ColumnFile:
    """The columns of one file, memory-mapped read-only. Pickled by its path.

    Opening reads the header only, so it takes as long for ten samples as for a hundred million, and all processes
    that open the file share its pages. A column is compared with its checksum when it is first used (`is_compared`).
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open(path, "rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: an empty file can't be mapped
            raise DataError(f"{path} can't be opened: {getattr(error, 'strerror', None) or error}") from None
        if len(self._map) > _READ_AHEAD_UP_TO:
            self._map.madvise(mmap.MADV_RANDOM)
        header = self._read_header()
        self.meta: dict[str, Any] = header["meta"]
        self._columns: dict[str, list[Any]] = header["columns"]
        self._checksums: dict[str, Any] = header.get("crc32c", {})
        self._unread = set(self._columns.keys() & self._checksums.keys())

    def _read_header(self) -> dict[str, Any]:
        if len(self._map) < _PREFIX.size or self._map[: len(MAGIC)] != MAGIC:
            raise DamagedFileError(f"{self.path} is not a file written by EffLoop")
        _, offset, length, checksum = _PREFIX.unpack_from(self._map)
        raw = self._map[offset : offset + length] if offset + length <= len(self._map) else b""
        if not raw or zlib.crc32(raw) != checksum:
            raise DamagedFileError(f"{self.path} is cut short or damaged: its header doesn't match its checksum")
        header: Any = None
        with suppress(ValueError, RecursionError):
            header = json.loads(raw)
        if isinstance(header, dict) and header.get("version", VERSION) != VERSION:
            raise DataError(
                f"{self.path} has format version {header['version']}, this EffLoop reads {VERSION}; convert it again"
            )
        parts = [header.get(name, {}) for name in ("meta", "columns", "crc32c")] if isinstance(header, dict) else []
        if not parts or not all(isinstance(part, dict) for part in parts) or not {"meta", "columns"} <= header.keys():
            raise self._damaged("its header is not one of columns")
        for name, column in header["columns"].items():
            kinds = [type(part) for part in column] if isinstance(column, list) else None
            if kinds != [str, int, int] or not _PLAIN.fullmatch(column[0]):
                raise self._damaged(f"its column '{name}' is not one of plain numbers")
            dtype, count, offset = column
            if min(count, offset) < 0 or offset + count * np.dtype(dtype).itemsize > len(self._map):
                raise self._damaged(f"its column '{name}' is not inside the file")
        return dict(header)

    def _damaged(self, what: str) -> DataError:
        return DamagedFileError(f"{self.path} is damaged: {what}; convert it again")

    def check(self) -> None:
        """Compare the columns of what is kept for a dataset with their checksums."""
        for name in sorted(self._unread):
            self._compare(name, kept=True)
        self._unread.clear()

    def _compare(self, name: str, *, kept: bool = False) -> None:
        dtype, count, offset = self._columns[name]
        if is_compared(name, count * np.dtype(dtype).itemsize, kept=kept):
            with self.read_ahead(name):
                found = crc32c_of_values(np.frombuffer(self._map, np.dtype(dtype), count, offset))
            if found != self._checksums[name]:
                raise self._damaged(f"its column '{name}' doesn't match the checksum that it was written with")

    @contextmanager
    def read_ahead(self, name: str) -> Iterator[None]:
        """All of column `name` is read within it: a cold one of 200 MB took 6 s page by page, and takes 0.4."""
        dtype, count, offset = self._columns[name]
        start = offset // mmap.PAGESIZE * mmap.PAGESIZE
        place = (start, offset + count * np.dtype(dtype).itemsize - start)
        large = count > 0 and len(self._map) > _READ_AHEAD_UP_TO
        if large:
            self._map.madvise(mmap.MADV_SEQUENTIAL, *place)
        try:
            yield
        finally:
            if large:
                self._map.madvise(mmap.MADV_RANDOM, *place)

    def __contains__(self, name: str) -> bool:
        return name in self._columns

    def __iter__(self) -> Iterator[str]:
        """The names of its columns, in order."""
        return iter(self._columns)

    def __getitem__(self, name: str) -> NDArray[Any]:
        """Column `name`: a read-only view of the file."""
        dtype, count, offset = self.place(name)
        return np.frombuffer(self._map, np.dtype(dtype), count, offset)

    def unsigned(self, name: str) -> NDArray[Any]:
        """Column `name`, which must be of unsigned integers, as labels and offsets are."""
        column = self[name]
        if column.dtype.kind != "u":
            raise self._damaged(f"its column '{name}' is {column.dtype.name}, not of unsigned integers")
        return column

    def place(self, name: str) -> tuple[str, int, int]:
        """Where column `name` is: (dtype, count, offset in the file)."""
        if name not in self._columns:
            raise self._damaged(f"it has no column '{name}'")
        if name in self._unread:
            self._unread.discard(name)
            self._compare(name)
        dtype, count, offset = self._columns[name]
        return dtype, count, offset

    def blob(self, name: str) -> memoryview:
        """Column `name` of bytes, without a copy."""
        dtype, count, offset = self.place(name)
        if dtype != "|u1":
            raise self._damaged(f"its column '{name}' is {np.dtype(dtype).name}, not of bytes")
        return memoryview(self._map)[offset : offset + count]

    def blobs(self, name: str) -> Blobs:
        """What `ColumnWriter.blobs` wrote as column `name`."""
        return Blobs(self.blob(name), self[f"{name}_end"])

    def __reduce__(self) -> tuple[type[ColumnFile], tuple[Path]]:
        return ColumnFile, (self.path,)


def span(ends: NDArray[Any], index: int) -> tuple[int, int]:
    """Where item `index` starts and ends, of items stored end to end that end at `ends`."""
    return int(ends[index - 1]) if index else 0, int(ends[index])


def spans(ends: NDArray[Any], samples: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """`span` of (N,) items: their starts and their ends."""
    starts = np.where(samples == 0, 0, ends[samples - 1])
    return starts.astype(np.int64), ends[samples].astype(np.int64)


class Blobs:
    """Byte strings stored end to end: item i is `data[ends[i-1]:ends[i]]`, without a copy; `ends` is (N,) integers."""

    def __init__(self, data: memoryview, ends: NDArray[Any]) -> None:
        self._data, self._ends = data, ends

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> memoryview:
        start, end = span(self._ends, index)
        return self._data[start:end]

    def run(self, samples: NDArray[np.int64]) -> EncodedImages:
        """(N,) items."""
        starts, ends = spans(self._ends, samples)
        if len(samples) and not (starts.min() >= 0 and (starts <= ends).all() and ends.max() <= len(self._data)):
            return EncodedImages.of([self[index] for index in samples.tolist()])  # of a damaged file
        return EncodedImages([self._data], np.zeros_like(starts), starts, ends - starts)


class Spool:
    """A column that grows on disk: memory use doesn't depend on its length.

    `typecode` is of `array.array`, e.g. "Q"; "B" takes whole byte strings. `folder` is of the unnamed temporary file;
    None is the system's folder for them.
    """

    _BUFFERED = 1 << 16  # values in memory before they are written

    def __init__(self, typecode: str, folder: Path | None = None) -> None:
        self._buffer = array(typecode)
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  closed when the spool is dropped
        self._finaliser = weakref.finalize(self, self._file.close)

    def append(self, value: int) -> None:
        """Append one value."""
        self._buffer.append(value)
        if len(self._buffer) >= self._BUFFERED:
            self._flush()

    def extend(self, data: Encoded) -> None:
        """Append the bytes of `data` to a column of bytes."""
        self._buffer.frombytes(data)
        if len(self._buffer) >= self._BUFFERED:
            self._flush()

    def array(self) -> NDArray[Any]:
        """All values so far, mapped from the file; read-only."""
        self._flush()
        self._file.flush()
        dtype = np.dtype(self._buffer.typecode)
        return np.memmap(self._file, dtype, "r") if self._file.tell() else np.empty(0, dtype)

    def _flush(self) -> None:
        self._file.seek(0, os.SEEK_END)
        self._buffer.tofile(self._file)
        del self._buffer[:]


class BlobSpool:
    """Byte strings end to end, growing on disk; `ends` is where each of them ends."""

    def __init__(self, folder: Path | None = None) -> None:
        self.data, self.ends = Spool("B", folder), Spool("Q", folder)
        self._end = 0

    def append(self, blob: Encoded) -> None:
        """Append one byte string."""
        self.data.extend(blob)
        self._end += len(blob)
        self.ends.append(self._end)

    def blobs(self) -> Blobs:
        """All byte strings so far, mapped from the file."""
        return Blobs(self.data.array().data, self.ends.array())


CHECKED_UP_TO = 64 << 20
"""Bytes of a column up to which it is compared with its checksum when it is opened: 8 ms for 10 million samples.
Larger ones (their keys and positions) are by `verify`; what is learned about each sample always is, as nothing else
would notice."""

LEARNED = ("label", "target")
INDEXES = ("entropy", "entropy_end", "mask")
"""Only when all are: each entropy index is compared with the image when it is used, and an image is decoded without;
each mask has a checksum of its own."""


class Comparing(Enum):
    """Which columns are compared with their checksums where data is opened."""

    usual = "usual"  # those up to CHECKED_UP_TO, and what is learned
    all = "all"
    kept = "kept"  # of a dataset none, of what is kept elsewhere for it as usual: that can be made again


_comparing: ContextVar[Comparing] = ContextVar("_comparing", default=Comparing.usual)


@contextmanager
def comparing(which: Comparing) -> Iterator[None]:
    """Within it these columns are compared."""
    token = _comparing.set(which)
    try:
        yield
    finally:
        _comparing.reset(token)


def is_verified() -> bool:
    """Whether data is opened to list all that is wrong with it: a bad sample is no reason to refuse it."""
    return _comparing.get() is Comparing.kept


def is_compared(name: str, num_bytes: int, *, kept: bool = False) -> bool:
    """Whether a column of a dataset, or of what is kept for it, is compared with its checksum now."""
    which = _comparing.get()
    if which is Comparing.kept and not kept:
        return False
    column = name.rpartition("/")[2]
    if which is Comparing.all or column in LEARNED:
        return True
    return num_bytes <= CHECKED_UP_TO and column not in INDEXES

"""Entropy indexes of JPEGs that are kept beside a dataset's scan, in one mapped file that grows while it is used.

Layout, little-endian: 8 bytes magic, u32 version of this layout, u32 version of the indexes, u64 number of slots C (a
power of two), u32 CRC-32 of the 24 bytes before, padding to 64 bytes; C slots of 24 bytes; the indexes, end to end. A
slot is u64 hash of the sample's name, u64 offset, u32 length, u32 CRC-32 of these three, of the image's size and of
the index. A slot of zeros is free; a length of 0 says that this image can't have an index. A name's slot is the one of
its hash modulo C, or one of the next.

Nothing is ever half written: what a killed process or a full disk has left, and what belongs to a file of another
size, differs from its checksum and counts as missing. Processes append under a lock, and read without.
"""

from __future__ import annotations

import errno
import mmap
import os
import struct
import time
import zlib
from collections import deque
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

from effloop.data.image.entropy import VERSION
from effloop.data.image.header import Encoded
from effloop.errors import DataError
from effloop.system.files import replacing, try_lock

_MAGIC, _LAYOUT = b"EFFLIDX\0", 1
_HEADER, _CHECKSUM = struct.Struct("<8sIIQ"), struct.Struct("<I")
_SLOT, _SUMMED = struct.Struct("<QQII"), struct.Struct("<QQIQ")
_START = 64
_PROBED = 64  # slots that a name may be in
_POLL_S, _WAIT_S = 0.001, 5.0
_WAITING = 256  # indexes that wait for the lock, which another process has for microseconds


class EntropyFile:
    """Name and size of an image -> its entropy index. Thread-safe; pickled by its path, and safe to fork.

    Opening reads 64 bytes, so it takes as long for ten samples as for a hundred million; a look-up 2 µs.

    Args:
        path: of the file.
        samples: of the dataset: a file that isn't there, is of another version or has too little room for them is made
            anew. None never makes one.

    Raises:
        DataError: it isn't there and isn't to be made, or it is no such file.
        OSError: it can't be opened or made.
    """

    def __init__(self, path: Path, samples: int | None = None) -> None:
        self.path, self._samples = path, samples
        self._open()

    def _open(self) -> None:
        found = self._map_file()
        if self._samples is not None and (found is None or found.slots * 4 < self._samples * 5):
            _create(self.path, self._samples)
            found = self._map_file()
        if found is None:
            raise DataError(f"{self.path} is not a file of entropy indexes, or of another version")
        self._mapped = found
        self._waiting: deque[tuple[bytes, int, Encoded]] = deque(maxlen=2 * _WAITING)

    def _map_file(self) -> _Mapped | None:
        """The file that has the name now; None if there is none, or it isn't whole or of this version."""
        try:
            with open(self.path, "rb") as file:
                return _map(file.fileno())
        except FileNotFoundError:
            return None

    def get(self, name: bytes, size: int) -> Encoded | None:
        """The index of an image; empty if it is known to have none, None if nothing is known.

        Args:
            name: the sample's.
            size: bytes of the image as it is now.
        """
        key, mapped = _hash(name), self._mapped
        for step in range(_PROBED):
            found, offset, length, checksum = _SLOT.unpack_from(mapped.data, mapped.place(key + step))
            if not offset:
                return None
            if found == key:
                index = self._data(mapped, offset, length)
                matches = index is not None and _summed(key, offset, size, index) == checksum
                return index if matches else None
        return None

    def _data(self, mapped: _Mapped, offset: int, length: int) -> memoryview | None:
        """A range of the file, which may have grown since it was mapped; None if there is no such range."""
        if offset < mapped.end:
            return None
        if offset + length > len(mapped.data):
            mapped = self._grown(mapped)
        if offset + length > len(mapped.data):
            return None
        return memoryview(mapped.data)[offset : offset + length]

    def _grown(self, mapped: _Mapped) -> _Mapped:
        """All of the same file, if that has its name still."""
        with suppress(OSError):
            now = self._map_file()
            if now is not None and now.identity == mapped.identity:
                self._mapped = now
                return now
        return mapped

    def put(self, name: bytes, size: int, index: Encoded | None) -> None:
        """Append an index; while another process appends, it waits for one of the next calls.

        Args:
            name: the sample's.
            size: bytes of the image.
            index: None says that it can't have one.

        Raises:
            OSError: the file can't be written to.
        """
        self._waiting.append((name, size, index or b""))
        self._append_waiting(wait_s=0 if len(self._waiting) < _WAITING else _WAIT_S)

    def flush(self) -> None:
        """Append what still waits.

        Raises:
            OSError: the file can't be written to.
        """
        self._append_waiting(wait_s=_WAIT_S)

    def _append_waiting(self, wait_s: float) -> None:
        fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)  # each time: threads and forks then exclude each other, too
        try:
            if _identity(fd) != self._mapped.identity:
                self._follow(fd)
            deadline = time.monotonic() + wait_s
            while not try_lock(fd):
                if time.monotonic() >= deadline:
                    return
                time.sleep(_POLL_S)
            with suppress(IndexError):  # empty
                while True:
                    self._append(fd, *self._waiting.popleft())
        finally:
            os.close(fd)

    def _follow(self, fd: int) -> None:
        """Go on with the file that another process has put in the place of this one, as ranks that start at once do."""
        found = _map(fd)
        if found is None:
            raise OSError(errno.ESTALE, "it is no file of entropy indexes any more")
        self._mapped = found

    def _append(self, fd: int, name: bytes, size: int, index: Encoded) -> None:
        """Write an index, then its slot: of a process that is killed in between, the slot is still free."""
        key, offset, mapped = _hash(name), os.fstat(fd).st_size, self._mapped
        for step in range(_PROBED):
            place = mapped.place(key + step)
            found, used, *_ = _SLOT.unpack_from(mapped.data, place)
            if found == key or not used:
                _write(fd, index, offset)
                slot = _SLOT.pack(key, offset, len(index), _summed(key, offset, size, index))
                _write(fd, slot, place)
                return

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path,)


class _Mapped(NamedTuple):
    """A file as it was when it was mapped: its bytes, how many slots it has, and which file it is."""

    data: mmap.mmap
    slots: int
    identity: tuple[int, int]

    @property
    def end(self) -> int:
        """The offset behind the slots."""
        return _START + self.slots * _SLOT.size

    def place(self, number: int) -> int:
        """The offset of a slot, counted on from the first behind the last."""
        return _START + _SLOT.size * (number & (self.slots - 1))


def _map(fd: int) -> _Mapped | None:
    """Map an open file; None if it isn't whole, or not of this version."""
    if os.fstat(fd).st_size < _START:
        return None
    data = mmap.mmap(fd, 0, access=mmap.ACCESS_READ)
    data.madvise(mmap.MADV_RANDOM)
    magic, layout, version, slots = _HEADER.unpack_from(data)
    said = magic, layout, version, *_CHECKSUM.unpack_from(data, _HEADER.size)
    mapped = _Mapped(data, slots, _identity(fd))
    fits = slots > 0 and not slots & (slots - 1) and mapped.end <= len(data)
    return mapped if fits and said == (_MAGIC, _LAYOUT, VERSION, zlib.crc32(data[: _HEADER.size])) else None


def _create(path: Path, samples: int) -> None:
    """An empty file with two to four slots for each sample; free ones take no space."""
    slots = 1 << (2 * max(samples, _PROBED) - 1).bit_length()
    path.parent.mkdir(parents=True, exist_ok=True)
    header = _HEADER.pack(_MAGIC, _LAYOUT, VERSION, slots)
    with replacing(path) as file:
        file.write(header + _CHECKSUM.pack(zlib.crc32(header)))
        file.truncate(_START + slots * _SLOT.size)


def _identity(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def _hash(name: bytes) -> int:
    """64 bits; 1 µs."""
    return int.from_bytes(blake2b(name, digest_size=8).digest(), "little")


def _summed(key: int, offset: int, size: int, index: Encoded) -> int:
    """The checksum in a slot."""
    return zlib.crc32(index, zlib.crc32(_SUMMED.pack(key, offset, len(index), size)))


def _write(fd: int, data: Encoded, offset: int) -> None:
    """Write all of it.

    Raises:
        OSError: it can't be, e.g. because the disk is full.
    """
    while data:
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written

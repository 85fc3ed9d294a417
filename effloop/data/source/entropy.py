"""Entropy indexes of a dataset that has none itself: looked up beside its scan, and built while it is read."""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import struct
import threading
import time
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from effloop.data.image.encoded import EncodedImages
from effloop.data.image.header import Encoded
from effloop.data.image.jpeg import VERSION, build_index
from effloop.data.source.base import Source
from effloop.data.source.config import DataConfig, Index
from effloop.data.source.storage.kept import kept_folder
from effloop.data.source.view import View
from effloop.errors import DataError, warn
from effloop.native import address, function, pointer
from effloop.system.files import replacing, try_lock

SHARE = 1 / 6  # of each worker's time, at most, that goes into indexes while it loads batches

_COST = 0.03  # bytes of an index, of the image's, at most
_FREE = 0.1  # of the free space that indexes may take


def index_path(source: Source, index_dir: str | None) -> Path:
    """Where the indexes of a split are kept: one file for all parts of a division."""
    while isinstance(source, View):
        source = source.source
    where = hashlib.sha256(os.fsencode(os.path.abspath(source.where))).hexdigest()[:16]
    return kept_folder(index_dir) / f"entropy-{where}.index"


def can_have_indexes(source: Source) -> bool:
    """Whether images of this source may be JPEGs that have no index yet, nor restart markers of `convert`."""
    return not source.stores_indexes and (source.about or {}).get("payload", "original") == "original"


def with_indexes(source: Source, config: DataConfig) -> Source:
    """A split, or part of one, with the entropy indexes that are kept for it, as `data.index` says.

    A cache folder that can't be written or has too little space is no error: what is there is used.
    """
    if config.index is Index.none or not can_have_indexes(source):
        return source
    path = index_path(source, config.index_dir)
    build = config.index is Index.auto
    for samples in (len(source), None) if build else (None,):  # the second, if the cache folder is read-only
        with suppress(DataError, OSError):
            file = EntropyFile(path, samples)
            return Indexed(source, file, build=samples is not None and _has_room(source, file))
    return source


def _has_room(source: Source, file: EntropyFile) -> bool:
    """Whether indexes of all images would take no more than a tenth of the free space."""
    status = os.statvfs(file.path.parent)
    needed: float = _COST * source.fingerprint()["bytes"]
    return needed <= _FREE * status.f_bavail * status.f_frsize and os.access(file.path, os.W_OK)


class Indexed(View):
    """A source with entropy indexes kept in a file, which grows as images are read, if `build`.

    A worker builds those of what it has just read, in `SHARE` of its time, so that an epoch keeps 5/6 of its speed and
    each is a little faster than the one before.
    """

    def __init__(self, source: Source, file: EntropyFile, *, build: bool) -> None:
        super().__init__(source)
        self.file, self.build = file, build
        self._time = _Time()

    def entropy_indexes(self, samples: NDArray[np.int64], images: EncodedImages) -> EncodedImages | None:
        names = self.source.raw_keys(samples)
        indexes, unknown = self.file.get_run(names, images.sizes, images)
        built = {row: self._built(bytes(names[row]), images[row]) for row in unknown if self._has_time()}
        return EncodedImages.of([built.get(row) or index for row, index in enumerate(indexes)]) if built else indexes

    def _has_time(self) -> bool:
        return self.build and self._time.spent <= SHARE * (time.perf_counter() - self._time.began)

    def _built(self, name: bytes, data: Encoded) -> Encoded | None:
        started = time.perf_counter()
        index = build_index(data)
        try:
            self.file.put(name, len(data), index)
        except OSError as error:
            self.build = False
            if error.errno != errno.ESTALE:
                warn(f"data.index: {self.file.path} can't be written: {error.strerror}; no more indexes are built")
        self._time.spent += time.perf_counter() - started
        return index

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopened, (self.source, self.file.path, self.build)


def _reopened(source: Source, path: Path, build: bool) -> Source:
    try:
        return Indexed(source, EntropyFile(path), build=build)
    except (DataError, OSError):  # the cache folder was emptied meanwhile
        return source


class _Time(threading.local):
    """Seconds that each thread has spent on indexes, and when it began."""

    def __init__(self) -> None:
        self.spent, self.began = 0.0, time.perf_counter()


# The file. Layout, little-endian: 8 bytes magic, u32 version of this layout, u32 version of the indexes, u64 number of
# slots C (a power of two), u32 CRC-32 of the 24 bytes before, padding to 64 bytes; C slots of 24 bytes; the indexes,
# end to end. A slot is u64 hash of the name, u64 offset, u32 length, u32 CRC-32C of these three, of the image's
# size (u64) and of the index. A slot of zeros is free; a length of 0 says that this image can't have an index. A name's
# slot is the one of its hash modulo C, or one of the next. native/entropy_file.c reads them.
#
# Nothing is ever half written: what a killed process or a full disk has left, and what belongs to a file of another
# size, differs from its checksum and counts as missing. Processes append under a lock, and read without.

_MAGIC, _LAYOUT = b"EFFLIDX\0", 2
_HEADER, _CHECKSUM = struct.Struct("<8sIIQ"), struct.Struct("<I")
_SLOT = struct.Struct("<QQII")
_START = 64
_PROBED = 64  # slots that a name may be in
_POLL_S, _WAIT_S = 1e-4, 0.01  # for the lock, which another process has for microseconds


class EntropyFile:
    """Name and size of an image -> its entropy index. Thread-safe; pickled by its path, and safe to fork.

    Opening reads 64 bytes, so it takes as long for ten samples as for a hundred million. With `samples`, those of the
    dataset, a file that isn't there, is of another version or has too little room for them is made anew.
    """

    def __init__(self, path: Path, samples: int | None = None) -> None:
        self.path = path
        found = self._map_file()
        if samples is not None and (found is None or found.slots * 4 < samples * 5):
            _create(path, samples)
            found = self._map_file()
        if found is None:
            raise DataError(f"{path} is not a file of entropy indexes, or of another version")
        self._mapped = found

    def _map_file(self) -> _Mapped | None:
        """The file that has the name now; None if there is none, or it isn't whole or of this version."""
        try:
            with open(self.path, "rb") as file:
                return _map(file.fileno())
        except FileNotFoundError:
            return None

    def get(self, name: bytes, size: int) -> Encoded | None:
        """The index of an image of `size` bytes; empty if it is known to have none, None if nothing is known."""
        found, unknown = self.get_run(EncodedImages.of([name]), np.array([size], np.int64))
        return None if unknown else found[0]

    def get_run(
        self, names: EncodedImages, sizes: NDArray[np.int64], images: EncodedImages | None = None
    ) -> tuple[EncodedImages, list[int]]:
        """The indexes of (N,) images of these sizes, empty where there is none, and the places of those of which
        nothing is known, among `images` only of JPEGs; in one call without the GIL.
        """
        mapped = self._mapped
        at, lengths = np.empty(len(names), np.int64), np.empty(len(names), np.int64)
        while True:
            function("effloop_entropy_find", "pllpppplpp")(
                *(*pointer(memoryview(mapped.data)), mapped.slots, address(names.addresses), address(names.sizes)),
                *(None if images is None else address(images.addresses), address(sizes), len(names)),
                *(address(at), address(lengths)),
            )
            now = None
            if (at < 0).any():  # one that is further behind than what is mapped
                with suppress(OSError):
                    now = self._map_file()
            if now is None or now.inode != mapped.inode or len(now.data) <= len(mapped.data):
                break
            mapped = self._mapped = now
        indexes = EncodedImages([memoryview(mapped.data)], np.zeros_like(at), at.clip(0), lengths)
        return indexes, np.flatnonzero(at <= 0).tolist()

    def put(self, name: bytes, size: int, index: Encoded | None, wait_s: float = _WAIT_S) -> None:
        """Append the index of an image of `size` bytes, or None if it can't have one; it isn't kept while another
        process appends for longer than `wait_s`.
        """
        with open(self.path, "r+b") as file:  # each time: threads and forks then exclude each other, too
            fd = file.fileno()
            if os.fstat(fd).st_ino != self._mapped.inode:  # another process has made it anew, as ranks do at a start
                found = _map(fd)
                if found is None:
                    raise OSError(errno.ESTALE, "it is no file of entropy indexes any more")
                self._mapped = found
            until = time.monotonic() + wait_s
            while not (free := try_lock(fd)) and time.monotonic() < until:
                time.sleep(_POLL_S)
            if free:
                self._append(file, name, size, index or b"")
                file.flush()  # before the lock is given up

    def _append(self, file: BinaryIO, name: bytes, size: int, index: Encoded) -> None:
        """Write an index, then its slot: of a process that is killed in between, the slot is still free."""
        key, mapped = function("effloop_entropy_key", "pl", "k")(name, len(name)), self._mapped
        for step in range(_PROBED):
            place = _START + _SLOT.size * ((key + step) & (mapped.slots - 1))  # from the first again behind the last
            found, used, *_ = _SLOT.unpack_from(mapped.data, place)
            if found == key or not used:
                offset = file.seek(0, os.SEEK_END)
                file.write(index)
                file.flush()
                file.seek(place)
                summed = function("effloop_entropy_checksum", "kkkpl", "u")(key, offset, size, *pointer(index))
                file.write(_SLOT.pack(key, offset, len(index), summed))
                return

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path,)


class _Mapped(NamedTuple):
    """A file as it was when it was mapped: its bytes, how many slots it has, and which file it is."""

    data: mmap.mmap
    slots: int
    inode: int


def _map(fd: int) -> _Mapped | None:
    """Map an open file; None if it isn't whole, or not of this version."""
    status = os.fstat(fd)
    if status.st_size < _START:
        return None
    data = mmap.mmap(fd, 0, access=mmap.ACCESS_READ)
    data.madvise(mmap.MADV_RANDOM)
    magic, layout, version, slots = _HEADER.unpack_from(data)
    said = magic, layout, version, *_CHECKSUM.unpack_from(data, _HEADER.size)
    mapped = _Mapped(data, slots, status.st_ino)
    fits = slots > 0 and not slots & (slots - 1) and _START + slots * _SLOT.size <= len(data)
    return mapped if fits and said == (_MAGIC, _LAYOUT, VERSION, zlib.crc32(data[: _HEADER.size])) else None


def _create(path: Path, samples: int) -> None:
    """An empty file with two to four slots for each sample; free ones take no space."""
    slots = 1 << (2 * max(samples, _PROBED) - 1).bit_length()
    path.parent.mkdir(parents=True, exist_ok=True)
    header = _HEADER.pack(_MAGIC, _LAYOUT, VERSION, slots)
    with replacing(path) as file:
        file.write(header + _CHECKSUM.pack(zlib.crc32(header)))
        file.truncate(_START + slots * _SLOT.size)

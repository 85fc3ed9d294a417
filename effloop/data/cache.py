"""Samples kept in memory, one copy per machine: their encoded bytes, or their decoded pixels."""

from __future__ import annotations

import fcntl
import hashlib
import json
import mmap
import os
import stat
import struct
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from effloop.data.decode import Decoder
from effloop.data.header import Encoded, pnm_header
from effloop.data.source import Cache, Source
from effloop.errors import ConfigError
from effloop.hardware import available_memory

FOLDER = Path("/dev/shm")  # noqa: S108  memory, with a name that other processes can open
_PREFIX = "effloop-cache-"
_HEADER = struct.Struct("<QQ")  # bytes of the region, bytes of it that are taken
_FLOCK = struct.Struct("hhqqi4x")  # Linux's struct flock: kind, whence, start, length, process
_TABLE = 64  # where the table begins


class Region:
    """A stretch of shared memory that fills up with samples as they are first read.

    Whoever comes first makes it; the others, workers and ranks of this machine, join. It is gone when
    the last of them has ended, or, after a kill, when the next one is made.

    Layout: the header; for each sample where it begins (u64, 0: not here) and how long it is (u64);
    for each sample one byte that says whether it is there; the samples.

    Args:
        name: what is kept; the same name is the same memory.
        samples: how many there are at most.
        num_bytes: room for samples.
        folder: of a file system in memory.

    Raises:
        ConfigError: the memory isn't there.
    """

    def __init__(self, name: str, samples: int, num_bytes: int, folder: Path = FOLDER) -> None:
        self.path = folder / f"{_PREFIX}{os.getuid()}-{name}"
        self.samples = samples
        self._start = -(-(_TABLE + 17 * samples) // mmap.PAGESIZE) * mmap.PAGESIZE
        self._fd = self._open(num_bytes)
        self._map = mmap.mmap(self._fd, 0)
        view = memoryview(self._map)
        self._begin = np.frombuffer(view, np.uint64, samples, _TABLE)
        self._size = np.frombuffer(view, np.uint64, samples, _TABLE + 8 * samples)
        self._ready = np.frombuffer(view, np.uint8, samples, _TABLE + 16 * samples)
        self._view = view
        self._readable = view.toreadonly()
        self._prepare_lock()
        self.num_bytes: int = _HEADER.unpack_from(self._map)[0]
        self._release = weakref.finalize(self, _release, self._fd, self.path, os.getpid())

    def _open(self, num_bytes: int) -> int:
        """Make the file or join; either way with the shared lock that says that it is in use."""
        while True:
            _remove_stale(self.path.parent)
            flags = os.O_RDWR | os.O_NOFOLLOW
            try:
                fd = os.open(self.path, flags | os.O_CREAT | os.O_EXCL, 0o600)
                fcntl.flock(fd, fcntl.LOCK_EX)  # others wait until it is complete
                if _is_at(self.path, os.fstat(fd)):
                    self._make(fd, num_bytes)
                    fcntl.flock(fd, fcntl.LOCK_SH)
                    return fd
                os.close(fd)
            except FileExistsError:
                with suppress(FileNotFoundError):
                    fd = os.open(self.path, flags)
                    fcntl.flock(fd, fcntl.LOCK_SH)
                    if _is_at(self.path, os.fstat(fd)) and os.fstat(fd).st_size:
                        return self._checked(fd)
                    os.close(fd)
            time.sleep(0.001)  # another process has just removed it, or has not yet begun

    def _checked(self, fd: int) -> int:
        status = os.fstat(fd)
        if status.st_uid != os.getuid() or not stat.S_ISREG(status.st_mode):
            os.close(fd)
            raise ConfigError(f"data.cache: {self.path} belongs to somebody else; remove it or set data.cache=none")
        return fd

    def _make(self, fd: int, num_bytes: int) -> None:
        try:  # all at once: a page that isn't there when it is written to kills the process
            os.posix_fallocate(fd, 0, self._start + num_bytes)
        except OSError as error:
            os.unlink(self.path)
            os.close(fd)
            raise ConfigError(
                f"data.cache: {num_bytes / 1e9:.2f} GB of memory can't be had in {self.path.parent}: {error.strerror}; "
                "set data.cache_gb lower or data.cache=none"
            ) from None
        os.pwrite(fd, _HEADER.pack(num_bytes, 0), 0)

    def get(self, sample: int) -> memoryview | None:
        """What is kept of a sample, read-only; None if it isn't there."""
        if not self._ready[sample]:
            return None
        begin = int(self._begin[sample])
        return self._readable[begin : begin + int(self._size[sample])]

    def put(self, sample: int, parts: Sequence[Encoded]) -> None:
        """Keep a sample, if there is room; its bytes come in parts that are joined."""
        size = sum(len(part) for part in parts)
        begin = self._claim(sample, size)
        if begin is None:
            return
        at = begin
        for part in parts:
            self._view[at : at + len(part)] = part
            at += len(part)
        with self._locked():  # also a barrier: no processor shows the flag before the bytes
            self._ready[sample] = 1

    def _claim(self, sample: int, size: int) -> int | None:
        """Where a sample may be written; None if somebody is at it already or there is no room."""
        with self._locked():
            _, taken = _HEADER.unpack_from(self._map)
            if self._begin[sample] or taken + size > self.num_bytes:
                return None
            begin: int = self._start + taken
            _HEADER.pack_into(self._map, 0, self.num_bytes, taken + size)
            self._begin[sample], self._size[sample] = begin, size
            return begin

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Alone among the threads of this process and among all processes."""
        if self._pid != os.getpid():  # forked: the parent's lock and its open file are the parent's
            self._prepare_lock()
        with self._lock:
            fcntl.fcntl(self._lock_fd, fcntl.F_OFD_SETLKW, _FLOCK.pack(fcntl.F_WRLCK, 0, 0, 1, 0))
            try:
                yield
            finally:
                fcntl.fcntl(self._lock_fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, 0, 0, 1, 0))

    def _prepare_lock(self) -> None:
        """A lock of the open file's, not of the process's: closing another file of that name doesn't drop it."""
        self._lock = threading.Lock()
        self._lock_fd = os.open(f"/proc/self/fd/{self._fd}", os.O_RDWR)
        self._close_lock = weakref.finalize(self, os.close, self._lock_fd)
        self._pid = os.getpid()

    def kept(self) -> int:
        """Samples that are there."""
        return int(np.count_nonzero(self._ready))


class CachedSource(Source):
    """A source that reads each sample once per machine, as far as the memory goes.

    Args:
        source: what is kept.
        kind: the encoded bytes, or the decoded pixels as a raw image (`header.pnm_header`), which every
            decoder takes as a view.
        decoder: who makes pixels of bytes.
        num_bytes: room for samples.
        folder: of a file system in memory.
    """

    def __init__(self, source: Source, kind: Cache, decoder: Decoder, num_bytes: int, folder: Path = FOLDER) -> None:
        self.source, self.kind, self.decoder, self.num_bytes = source, kind, decoder, num_bytes
        self.folder = folder
        self.classes, self.labels = source.classes, source.labels
        self._open()

    def _open(self) -> None:
        identity = {**self.source.fingerprint(), "where": self.source.where, "kind": self.kind.value}
        if self.kind is Cache.pixels:
            identity["decoder"] = type(self.decoder).__qualname__
        name = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
        self.region = Region(name, len(self.source), self.num_bytes, self.folder)

    def read(self, index: int) -> Encoded:
        kept = self.region.get(index)
        if kept is not None:
            return kept
        data = self.source.read(index)
        if self.kind is Cache.bytes:
            self.region.put(index, [data])
            return data
        pixels = np.ascontiguousarray(self.decoder.decode(data))
        height, width, channels = pixels.shape
        header, body = pnm_header(height, width, channels), pixels.reshape(-1).data
        self.region.put(index, [header, body])
        return self.region.get(index) or b"".join((header, body))

    def describe(self) -> str:
        """One line for people: how much memory for how much data."""
        return f"{self.kind.value}, room for {self.region.num_bytes / 1e9:.2f} GB in {self.folder}"

    def raw_key(self, index: int) -> bytes:
        return self.source.raw_key(index)

    def size(self, index: int) -> int:
        return self.source.size(index)

    def will_need(self, indices: Sequence[int]) -> None:
        self.source.will_need([index for index in indices if self.region.get(index) is None])

    @property
    def where(self) -> str:
        return self.source.where

    def fingerprint(self) -> dict[str, Any]:
        return self.source.fingerprint()

    @property
    def has_checksums(self) -> bool:
        return self.source.has_checksums

    def verify(self, index: int) -> None:
        self.source.verify(index)

    def verify_index(self) -> None:
        self.source.verify_index()

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("source", "kind", "decoder", "num_bytes", "folder")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]


_LOOKED_AT = 2000
_SLACK = 1.05  # what an estimate from 2,000 sizes may be below the truth


def cached(
    source: Source, kind: Cache, decoder: Decoder, limit: float | None, *, share: float = 1.0, folder: Path = FOLDER
) -> Source:
    """`source`, or one that keeps it in memory.

    Args:
        source: whose samples are read.
        kind: what is kept.
        decoder: who makes pixels of bytes.
        limit: bytes for all splits together; None is half of the memory that is free.
        share: this split's part of it.
        folder: of a file system in memory.
    """
    if kind is Cache.none:
        return source
    total = source.fingerprint()["bytes"] if kind is Cache.bytes else _bytes_of_pixels(source, decoder)
    table = 17 * len(source) + mmap.PAGESIZE
    free = min(available_memory(), _free(folder))
    allowed = min(free * 0.5 if limit is None else limit, free * 0.9) * share - table
    if allowed <= 0:
        raise ConfigError(
            f"data.cache_gb: {0 if limit is None else limit / 1e9:.3f} is too little to keep an index of "
            f"{len(source):,} samples, {free / 1e9:.3f} GB are free; set data.cache=none or another data.cache_gb"
        )
    return CachedSource(source, kind, decoder, int(min(total, allowed)), folder)


def _bytes_of_pixels(source: Source, decoder: Decoder) -> int:
    """What all samples take when decoded: exact up to 2,000 of them, else a little more than it."""
    count = len(source)
    ids = np.unique(np.linspace(0, count - 1, min(_LOOKED_AT, count)).astype(np.int64)).tolist()
    total = 0
    for sample in ids:
        height, width = decoder.size(source.read(sample))
        total += 3 * height * width + len(pnm_header(height, width, 3))
    return total if len(ids) == count else int(total / len(ids) * count * _SLACK)


def _free(folder: Path) -> int:
    try:
        status = os.statvfs(folder)
    except OSError as error:
        raise ConfigError(f"data.cache: {folder} is needed for it: {error.strerror}; set data.cache=none") from None
    return status.f_bavail * status.f_frsize


def _is_at(path: Path, status: os.stat_result) -> bool:
    try:
        now = os.stat(path)
    except FileNotFoundError:
        return False
    return (now.st_dev, now.st_ino) == (status.st_dev, status.st_ino)


def _release(fd: int, path: Path, pid: int) -> None:
    """Remove the memory's name if nobody else uses it."""
    if os.getpid() == pid:  # a forked worker shares the lock with its parent
        _remove_unused(fd, path)
    os.close(fd)


def _remove_unused(fd: int, path: Path) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return  # in use
    if _is_at(path, os.fstat(fd)):
        path.unlink(missing_ok=True)


def _remove_stale(folder: Path) -> None:
    """Remove what runs left behind that were killed."""
    for path in folder.glob(f"{_PREFIX}{os.getuid()}-*"):
        try:
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:
            continue  # gone already, or not ours
        try:
            _remove_unused(fd, path)
        finally:
            os.close(fd)

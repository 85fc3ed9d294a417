"""Named shared memory that all processes of this machine fill together."""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
from rich.filesize import decimal

from effloop.data.image.header import Encoded
from effloop.errors import ConfigError

FOLDER = Path("/dev/shm")  # noqa: S108  memory
_PREFIX = "effloop-cache-"
_HEADER = struct.Struct("<QQ")  # bytes of the region, bytes of it that are taken
_FLOCK = struct.Struct("hhqqi4x")  # Linux's struct flock: type, whence, start, length, pid
_TABLE = 64  # offset of the table


def table_bytes(samples: int) -> int:
    """Bytes before the samples: the header and the table."""
    return -(-(_TABLE + 25 * samples) // mmap.PAGESIZE) * mmap.PAGESIZE


class Region:
    """Shared memory that is filled with samples when they are first read.

    The first process creates it; other workers and ranks of this machine attach to it. It is a file without a name, so
    the kernel frees it when the last of them ends, by a kill, too. Others open it through /proc/PID/fd.

    Layout: the header; a table with the offset (u64, 0: absent) of each sample, then the size (u64) of each, then
    its stamp (i64), then a byte for each, 1 once it is complete; the samples.

    Args:
        name: identifies what is kept; the same name is the same memory.
        samples: maximum number of samples.
        capacity: bytes for samples; called only by the process that creates the region, while the others wait.
        folder: of a file system in memory.

    Raises:
        ConfigError: the memory isn't available.
    """

    def __init__(self, name: str, samples: int, capacity: Callable[[], int], folder: Path = FOLDER) -> None:
        self.name = name
        self.samples = samples
        self._start = table_bytes(samples)
        with _holders(folder) as links:
            fd = self._attach(links)
            fd = self._create(capacity(), folder) if fd is None else fd
            links.append(f"/proc/{os.getpid()}/fd/{fd}")
        self._map = mmap.mmap(fd, 0)
        view = memoryview(self._map)
        self._begin = np.frombuffer(view, np.uint64, samples, _TABLE)
        self._size = np.frombuffer(view, np.uint64, samples, _TABLE + 8 * samples)
        self._stamp = np.frombuffer(view, np.int64, samples, _TABLE + 16 * samples)
        self._ready = np.frombuffer(view, np.uint8, samples, _TABLE + 24 * samples)
        self._view = view
        self._readable = view.toreadonly()
        self._lock = _Lock(fd)
        self.num_bytes: int = _HEADER.unpack_from(self._map)[0]
        self._release = weakref.finalize(self, _release, fd, self._lock)

    def _attach(self, links: list[str]) -> int | None:
        """The region that some process has open; None if none has one of this name and layout."""
        for link in links:
            if _region_of(link).startswith(f"{_PREFIX}{self.name}-"):
                with suppress(OSError):  # that process has just ended
                    fd = os.open(link, os.O_RDWR)
                    header = os.pread(fd, _HEADER.size, 0)
                    if len(header) == _HEADER.size and self._start + _HEADER.unpack(header)[0] == os.fstat(fd).st_size:
                        return fd
                    os.close(fd)
        return None

    def _create(self, num_bytes: int, folder: Path) -> int:
        fd, path = tempfile.mkstemp(prefix=f"{_PREFIX}{self.name}-", dir=folder)
        os.unlink(path)
        try:  # all at once: writing to a page without memory would kill the process
            os.posix_fallocate(fd, 0, self._start + num_bytes)
        except OSError as error:
            os.close(fd)
            raise ConfigError(
                f"data.cache: {decimal(num_bytes)} of memory can't be allocated in {folder}: {error.strerror}; "
                "set data.cache_gb lower or data.cache=none"
            ) from None
        os.pwrite(fd, _HEADER.pack(num_bytes, 0), 0)
        return fd

    def get(self, sample: int) -> memoryview | None:
        """A sample, read-only; None if it isn't kept."""
        if not self._ready[sample]:
            return None
        begin = int(self._begin[sample])
        return self._readable[begin : begin + int(self._size[sample])]

    def put(self, sample: int, parts: Sequence[Encoded], stamp: int = 0) -> None:
        """Keep a sample if there is room; its parts are joined. `stamp` is its file's modification time."""
        size = sum(len(part) for part in parts)
        begin = self._claim(sample, size)
        if begin is None:
            return
        at = begin
        for part in parts:
            self._view[at : at + len(part)] = part
            at += len(part)
        self._stamp[sample] = stamp
        with self._lock.held():  # also a memory barrier: the flag is visible only after the bytes
            self._ready[sample] = 1

    def _claim(self, sample: int, size: int) -> int | None:
        """Where to write a sample; None if another thread or process writes it already, or there is no room."""
        with self._lock.held():
            _, taken = _HEADER.unpack_from(self._map)
            if self._begin[sample] or taken + size > self.num_bytes:
                return None
            begin: int = self._start + taken
            _HEADER.pack_into(self._map, 0, self.num_bytes, taken + size)
            self._begin[sample], self._size[sample] = begin, size
            return begin

    def forget_changed(self, stamp: Callable[[int], int]) -> int:
        """Forget samples whose stamp is another now; they aren't kept again. Returns how many these are."""
        changed = 0
        for sample in np.flatnonzero(self._ready).tolist():
            if stamp(sample) != self._stamp[sample]:
                with self._lock.held():
                    self._ready[sample] = 0
                changed += 1
        return changed

    def kept(self) -> int:
        """Number of samples that are kept."""
        return int(np.count_nonzero(self._ready))


class _Lock:
    """A lock between the threads of this process and between processes.

    It belongs to the open file description, not to the process: closing another descriptor of the file keeps it.

    Args:
        file: descriptor of the file to lock.
    """

    def __init__(self, file: int) -> None:
        self._file = file
        self._threads = threading.Lock()
        self._fd = self._opened()
        _locks.add(self)

    def _opened(self) -> int:
        return os.open(f"/proc/self/fd/{self._file}", os.O_RDWR)  # a new description, even if the file was renamed

    @contextmanager
    def held(self) -> Iterator[None]:
        with self._threads:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLKW, _FLOCK.pack(fcntl.F_WRLCK, 0, 0, 1, 0))
            try:
                yield
            finally:
                fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, 0, 0, 1, 0))

    def renew(self) -> None:
        """After a fork: a thread of the parent may have held the locks, and doesn't exist here to release them."""
        self._threads = threading.Lock()
        os.close(self._fd)  # first, in case the process has no descriptor left
        self._fd = self._opened()

    def close(self) -> None:
        _locks.discard(self)
        os.close(self._fd)


_locks: weakref.WeakSet[_Lock] = weakref.WeakSet()


def _renew_locks() -> None:
    for lock in list(_locks):
        lock.renew()


os.register_at_fork(after_in_child=_renew_locks)  # while the child has a single thread


@contextmanager
def _holders(folder: Path) -> Iterator[list[str]]:
    """Who has a region open: a list of /proc/PID/fd/N, locked for the block and written after it."""
    path = folder / f"effloop-caches-{os.getuid()}"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        if os.fstat(fd).st_uid != os.getuid():
            os.close(fd)
            raise PermissionError(None, "it belongs to another user")
    except OSError as error:
        raise ConfigError(
            f"data.cache: {path} can't be opened: {error.strerror}; remove it or set data.cache=none"
        ) from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        with open(fd, "r+", closefd=False) as file:
            links = [link for link in file.read().split() if _region_of(link)]
            yield links
            file.seek(0)
            file.truncate()
            file.write("\n".join(links))
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)  # closing alone would keep it in a child that was forked meanwhile
        os.close(fd)


def _region_of(link: str) -> str:
    """The former name of the region that a /proc/PID/fd/N is; empty if it is none, any more."""
    try:
        name = Path(os.readlink(link)).name
    except OSError:
        return ""
    return name if name.startswith(_PREFIX) else ""


def _release(fd: int, lock: _Lock) -> None:
    lock.close()
    os.close(fd)

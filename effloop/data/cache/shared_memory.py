"""Shared memory that all processes of this machine find by its name and fill together."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import stat
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import numpy as np
from rich.filesize import decimal

from effloop.data.image.header import Encoded
from effloop.errors import ConfigError
from effloop.system.files import try_lock

FOLDER = Path("/dev/shm")  # noqa: S108  memory, with a name that other processes can open
_PREFIX = "effloop-cache-"
_HEADER = struct.Struct("<QQ")  # bytes of the region, bytes of it that are taken
_FLOCK = struct.Struct("hhqqi4x")  # Linux's struct flock: kind, whence, start, length, process
_TABLE = 64  # where the table begins
_ATTEMPTS = 5000  # of a millisecond and more: others that remove it again and again give way before


def table_bytes(samples: int) -> int:
    """Bytes in front of the samples: the header, and what is noted of each."""
    return -(-(_TABLE + 17 * samples) // mmap.PAGESIZE) * mmap.PAGESIZE


class Region:
    """A stretch of shared memory that fills up with samples as they are first read.

    Whoever comes first makes it; the others, workers and ranks of this machine, join. It is gone when
    the last of them has ended, or, after a kill, when the next one is made.

    Layout: the header; for each sample where it begins (u64, 0: not here) and how long it is (u64);
    for each sample one byte that says whether it is there; the samples.

    Args:
        name: what is kept; the same name is the same memory.
        samples: how many there are at most.
        room: bytes for samples; asked only if the region has to be made, the others wait for the answer.
        folder: of a file system in memory.

    Raises:
        ConfigError: the memory isn't there, or something else has its name.
    """

    def __init__(self, name: str, samples: int, room: Callable[[], int], folder: Path = FOLDER) -> None:
        self.path = folder / f"{_PREFIX}{os.getuid()}-{name}"
        self.samples = samples
        self._start = table_bytes(samples)
        fd = self._open(room)
        self._map = mmap.mmap(fd, 0)
        view = memoryview(self._map)
        self._begin = np.frombuffer(view, np.uint64, samples, _TABLE)
        self._size = np.frombuffer(view, np.uint64, samples, _TABLE + 8 * samples)
        self._ready = np.frombuffer(view, np.uint8, samples, _TABLE + 16 * samples)
        self._view = view
        self._readable = view.toreadonly()
        self._lock = _Lock(fd)
        self.num_bytes: int = _HEADER.unpack_from(self._map)[0]
        self._release = weakref.finalize(self, _release, fd, self._lock, self.path, os.getpid())

    def _open(self, room: Callable[[], int]) -> int:
        """Join or make the file; either way with the shared lock that says that it is in use."""
        for _ in range(_ATTEMPTS):
            _remove_stale(self.path.parent)
            fd = self._join()
            if fd is None:
                fd = self._make(room)
            if fd is not None:
                return fd
            time.sleep(0.001)  # another process has just removed it, or has not yet begun
        raise _in_the_way(self.path, "it is not complete, and in use")

    def _join(self) -> int | None:
        """The file that is there; None if none is, or none that is complete."""
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_NOFOLLOW)
        except FileNotFoundError:
            return None
        except OSError as error:  # somebody else's, a link, a folder
            why = "it is a link" if error.errno == errno.ELOOP else str(error.strerror)
            raise _in_the_way(self.path, why) from None
        with ExitStack() as undo:
            undo.callback(os.close, fd)
            status = os.fstat(fd)
            if status.st_uid != os.getuid():
                raise _in_the_way(self.path, "it belongs to somebody else")
            if not stat.S_ISREG(status.st_mode):
                raise _in_the_way(self.path, "it is not a plain file")
            fcntl.flock(fd, fcntl.LOCK_SH)  # waits for whoever is making it
            if not _is_at(self.path, fd) or not self._is_complete(fd):
                return None
            undo.pop_all()
            return fd

    def _is_complete(self, fd: int) -> bool:
        """Whether it has its whole length, and not what a kill left of it or another layout."""
        header = os.pread(fd, _HEADER.size, 0)
        return len(header) == _HEADER.size and self._start + _HEADER.unpack(header)[0] == os.fstat(fd).st_size

    def _make(self, room: Callable[[], int]) -> int | None:
        """The file, new; None if another process was faster."""
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_NOFOLLOW | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            return None
        except OSError as error:
            raise ConfigError(f"data.cache: {self.path} can't be made: {error.strerror}; set data.cache=none") from None
        with ExitStack() as undo:
            undo.callback(os.close, fd)
            fcntl.flock(fd, fcntl.LOCK_EX)  # others wait until it is complete
            if not _is_at(self.path, fd):
                return None
            undo.callback(_remove, fd, self.path)
            self._fill(fd, room())
            fcntl.flock(fd, fcntl.LOCK_SH)  # gives up the one lock before it takes the other
            if not _is_at(self.path, fd):
                return None  # removed in between, as one that nobody uses
            undo.pop_all()
            return fd

    def _fill(self, fd: int, num_bytes: int) -> None:
        try:  # all at once: a page that isn't there when it is written to kills the process
            os.posix_fallocate(fd, 0, self._start + num_bytes)
        except OSError as error:
            raise ConfigError(
                f"data.cache: {decimal(num_bytes)} of memory can't be had in {self.path.parent}: {error.strerror}; "
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
        with self._lock.held():  # also a barrier: no processor shows the flag before the bytes
            self._ready[sample] = 1

    def _claim(self, sample: int, size: int) -> int | None:
        """Where a sample may be written; None if somebody is at it already or there is no room."""
        with self._lock.held():
            _, taken = _HEADER.unpack_from(self._map)
            if self._begin[sample] or taken + size > self.num_bytes:
                return None
            begin: int = self._start + taken
            _HEADER.pack_into(self._map, 0, self.num_bytes, taken + size)
            self._begin[sample], self._size[sample] = begin, size
            return begin

    def kept(self) -> int:
        """Samples that are there."""
        return int(np.count_nonzero(self._ready))


class _Lock:
    """Alone among the threads of this process and among all processes.

    A lock of the open file's, not of the process's: closing another file of that name doesn't drop it.

    Args:
        file: descriptor of what is locked.
    """

    def __init__(self, file: int) -> None:
        self._file = file
        self._threads = threading.Lock()
        self._fd = self._opened()
        _locks.add(self)

    def _opened(self) -> int:
        return os.open(f"/proc/self/fd/{self._file}", os.O_RDWR)  # opened anew, wherever its name has gone

    @contextmanager
    def held(self) -> Iterator[None]:
        with self._threads:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLKW, _FLOCK.pack(fcntl.F_WRLCK, 0, 0, 1, 0))
            try:
                yield
            finally:
                fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, 0, 0, 1, 0))

    def renew(self) -> None:
        """Part from the parent: a thread of its own may have held both at the fork, and isn't here to let go."""
        self._threads = threading.Lock()
        os.close(self._fd)  # first, so that a process with as many files as it may have finds one free
        self._fd = self._opened()

    def close(self) -> None:
        _locks.discard(self)
        os.close(self._fd)


_locks: weakref.WeakSet[_Lock] = weakref.WeakSet()


def _renew_locks() -> None:
    for lock in list(_locks):
        lock.renew()


os.register_at_fork(after_in_child=_renew_locks)  # while the child has one thread: later, several would race for it


def _in_the_way(path: Path, why: str) -> ConfigError:
    return ConfigError(f"data.cache: {path} is in the way: {why}; remove it or set data.cache=none")


def _is_at(path: Path, fd: int) -> bool:
    try:
        now = os.lstat(path)
    except FileNotFoundError:
        return False
    return os.path.samestat(now, os.fstat(fd))


def _remove(fd: int, path: Path) -> None:
    if _is_at(path, fd):
        with suppress(OSError):  # gone already, or somebody else's in a folder of everybody's
            path.unlink()


def _release(fd: int, lock: _Lock, path: Path, pid: int) -> None:
    """Remove the memory's name if nobody else uses it."""
    lock.close()
    if os.getpid() == pid:  # a forked worker shares the file with its parent
        _remove_unused(fd, path)
    os.close(fd)


def _remove_unused(fd: int, path: Path) -> None:
    with suppress(OSError):
        if try_lock(fd):  # else it is in use
            _remove(fd, path)


def _remove_stale(folder: Path) -> None:
    """Remove what runs left behind that were killed."""
    for path in folder.glob(f"{_PREFIX}{os.getuid()}-*"):
        try:
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            continue  # gone already, or not ours
        try:
            _remove_unused(fd, path)
        finally:
            os.close(fd)

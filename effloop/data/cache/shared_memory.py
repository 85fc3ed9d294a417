"""Named shared memory that all processes of this machine fill together."""

from __future__ import annotations

import errno
import fcntl
import mmap
import multiprocessing
import os
import stat
import struct
import subprocess
import sys
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

_REMOVER = """
import fcntl, os, sys, time
sys.stdin.buffer.read()
for _ in range(100):
    try:
        fd = os.open(sys.argv[1], os.O_RDWR | os.O_NOFOLLOW)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.lstat(sys.argv[1]), os.fstat(fd)):
            os.unlink(sys.argv[1])
        break
    except BlockingIOError:
        os.close(fd)
        time.sleep(0.05)
    except OSError:
        break
"""
"""A process that waits until the processes that have its standard input open have ended, by a kill, too.

The kernel closes the files of a killed process one by one: the lock may be held for a moment longer than the pipe.
"""

_left: list[subprocess.Popen[bytes]] = []
"""Those that end later, kept as Python warns of a process that is forgotten while it runs."""


def start_remover(path: Path) -> subprocess.Popen[bytes] | None:
    """Have a file removed that this process and its forks leave behind, unless others use it; None if that can't be."""
    _left[:] = [process for process in _left if process.poll() is None]
    try:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _REMOVER, path],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # what ends a whole group ends this one later
        )
    except OSError:  # the next run removes it
        return None


def end_remover(process: subprocess.Popen[bytes], *, removed: bool) -> None:
    """End what `start_remover` has started: at once if the file is gone; else it tries for some seconds more."""
    assert process.stdin is not None
    process.stdin.close()
    if removed:
        process.kill()
        process.wait()
    else:
        _left.append(process)


FOLDER = Path("/dev/shm")  # noqa: S108  memory, with a name that other processes can open
_PREFIX = "effloop-cache-"
_HEADER = struct.Struct("<QQ")  # bytes of the region, bytes of it that are taken
_FLOCK = struct.Struct("hhqqi4x")  # Linux's struct flock: type, whence, start, length, pid
_TABLE = 64  # offset of the table
_ATTEMPTS = 5000  # of at least 1 ms, in case other processes keep removing the file


def table_bytes(samples: int) -> int:
    """Bytes before the samples: the header and the table."""
    return -(-(_TABLE + 25 * samples) // mmap.PAGESIZE) * mmap.PAGESIZE


class Region:
    """Shared memory that is filled with samples when they are first read.

    The first process creates it; other workers and ranks of this machine attach to it. It is removed when the last of
    them ends, or, if that was killed, when another region is created.

    Layout: the header; a table with the offset (u64, 0: absent) of each sample, then the size (u64) of each, then
    its stamp (i64), then a byte for each, 1 once it is complete; the samples.

    Args:
        name: identifies what is kept; the same name is the same memory.
        samples: maximum number of samples.
        capacity: bytes for samples; called only by the process that creates the region, while the others wait.
        folder: of a file system in memory.

    Raises:
        ConfigError: the memory isn't available, or something else has its name.
    """

    def __init__(self, name: str, samples: int, capacity: Callable[[], int], folder: Path = FOLDER) -> None:
        self.path = folder / f"{_PREFIX}{os.getuid()}-{name}"
        self.samples = samples
        self._start = table_bytes(samples)
        fd = self._open(capacity)
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
        remover = None if multiprocessing.current_process().daemon else start_remover(self.path)  # workers are daemons
        self._release = weakref.finalize(self, _release, fd, self._lock, self.path, (os.getpid(), remover))

    def _open(self, capacity: Callable[[], int]) -> int:
        """Attach to the file or create it, and hold a shared lock that marks it as in use."""
        for _ in range(_ATTEMPTS):
            _remove_stale(self.path.parent)
            fd = self._attach()
            if fd is None:
                fd = self._create(capacity)
            if fd is not None:
                return fd
            time.sleep(0.001)  # another process has just removed it, or has just started to create it
        raise _in_the_way(self.path, "it is not complete, and in use")

    def _attach(self) -> int | None:
        """The existing file; None if there is none, or it is incomplete."""
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_NOFOLLOW)
        except FileNotFoundError:
            return None
        except OSError as error:  # another user's file, a link, a folder
            why = "it is a link" if error.errno == errno.ELOOP else str(error.strerror)
            raise _in_the_way(self.path, why) from None
        with ExitStack() as undo:
            undo.callback(os.close, fd)
            status = os.fstat(fd)
            if status.st_uid != os.getuid():
                raise _in_the_way(self.path, "it belongs to another user")
            if not stat.S_ISREG(status.st_mode):
                raise _in_the_way(self.path, "it is not a plain file")
            fcntl.flock(fd, fcntl.LOCK_SH)  # waits for the process that creates it
            if not _is_at(self.path, fd) or not self._is_complete(fd):
                return None
            undo.pop_all()
            return fd

    def _is_complete(self, fd: int) -> bool:
        """Whether the length is that of its header: a kill or another layout leaves another one."""
        header = os.pread(fd, _HEADER.size, 0)
        return len(header) == _HEADER.size and self._start + _HEADER.unpack(header)[0] == os.fstat(fd).st_size

    def _create(self, capacity: Callable[[], int]) -> int | None:
        """A new file; None if another process was faster."""
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
            self._allocate(fd, capacity())
            fcntl.flock(fd, fcntl.LOCK_SH)  # not atomic: releases the exclusive lock first
            if not _is_at(self.path, fd):
                return None  # removed in between, as unused
            undo.pop_all()
            return fd

    def _allocate(self, fd: int, num_bytes: int) -> None:
        try:  # all at once: writing to a page without memory would kill the process
            os.posix_fallocate(fd, 0, self._start + num_bytes)
        except OSError as error:
            raise ConfigError(
                f"data.cache: {decimal(num_bytes)} of memory can't be allocated in {self.path.parent}: "
                f"{error.strerror}; set data.cache_gb lower or data.cache=none"
            ) from None
        os.pwrite(fd, _HEADER.pack(num_bytes, 0), 0)

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
        with suppress(OSError):  # removed already, or another user's in a shared folder
            path.unlink()


def _release(fd: int, lock: _Lock, path: Path, owner: tuple[int, subprocess.Popen[bytes] | None]) -> None:
    """Remove the file if no other process uses it."""
    pid, remover = owner
    lock.close()
    if os.getpid() == pid:  # a forked worker shares the file with its parent
        _remove_unused(fd, path)
    removed = not _is_at(path, fd)
    os.close(fd)
    if remover and os.getpid() == pid:
        end_remover(remover, removed=removed)


def _remove_unused(fd: int, path: Path) -> None:
    with suppress(OSError):
        if try_lock(fd):  # else it is in use
            _remove(fd, path)


def _remove_stale(folder: Path) -> None:
    """Remove what killed runs left behind."""
    for path in folder.glob(f"{_PREFIX}{os.getuid()}-*"):
        try:
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            continue  # removed already, or another user's
        try:
            _remove_unused(fd, path)
        finally:
            os.close(fd)

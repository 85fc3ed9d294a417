"""Keeps samples in memory, one copy per machine: their encoded bytes, or their decoded pixels."""

from __future__ import annotations

import fcntl
import hashlib
import json
import mmap
import os
import struct
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import PIL
from numpy.typing import NDArray
from rich.filesize import decimal

from effloop.data.decode import DecodeConfig, Decoder
from effloop.data.image.encoded import EncodedImages
from effloop.data.image.header import Encoded, pnm_header
from effloop.data.image.mask import PLAIN, decode_mask, mask_size
from effloop.data.source import Cache, Kind, Source
from effloop.data.source.view import View
from effloop.errors import ConfigError, DataError, warn
from effloop.system.files import locked
from effloop.system.hardware import available_memory
from effloop.system.memory import SHM

_PREFIX = "effloop-cache-"
_HEADER = struct.Struct("<QQ")  # bytes of the region, bytes of it that are taken
_FLOCK = struct.Struct("hhqqi4x")  # Linux's struct flock: type, whence, start, length, pid
_TABLE = 64  # offset of the table
_LOCKED_S = 600  # in which a process makes a region, all of whose memory the kernel clears


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

    def __init__(self, name: str, samples: int, capacity: Callable[[], int], folder: Path = SHM) -> None:
        self.name = name
        self.samples = samples
        self._start = table_bytes(samples)
        try:
            folder = folder.resolve(strict=True)  # as /proc has it
            with locked(folder, _LOCKED_S) as is_free:
                if not is_free:  # any user may lock it
                    raise OSError(0, f"another process has locked it for {_LOCKED_S} s (`fuser -v {folder}` shows it)")
                fd = self._attach(folder)
                fd = self._create(capacity(), folder) if fd is None else fd
        except OSError as error:
            raise ConfigError(f"data.cache: {folder} can't be used: {error.strerror}; set data.cache=none") from None
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

    def _attach(self, folder: Path) -> int | None:
        """The region that some process of this user has open; None if none has one of this name and layout."""
        name = f"{folder}/{_PREFIX}{self.name}-"
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with suppress(OSError):  # another user's, or it has just ended
                for number in os.listdir(f"/proc/{pid}/fd"):
                    with suppress(OSError):  # it was closed meanwhile
                        link = f"/proc/{pid}/fd/{number}"
                        if os.readlink(link).startswith(name) and (fd := self._opened(link)) is not None:
                            return fd
        return None

    def _opened(self, link: str) -> int | None:
        fd = os.open(link, os.O_RDWR)
        header, status = os.pread(fd, _HEADER.size, 0), os.fstat(fd)
        own = status.st_uid == os.getuid() and len(header) == _HEADER.size
        if own and self._start + _HEADER.unpack(header)[0] == status.st_size:
            return fd
        os.close(fd)
        return None

    def _create(self, num_bytes: int, folder: Path) -> int:
        try:
            fd, path = tempfile.mkstemp(prefix=f"{_PREFIX}{self.name}-", dir=folder)
            os.unlink(path)
        except OSError as error:
            raise ConfigError(f"data.cache: can't write to {folder}: {error.strerror}; set data.cache=none") from None
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
    """A lock of a file (its descriptor) between the threads of this process and between processes.

    It belongs to the open file description, not to the process: closing another descriptor of the file keeps it.
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


def _release(fd: int, lock: _Lock) -> None:
    lock.close()
    os.close(fd)


class CachedSource(View):
    """A source that reads each sample once per machine, as long as there is memory for it: its image, and its mask
    where targets are masks.

    Args:
        source: whose samples are kept.
        what: the encoded bytes, or the decoded pixels as a raw image (`header.pnm_header`), which every decoder
            returns as a view; of a mask its classes.
        decoder: decodes the pixels.
        capacity: bytes for samples; called only if no process of this machine keeps them yet.
        folder: of a file system in memory.
    """

    def __init__(
        self, source: Source, what: Cache, decoder: Decoder, capacity: Callable[[], int], folder: Path = SHM
    ) -> None:
        super().__init__(source)
        self.what, self.decoder, self.folder = what, decoder, folder
        self._name = _name(source, what, decoder)
        self._open(capacity)
        # Images that were overwritten in place since another run has kept them, 2 µs for each. What changes while this
        # run reads it is not noticed.
        if changed := self.region.forget_changed(self._stamp):
            warn(
                f"data.cache: {changed:,} files in {source.where} were changed since another run on this machine put "
                "them there; they are read from disk"
            )

    def _open(self, capacity: Callable[[], int]) -> None:
        if self.what is Cache.pixels:
            self.mask_format = PLAIN
        self.region = Region(self._name, _entries(self.source), capacity, self.folder)

    def _stamp(self, entry: int) -> int:
        """When the file of an entry's sample was modified; 0 if that isn't known, or it is gone."""
        try:
            return self.source.modified_ns(entry % len(self.source)) or 0
        except DataError:
            return 0

    def read(self, index: int) -> Encoded:
        return self.region.get(index) or self._keep(index, index, self._image)

    def read_mask(self, index: int) -> Encoded:
        if self.kind is not Kind.masks:
            return super().read_mask(index)
        entry = len(self.source) + index  # behind the images
        return self.region.get(entry) or self._keep(entry, index, self._mask)

    def _keep(self, entry: int, index: int, load: Callable[[int], list[Encoded]]) -> Encoded:
        stamp = self._stamp(index)  # before it is read, as the file may change meanwhile
        parts = load(index)
        self.region.put(entry, parts, stamp)
        return self.region.get(entry) or (parts[0] if len(parts) == 1 else b"".join(parts))

    def _image(self, index: int) -> list[Encoded]:
        data = self.source.read(index)
        if self.what is Cache.bytes:
            return [data]
        pixels = np.ascontiguousarray(self.decoder.decode(data))
        return [pnm_header(*pixels.shape), pixels.reshape(-1).data]

    def _mask(self, index: int) -> list[Encoded]:
        data = self.source.read_mask(index)
        if self.what is Cache.bytes:
            return [data]
        mask = decode_mask(data, self.source.mask_format)
        height, width = mask.shape
        return [pnm_header(height, width, 1), mask.tobytes()]

    def entropy_indexes(self, samples: NDArray[np.int64], images: EncodedImages) -> EncodedImages | None:
        return self.source.entropy_indexes(samples, images) if self.what is Cache.bytes else None

    def describe(self) -> str:
        """One line: what is kept, and in how much memory."""
        return f"{self.what.value}, room for {decimal(self.region.num_bytes)} in {self.folder}"

    def will_need(self, indices: Sequence[int]) -> None:
        self.source.will_need([index for index in indices if self.region.get(index) is None])

    def __getstate__(self) -> dict[str, Any]:
        state = {name: getattr(self, name) for name in ("source", "what", "decoder", "folder", "_name")}
        return {**state, "num_bytes": self.region.num_bytes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        num_bytes: int = state.pop("num_bytes")
        super().__init__(state["source"])
        self.__dict__.update(state)
        self._open(lambda: num_bytes)


def _entries(source: Source) -> int:
    """What a region has room for: an image of each sample, and behind them a mask of each where targets are masks."""
    return len(source) * (2 if source.kind is Kind.masks else 1)


_LAYOUT = 2  # version of what a region contains


def _name(source: Source, what: Cache, decoder: Decoder) -> str:
    """Identifies what is kept, in 16 hex digits: the data in its current state, and how it is decoded."""
    identity: dict[str, Any] = {"data": source.identity(), "kind": what.value, "layout": _LAYOUT}
    if what is Cache.pixels:
        identity["decoder"] = decoder_identity(decoder)
    if source.kind is Kind.masks:
        identity["masks"] = True
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]


def decoder_identity(decoder: Decoder) -> dict[str, Any]:
    """What its pixels depend on: its class, its options, and the versions of the packages it uses."""
    identity: dict[str, Any] = {"class": type(decoder).__qualname__, "PIL": PIL.__version__}  # for damaged images
    if decoder.channels != 3:
        identity["channels"] = decoder.channels
    for name, part in vars(decoder).items():
        if isinstance(part, Decoder):
            identity[name] = decoder_identity(part)
        elif isinstance(part, ModuleType):
            identity[name] = [part.__name__, getattr(part, "__version__", None)]
        elif isinstance(part, DecodeConfig):
            identity[name] = repr(part)
    return identity


_SAMPLED = 2000
_MARGIN = 1.05  # for the error of an estimate from 2,000 sizes


def cached(
    source: Source, what: Cache, decoder: Decoder, limit: float | None, *, share: float = 1.0, folder: Path = SHM
) -> Source:
    """`source`, or a source that keeps it in memory, shared with the other processes of this machine: in a fraction
    `share` of `limit` bytes, which are for all splits and by default half of the free memory.

    Raises:
        ConfigError: there is too little memory, or no such folder.
    """
    if what is Cache.none:
        return source

    def capacity() -> int:
        total = source.fingerprint()["bytes"] if what is Cache.bytes else 0
        total = total or _bytes_of_pixels(source, decoder)  # 0 also where a plugin's fingerprint doesn't count them
        return int(min(total + bytes_of_masks(source, what), _allowed(_entries(source), limit, share, folder)))

    return CachedSource(source, what, decoder, capacity, folder)


def _allowed(samples: int, limit: float | None, share: float, folder: Path) -> float:
    """Bytes that the samples may take."""
    status = os.statvfs(folder)
    free = min(available_memory(), status.f_bavail * status.f_frsize)
    there, needed = min(free * 0.5 if limit is None else limit, free * 0.9) * share, table_bytes(samples)
    if there <= needed:
        raise ConfigError(
            f"data.cache_gb: {decimal(int(there))} is too little for {samples:,} samples: their index alone takes "
            f"{decimal(needed)}; {decimal(free)} of memory are free; set data.cache=none or data.cache_gb higher"
        )
    return there - needed


def _bytes_of_pixels(source: Source, decoder: Decoder) -> int:
    """Bytes of all images when decoded, as `_estimated`."""

    def size_of(sample: int) -> int:
        height, width = decoder.size(source.read(sample))
        return decoder.channels * height * width + len(pnm_header(height, width, 3))

    return _estimated(len(source), size_of)


def bytes_of_masks(source: Source, what: Cache) -> int:
    """Bytes of all masks as they are kept, as `_estimated`; 0 where targets are no masks."""

    def size_of(sample: int) -> int:
        data = source.read_mask(sample)
        if what is Cache.bytes:
            return len(data)
        height, width = mask_size(data)
        return height * width + len(pnm_header(height, width, 1))

    return _estimated(len(source), size_of) if source.kind is Kind.masks else 0


def _estimated(count: int, size_of: Callable[[int], int]) -> int:
    """Bytes of all samples: exact up to 2,000 of them, otherwise estimated with a margin.

    Samples that can't be read count as 0; the error is raised when they are used.
    """
    ids = np.unique(np.linspace(0, count - 1, min(_SAMPLED, count)).astype(np.int64)).tolist()
    sizes = []
    for sample in ids:
        with suppress(DataError):
            sizes.append(size_of(sample))
    if len(ids) == count or not sizes:
        return sum(sizes)
    return int(sum(sizes) / len(sizes) * count * _MARGIN)

"""The child that lists and fetches: `python -m effloop.data.remote.download`, run by `fetch`.

It sends {"manifest": NAME} after listing. By then it has locked that dataset, which keeps it from being removed.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import IO, Any

from effloop.data.remote.buckets import BUCKETS, BucketStore
from effloop.data.remote.cache import DONE, PART, Cache
from effloop.data.remote.child import moved, say, serve
from effloop.data.remote.filesystems import FsspecStore
from effloop.data.remote.http import HttpStore
from effloop.data.remote.location import Location
from effloop.data.remote.manifest import Manifest, RemoteFile
from effloop.data.remote.store import ChangedError, FetchError, Store, in_threads, retried
from effloop.errors import ConfigError
from effloop.system.files import describe_failure

_BY_FSSPEC = (
    *("box", "bos", "cos", "dbfs", "dropbox", "ftp", "gdrive", "github", "hdfs", "hf", "lakefs", "obs", "oci", "oss"),
    *("sftp", "smb", "ssh", "tos", "webdav", "webhdfs"),
)
"""Schemes of fsspec for remote files; others read this machine, wrap files in files or keep caches of their own."""
_locks: list[IO[str]] = []
"""Held until this process ends."""


def store_of(location: Location) -> Store:
    """The store that reads a location.

    Raises:
        ConfigError: a package is missing, or nothing reads such a URL.
    """
    if location.is_http:
        return HttpStore(location)
    if location.scheme in BUCKETS:
        return BucketStore(location)
    if location.scheme in _BY_FSSPEC:
        return FsspecStore(location)
    known = ", ".join(("s3", "gs", "az", "https", *BUCKETS[4:], *_BY_FSSPEC))
    raise ConfigError(f"data.root: '{location.root}' is of no scheme that EffLoop reads; have {known}")


@cache
def _boot() -> str:
    """Identifies this start of the machine; empty if it has no such name."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


class Part:
    """A file that is being fetched: its bytes at their places, and a list of the chunks that are there.

    Chunks aren't synced to the disk one by one, so the list counts until the machine starts again: its first line names
    the start that it was written in.

    Args:
        file: to fetch.
        path: where it goes when it is whole.
        chunk_bytes: size of its chunks; all of a file without ranges is one.
    """

    def __init__(self, file: RemoteFile, path: Path, chunk_bytes: int) -> None:
        self.file, self._path = file, path
        self._part, self._list = path.with_name(path.name + PART), path.with_name(path.name + DONE)
        size = chunk_bytes if file.ranges else file.size
        chunks = [(start, min(start + size, file.size)) for start in range(0, file.size, size)]
        known = self._known() & {*chunks} if file.ranges else set()
        self._fd = os.open(self._part, os.O_RDWR | os.O_CREAT, 0o644)
        self._done = os.open(self._list, os.O_WRONLY | os.O_CREAT | os.O_APPEND | (0 if known else os.O_TRUNC), 0o644)
        if not known:
            os.write(self._done, f"{_boot()}\n".encode())
        self.missing = [chunk for chunk in chunks if chunk not in known]
        self._left, self._lock = len(self.missing), threading.Lock()

    def _known(self) -> set[tuple[int, int]]:
        try:
            boot, *rows = [line for line in self._list.read_text().splitlines(keepends=True) if line.endswith("\n")]
            found = {(int(start), int(stop)) for start, stop in map(str.split, rows)}
            return found if boot.strip() == _boot() != "" and self._part.exists() else set()
        except (OSError, ValueError):
            return set()

    def write(self, data: bytes | memoryview, at: int) -> None:
        """Write bytes at their place."""
        view = memoryview(data)
        while view:
            count = os.pwrite(self._fd, view, at)
            view, at = view[count:], at + count

    def chunk_done(self, start: int, stop: int) -> bool:
        """Note that a chunk is there; whether it was the last one."""
        with self._lock:
            os.write(self._done, f"{start} {stop}\n".encode())
            self._left -= 1
            return not self._left

    def discard(self) -> None:
        """Begin anew the next time."""
        self._list.unlink(missing_ok=True)

    def finish(self) -> None:
        """Sync the file to the disk, and give it its name."""
        os.ftruncate(self._fd, self.file.size)
        os.fsync(self._fd)
        self.close()
        os.replace(self._part, self._path)
        self._list.unlink(missing_ok=True)

    def close(self) -> None:
        """Leave it as it is."""
        os.close(self._fd)
        os.close(self._done)


class Download:
    """Fetches the files of a manifest into the cache by threads, which request `chunk_bytes` at a time."""

    def __init__(self, store: Store, manifest: Manifest, cache: Cache, chunk_bytes: int) -> None:
        self._store, self._manifest, self._cache, self._chunk_bytes = store, manifest, cache, chunk_bytes
        self._lock = threading.Lock()

    def run(self) -> None:
        """Fetch what is missing.

        Raises:
            DataError: something can't be fetched. Threads that still fetch end with the process.
            OSError: it can't be written.
        """
        chunks = self._chunks()

        def work(_: int) -> None:
            while True:
                with self._lock:
                    chunk = next(chunks, None)
                if chunk is None:
                    return
                self._fetch(*chunk)

        in_threads(work, range(self._store.at_once), self._store.at_once)

    def _chunks(self) -> Iterator[tuple[Part, int, int]]:
        for file in self._cache.missing(self._manifest):
            part = Part(file, self._cache.content(self._manifest, file), self._chunk_bytes)
            if not part.missing:
                self._finish(part)
            for start, stop in part.missing:
                yield part, start, stop

    def _fetch(self, part: Part, start: int, stop: int) -> None:
        at = start

        def fetch() -> None:
            nonlocal at
            try:
                for data in self._store.read(part.file, at, stop):
                    if at + len(data) > stop:
                        raise FetchError(f"it has more than {stop:,} bytes")
                    part.write(data, at)
                    at += len(data)
                    moved(len(data))
                if at < stop:
                    raise FetchError(f"the answer ended after {at:,} of {part.file.size:,} bytes", again=True)
            except FetchError:
                if not part.file.ranges:  # else the next attempt continues there
                    moved(start - at)
                    at = start
                raise

        retried(self._store.location.url(part.file.key), fetch)
        if part.chunk_done(start, stop):
            self._finish(part)

    def _finish(self, part: Part) -> None:
        """Check that a file is still the one that was listed, and have it appear under its name."""

        def check() -> None:
            try:
                self._store.check(part.file)
            except ChangedError:
                part.discard()
                raise

        retried(self._store.location.url(part.file.key), check)
        part.finish()


def _run(request: dict[str, Any]) -> dict[str, int]:
    cache, location = Cache(Path(request["folder"])), Location.of(request["root"])
    store = store_of(location)
    manifest = store.manifest()
    _locks.append(cache.use(manifest))
    say(manifest=manifest.folder)
    if missing := cache.missing(manifest):
        say(total=sum(file.size for file in missing))
        _fetch(store, manifest, cache, request)
    cache.link(manifest)
    return {"files": len(manifest.files), "bytes": manifest.bytes}


def _fetch(store: Store, manifest: Manifest, cache: Cache, request: dict[str, Any]) -> None:
    try:
        cache.make_room(manifest, request["limit"])
        Download(store, manifest, cache, request["chunk_bytes"]).run()
    except OSError as error:
        raise ConfigError(
            f"data.download_dir: {describe_failure(cache.folder, error)}; make room there, or set "
            "data.download_dir=FOLDER"
        ) from None


def _unwritable(request: dict[str, Any], error: OSError) -> str:
    path = Path(os.fsdecode(error.filename)) if error.filename else Path(request["folder"])
    return f"data.download_dir: {describe_failure(path, error)}; set another folder"


if __name__ == "__main__":
    serve(_run, _unwritable)

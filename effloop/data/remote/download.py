"""The child that lists and fetches: `python -m effloop.data.remote.download`, run by `fetch`.

Threads and connections of network clients don't survive the fork of workers. It answers with lines of JSON:
{"total": N, "bytes": N}, what it fetches and has fetched so far, 5 times a second; and at its end the same with "name",
"files" and "of_bytes" of the dataset, or with "error", a line, and its "kind".
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from effloop.data.remote.cache import DONE, PART, Cache
from effloop.data.remote.location import Location, Manifest, RemoteFile
from effloop.data.remote.stores import ChangedError, FetchError, Store, in_threads, retried, store_of
from effloop.errors import ConfigError, EffLoopError
from effloop.system import processes
from effloop.system.files import describe_failure
from effloop.system.signals import ignore_interrupts, ignore_stops, unblock_interrupts

_REPORT_S = 0.2


@cache
def _boot() -> str:
    """Identifies this start of the machine; empty if it has no such name."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


class Part:
    """A file that is being fetched: its bytes at their places, and a list of the chunks that are there.

    Chunks aren't synced to the disk one by one, so the list counts until the machine starts again: its first line names
    the start that it was written in. All of a file without ranges is one chunk.
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
    """Fetches the files of a manifest into the cache by threads, which request `chunk_bytes` at a time.

    `moved` are the bytes that came, less those that have to come again.
    """

    def __init__(self, store: Store, manifest: Manifest, cache: Cache, chunk_bytes: int) -> None:
        self._store, self._manifest, self._cache, self._chunk_bytes = store, manifest, cache, chunk_bytes
        self._lock = threading.Lock()
        self.moved = 0

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

    def _count(self, num_bytes: int) -> None:
        with self._lock:
            self.moved += num_bytes

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
                    self._count(len(data))
                if at < stop:
                    raise FetchError(f"the answer ended after {at:,} of {part.file.size:,} bytes", again=True)
            except FetchError:
                if not part.file.ranges:  # else the next attempt continues there
                    self._count(start - at)
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


def _serve() -> None:
    """Do the work of this child's request."""
    answers = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what packages print is no answer
    ignore_interrupts()
    ignore_stops()
    unblock_interrupts()
    request = processes.receive_request()
    total, begun = 0, list[Download]()

    def say(**facts: Any) -> None:
        line = json.dumps({"total": total, "bytes": sum(each.moved for each in begun), **facts})
        try:
            os.write(answers, line.encode() + b"\n")  # at once, whichever thread sends it
        except BrokenPipeError:  # the parent is gone
            os._exit(1)

    def keep_reporting() -> None:
        while True:  # other ranks wait as long as a child does so; 100,000 files may take minutes to list
            time.sleep(_REPORT_S)
            say()

    threading.Thread(target=keep_reporting, daemon=True).start()
    folder = Path(request["folder"])
    try:
        cache, location = Cache(folder), Location.of(request["root"])
        store = store_of(location)
        manifest = store.manifest()
        with cache.use(manifest):
            if missing := cache.missing(manifest):
                total = sum(file.size for file in missing)
                cache.make_room(manifest, request["limit"])
                begun.append(Download(store, manifest, cache, request["chunk_bytes"]))
                begun[0].run()
            cache.link(manifest)
            say(name=manifest.folder, files=len(manifest.files), of_bytes=manifest.bytes)
    except EffLoopError as error:
        say(error=str(error), kind="config" if isinstance(error, ConfigError) else "data")
    except OSError as error:
        path = Path(os.fsdecode(error.filename)) if error.filename else folder
        line = f"data.download_dir: {describe_failure(path, error)}; make room there, or set data.download_dir=FOLDER"
        say(error=line, kind="config")
    os._exit(0)  # threads may still fetch


if __name__ == "__main__":
    _serve()

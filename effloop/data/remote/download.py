"""The process that lists and fetches: `python -m effloop.data.remote.download`, started by `fetch`.

It reads a line of JSON, writes the path of a manifest, waits for a line, and fetches. What it says is a line of JSON:
{"manifest": PATH}, {"total": N} bytes to come,
{"bytes": N} of what has come since, {"done": true, "files": N, "size": BYTES} or {"error": LINE, "kind": NAME}.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from effloop.data.remote.buckets import store_of
from effloop.data.remote.cache import Cache
from effloop.data.remote.child import say, serve, telling
from effloop.data.remote.location import Location
from effloop.data.remote.manifest import Manifest
from effloop.data.remote.part import Part
from effloop.data.remote.store import Attempts, ChangedError, FetchError, Store, retried, steady
from effloop.errors import ConfigError
from effloop.system.files import describe_failure

CHUNK_BYTES = 16 << 20
"""What a thread asks for at once, and what a killed process begins again."""


class Download:
    """Fetches files by threads.

    Args:
        store: where they are.
        manifest: which they are.
        cache: where they go.
        chunk_bytes: see `CHUNK_BYTES`.
    """

    def __init__(self, store: Store, manifest: Manifest, cache: Cache, chunk_bytes: int) -> None:
        self._store, self._manifest, self._cache, self._chunk_bytes = store, manifest, cache, chunk_bytes
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._open: list[Part] = []
        self._tasks = self._each_chunk()
        self.bytes = 0

    def run(self) -> None:
        """Fetch what is missing.

        Raises:
            DataError: something can't be fetched.
            OSError: it can't be written.
        """
        try:
            with ThreadPoolExecutor(self._store.at_once) as pool:
                threads = [pool.submit(self._work) for _ in range(self._store.at_once)]
                try:
                    for each in as_completed(threads):
                        each.result()  # the first that fails ends the others
                finally:
                    self._stopped.set()
        finally:
            for part in self._open:
                part.close()

    def _each_chunk(self) -> Iterator[tuple[Part, int, int]]:
        for file in self._cache.missing(self._manifest):
            part = Part(file, self._cache.content(self._manifest, file), self._chunk_bytes)
            self._open = [each for each in self._open if not each.closed] + [part]
            if not part.missing:
                self._finish(part)
            for start, stop in part.missing:
                yield part, start, stop

    def _work(self) -> None:
        while not self._stopped.is_set():
            with self._lock:
                task = next(self._tasks, None)
            if task is None:
                return
            self._fetch(*task)

    def _fetch(self, part: Part, start: int, stop: int) -> None:
        """Fetch a chunk; a connection that ends early is gone on with where it ended."""
        at = furthest = start
        attempts = Attempts(self._store.location.url(part.file.key), stopped=self._stopped)
        while at < stop and not self._stopped.is_set():
            try:
                for data in steady(self._store.read(part.file, at, stop)):
                    if self._stopped.is_set():
                        return
                    if at + len(data) > stop:
                        raise FetchError(f"it has more than {stop:,} bytes", final=True)
                    part.write(data, at)
                    at += len(data)
                    if at > furthest:
                        furthest = at
                        attempts.progress()
                    with self._lock:
                        self.bytes += len(data)
                if at < stop:
                    raise FetchError(f"the connection ended after {at:,} of {part.file.size:,} bytes")
            except FetchError as error:
                attempts.failed(error)
                if not part.file.ranges:
                    at = start
        if at == stop and part.chunk_done(start, stop):
            self._finish(part)

    def _finish(self, part: Part) -> None:
        """Have a file appear under its name, if it was the same one all the time."""

        def check() -> None:
            try:
                self._store.check(part.file)
            except ChangedError:
                part.discard()
                raise

        retried(self._store.location.url(part.file.key), check, stopped=self._stopped)
        part.finish()


def _run(asked: dict[str, Any]) -> None:
    cache, location = Cache(Path(asked["folder"])), Location.of(asked["root"])
    with telling():  # all the time: 100,000 files take minutes to look at on a network's file system
        store = store_of(location)
        manifest = store.manifest()
        used = cache.use(manifest)  # and so does the process that has asked, before this one goes on
        say(manifest=str(cache.view(manifest).with_suffix(".json")))
        sys.stdin.readline()
        if missing := cache.missing(manifest):
            say(total=sum(file.size for file in missing))
            _fetch(store, manifest, cache, asked)
        cache.link(manifest)
        used.close()
    say(done=True, files=len(manifest.files), size=manifest.bytes)


def _fetch(store: Store, manifest: Manifest, cache: Cache, asked: dict[str, Any]) -> None:
    download = Download(store, manifest, cache, asked["chunk_bytes"])
    try:
        with telling(lambda: download.bytes):
            cache.make_room(manifest, asked["limit"])
            download.run()
    except OSError as error:
        raise ConfigError(
            f"data.download_dir: {describe_failure(cache.folder, error)}; make room there, or set "
            "data.download_dir=FOLDER"
        ) from None


def _unwritable(asked: dict[str, Any], error: OSError) -> str:
    path = Path(os.fsdecode(error.filename)) if error.filename else Path(asked["folder"])
    return f"data.download_dir: {describe_failure(path, error)}; set another folder"


if __name__ == "__main__":
    serve(_run, _unwritable)

"""A file that isn't whole yet."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from functools import cache
from pathlib import Path

from effloop.data.remote.cache import DONE, PART
from effloop.data.remote.manifest import RemoteFile


@cache
def _boot() -> str:
    """What this start of the machine is called; empty if it doesn't say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


class Part:
    """A file that is being fetched: its bytes at their places, and a list of the chunks that are there.

    Chunks aren't synchronised with the disk one by one: the list is of use until the machine starts again, and its
    first line says since when it runs.
    """

    def __init__(self, file: RemoteFile, path: Path, chunk_bytes: int) -> None:
        self.file, self._path = file, path
        self._part, self._list = path.with_name(path.name + PART), path.with_name(path.name + DONE)
        size = chunk_bytes if file.ranges else file.size
        self._chunks = [(start, min(start + size, file.size)) for start in range(0, file.size, size)]
        known = self._known() if file.ranges else set()
        self._fd = os.open(self._part, os.O_RDWR | os.O_CREAT, 0o644)
        self._done = self._list.open("a" if known else "w")
        if not known:
            self._done.write(f"{_boot()}\n")
        self.missing = [chunk for chunk in self._chunks if chunk not in known]
        self._left, self._lock = len(self.missing), threading.Lock()
        self.closed = False

    def _known(self) -> set[tuple[int, int]]:
        try:
            boot, *rows = [line for line in self._list.read_text().splitlines(keepends=True) if line.endswith("\n")]
            found = {(int(start), int(stop)) for start, stop in map(str.split, rows)}
            return found & {*self._chunks} if boot.strip() == _boot() != "" and self._part.exists() else set()
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
            self._done.write(f"{start} {stop}\n")
            self._done.flush()
            self._left -= 1
            return not self._left

    def discard(self) -> None:
        """Begin anew the next time."""
        self._list.unlink(missing_ok=True)

    def finish(self) -> None:
        """Check the size, have it on the disk, and rename it."""
        os.ftruncate(self._fd, self.file.size)
        os.fsync(self._fd)
        self.close()
        os.replace(self._part, self._path)
        self._list.unlink(missing_ok=True)

    def close(self) -> None:
        """Leave it as it is."""
        if not self.closed:
            self.closed = True
            os.close(self._fd)
            with suppress(OSError):
                self._done.close()

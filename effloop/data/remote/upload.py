"""The process that uploads: `python -m effloop.data.remote.upload`, started by `send`.

It reads a line of JSON, {"url": URL, "path": PATH, "job": DIGEST, "part_bytes": N}, and writes the file or folder to
the URL; or, where PATH is null, says what is there: {"done": true, "whole": BOOL, "job": DIGEST|null}. While it
uploads, it says {"checked": NAME} of what was there and is compared, {"total": N} bytes to go, {"bytes": N} of what has
gone since, {"done": true, "files": N, "size": BYTES} or {"error": LINE, "kind": NAME}.

As long as a folder isn't complete, a file in it says so, `manifest.UPLOADING`, with which nothing reads it.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path, PurePosixPath
from secrets import token_hex
from typing import Any

from effloop.data.remote.child import say, serve, telling
from effloop.data.remote.location import Location
from effloop.data.remote.manifest import UPLOADING, RemoteFile
from effloop.data.remote.store import Attempts, FetchError, retried
from effloop.data.remote.target import LARGE_AT_ONCE, Target, target_of
from effloop.errors import ConfigError, DataError

PART_BYTES = 8 << 20
"""What a request sends of a larger file: 16 at once have 300 s, which 3.6 Mbit/s suffice for."""
_HEADERS = (".index", ".idx", ".lst", ".json", ".txt", ".md", ".csv")
"""Endings of files that say what is in the others: these come last."""
_FEW = 3


class Upload:
    """Writes files by threads.

    Args:
        target: where they go.
        files: name there -> the local file.
    """

    def __init__(self, target: Target, files: Mapping[str, Path]) -> None:
        self._target, self._files = target, files
        self._stopped, self._lock = threading.Event(), threading.Lock()
        self.bytes = 0

    def run(self, names: Collection[str]) -> None:
        """Write some of them, several at the same time; of large ones a few, so that a kill loses few. When one fails,
        those that are on their way aren't waited for.

        Raises:
            DataError: one can't be written.
            OSError: a local one can't be read.
        """
        large = [name for name in names if self._files[name].stat().st_size > PART_BYTES]
        for some, at_once in ((large, LARGE_AT_ONCE), (sorted({*names} - {*large}), self._target.at_once)):
            pool = ThreadPoolExecutor(min(at_once, self._target.at_once))
            try:
                for each in wait([pool.submit(self._put, name) for name in some], return_when=FIRST_EXCEPTION).done:
                    each.result()
            finally:
                pool.shutdown(wait=False, cancel_futures=True)

    def _put(self, name: str) -> None:
        key, path = self._target.key(name), self._files[name]
        attempts = Attempts(self._target.location.url(key), stopped=self._stopped, done="written")
        while not self._stopped.is_set():
            sent = _Sent(self._add)
            try:
                self._target.put(path, key, sent)
                self._add(path.stat().st_size - sent.bytes)  # not all file systems say how far they are
                return
            except FetchError as error:
                self._add(-sent.bytes)
                self._failed(attempts, error)
            except BaseException:
                self._stopped.set()
                raise

    def _failed(self, attempts: Attempts, error: FetchError) -> None:
        try:
            attempts.failed(error)
        except DataError:
            self._stopped.set()
            raise

    def _add(self, count: int) -> None:
        with self._lock:
            self.bytes += count


class _Sent:
    def __init__(self, told: Callable[[int], None]) -> None:
        self.bytes, self._told = 0, told

    def __call__(self, count: int) -> None:
        self.bytes += count
        self._told(count)


def _job_of(target: Target, marker: RemoteFile) -> str | None:
    """The job that uploads to a folder, as the file in it says."""

    def read() -> bytes:
        return b"".join(target.read(marker, 0, marker.size))

    try:
        return str(json.loads(retried(target.location.url(marker.key), read, done=target.done))["job"])
    except (ValueError, LookupError, TypeError):
        return None


def _look(target: Target) -> None:
    """Say what is there; and make sure that files can be written and removed there, before hours of work."""
    found = target.found()
    marker = found.get(UPLOADING)
    if not found or marker:
        probe = f"{target.location.path}.effloop-{token_hex(4)}"  # nobody's: it is removed
        url = target.location.root
        retried(url, lambda: target.put(b"{}", probe), done=target.done)
        retried(url, lambda: target.remove(probe), done="removed")
    say(done=True, whole=bool(found) and not marker, job=_job_of(target, marker) if marker else None)


def _upload(target: Target, files: Mapping[str, Path], job: str) -> None:
    upload = Upload(target, files)
    with telling(lambda: upload.bytes):
        kept = _kept(target, files, job)
        todo = [name for name in files if name not in kept]
        sizes = {name: path.stat().st_size for name, path in files.items()}
        say(total=sum(sizes[name] for name in todo))
        if todo and "" not in files:
            _claim(target, job)
        upload.run([name for name in todo if not _is_header(name)])
        upload.run([name for name in todo if _is_header(name)])
        found = target.found()
        for name, size in sizes.items():
            if name not in found or found[name].size != size:
                has = f"{found[name].size:,} bytes" if name in found else "nothing"
                raise DataError(
                    f"{target.location.url(target.key(name))} has {has} after {size:,} were written; start again"
                )
        if marker := found.get(UPLOADING):
            _refuse_other(target, marker, job)
            retried(target.location.url(marker.key), lambda: target.remove(marker.key), done="removed")
        elif todo and "" not in files and _same(target, {name: found[name] for name in files}, files) != {*files}:
            raise ConfigError(
                f"out: {target.location.root} was completed by another process while this one has uploaded to it; "
                "remove it or set out=URL"
            )
    say(done=True, files=len(files), size=sum(sizes.values()))


def _claim(target: Target, job: str) -> None:
    """Write who uploads to a folder, unless somebody has done so.

    Raises:
        ConfigError: it is somebody else.
    """
    key = target.key(UPLOADING)
    text = json.dumps({"job": job, "why": "effloop convert uploads to this folder; it isn't complete"}).encode()
    retried(target.location.url(key), lambda: target.create(text, key), done=target.done)
    if marker := target.found().get(UPLOADING):
        _refuse_other(target, marker, job)


def _refuse_other(target: Target, marker: RemoteFile, job: str) -> None:
    if _job_of(target, marker) != job:
        raise ConfigError(
            f"out: {target.location.root} has what another conversion has uploaded and not completed; remove it or set "
            "out=URL"
        )


def _kept(target: Target, files: Mapping[str, Path], job: str) -> set[str]:
    """The files that are there already, from this very job.

    Raises:
        ConfigError: there is something else.
    """
    found = target.found()
    marker, root = found.pop(UPLOADING, None), target.location.root
    if found and marker is None:
        if {*found} == {*files} and _same(target, found, files) == {*files}:
            return {*files}  # all was done but for telling
        raise ConfigError(f"out: {root} is there already, and nothing is overwritten; remove it or set out=URL")
    if marker:
        _refuse_other(target, marker, job)
    if others := sorted({*found} - {*files}):
        named = ", ".join(others[:_FEW]) + ", …" * (len(others) > _FEW)
        raise ConfigError(f"out: {root} has files of something else ({named}); remove them or set out=URL")
    return _same(target, found, files)


def _same(target: Target, found: Mapping[str, RemoteFile], files: Mapping[str, Path]) -> set[str]:
    """The files there that are known to have the bytes of the local ones, which takes 2 s for 1 GB."""
    names = set()
    for name, file in found.items():
        if target.same(file, files[name]):
            names.add(name)
        say(checked=name)
    return names


def _is_header(name: str) -> bool:
    path = PurePosixPath(name)
    return path.suffix in _HEADERS or path.name.startswith(".z")


def _files_of(path: Path) -> dict[str, Path]:
    if path.is_file():
        return {"": path}
    return {str(file.relative_to(path)): file for file in sorted(path.rglob("*")) if file.is_file()}


def _run(asked: dict[str, Any]) -> None:
    files = _files_of(Path(asked["path"])) if asked["path"] else {}
    with telling():
        target = target_of(Location.of(asked["url"]), asked["part_bytes"])
    if files:
        _upload(target, files, asked["job"])
    else:
        with telling():
            _look(target)


def _unreadable(asked: dict[str, Any], error: OSError) -> str:
    return f"out: {error.filename or asked['path']} can't be read: {error.strerror or error}; start again"


if __name__ == "__main__":
    serve(_run, _unreadable)

"""Files written to a bucket by a child process, `python -m effloop.data.remote.upload`.

As long as a folder isn't complete, it contains a file `manifest.UPLOADING`, which names the job that uploads to it, and
nothing reads the folder. A single file appears when it is complete.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path, PurePosixPath
from secrets import token_hex
from typing import Any

from effloop.data.remote import child
from effloop.data.remote.buckets import BucketStore, store_of
from effloop.data.remote.location import Location, Url
from effloop.data.remote.manifest import UPLOADING, RemoteFile
from effloop.data.remote.store import in_threads, retried
from effloop.errors import ConfigError, DataError

PART_BYTES = 8 << 20
"""What a request sends of a larger file: 16 at once have 300 s, which needs 3.6 Mbit/s."""
_MOST_PARTS = 10_000  # of an object, as S3 has it
_LARGE_AT_ONCE = 2
_HEADERS = (".index", ".idx", ".lst", ".json", ".txt", ".md", ".csv")
"""Suffixes of files that describe the others: these come last."""
_FEW = 3


@dataclass(frozen=True)
class There:
    """What a URL has.

    Attributes:
        whole: a file, or a complete folder.
        job: the job whose upload to it isn't complete.
    """

    whole: bool
    job: str | None


@dataclass(frozen=True)
class Sent:
    """What it took to write to a URL.

    Attributes:
        files, bytes: in all.
        sent_bytes: those that weren't there yet.
        seconds: for all of it.
    """

    files: int
    bytes: int
    sent_bytes: int
    seconds: float

    def line(self, url: Url) -> str:
        """`s3://bucket/in1k: 12 files, 1,070.1 MB; uploaded in 3.1 s, 345.2 MB/s`."""
        files = "1 file" if self.files == 1 else f"{self.files:,} files"
        line = f"{url}: {files}, {self.bytes / 1e6:,.1f} MB; "
        if self.sent_bytes < self.bytes:
            line += f"{(self.bytes - self.sent_bytes) / 1e6:,.1f} MB were there, {self.sent_bytes / 1e6:,.1f} MB "
        return line + f"uploaded in {self.seconds:.1f} s, {self.sent_bytes / 1e6 / max(self.seconds, 1e-9):,.1f} MB/s"


def check_url(url: Url) -> None:
    """Refuse a URL that can't be written.

    Raises:
        ConfigError: it isn't of a bucket, has patterns or credentials, or names no file or folder.
    """
    try:
        location = Location.of(url)
        patterns = location.has_patterns
    except ConfigError as error:
        raise ConfigError(str(error).replace("data.root", "out")) from None
    if location.scheme == "hf":
        raise ConfigError(f"out: {url} can't be written; set to=parquet out=FOLDER, and upload that by hf upload")
    if location.is_http:
        raise ConfigError(f"out: {url} can't be written, web servers are read only; set out=s3://BUCKET/NAME or PATH")
    if patterns:
        raise ConfigError(f"out: {url} has wildcards or braces; set out to the URL of one file or folder")
    if not location.path or location.path.endswith("/"):
        raise ConfigError(f"out: {url} has no name; set out={location.place}/NAME")


def look(url: Url) -> There:
    """What a URL has; and make sure that files can be written and removed there, before hours of work.

    Raises:
        ConfigError: a package is missing, or nothing writes to such a URL.
        DataError: it can't be read, written, or removed there.
    """
    return There(**_child({"url": url, "path": None}, url)[0])


def send(path: Path, url: Url, job: str) -> Sent:
    """Write a file or a folder to a URL. It can be read when all of it is there, and not before.

    Args:
        path: of the file or folder.
        url: where it goes. Files of the right size that an earlier call has uploaded for the same job stay.
        job: identifies the bytes.

    Raises:
        ConfigError: something else is there.
        DataError: it can't be written.
    """
    began = time.monotonic()
    done, sent = _child({"url": url, "path": str(path), "job": job, "part_bytes": PART_BYTES}, url)
    return Sent(done["files"], done["bytes"], sent, time.monotonic() - began)


def _child(request: Mapping[str, Any], url: Url) -> tuple[dict[str, Any], int]:
    """What the child has done, and how many bytes were sent."""
    with child.ByteMeter(f"to {url}") as meter:
        done = child.run("effloop.data.remote.upload", f"out: {url}: the process that uploads", request, meter)
        return done, meter.bytes


class Target(BucketStore):
    """A file or folder of a bucket that is written; the location's path has no patterns."""

    done = "written"

    def _options(self) -> dict[str, Any]:
        plain = {"disable_bulk_delete": "true"} if self.location.scheme.startswith("s3") else {}  # not all servers do
        return {**super()._options(), **plain}

    def _client(self) -> dict[str, Any]:
        return {**super()._client(), "read_timeout": "300s"}  # the answer comes when a part was sent

    def key(self, name: str) -> str:
        """The path of a file of the folder; of an empty name, that of the folder itself."""
        return f"{self.location.path}/{name}" if name else self.location.path

    def found(self) -> dict[str, RemoteFile]:
        """What is there: name in the folder -> file; the name is empty for a file in the folder's place.

        Raises:
            DataError: it can't be listed.
        """
        folder = self.key("") + "/"
        files = {file.key.removeprefix(folder): file for file in self.listed(folder) if file.key.startswith(folder)}
        missing = (self._obstore.exceptions.NotFoundError, FileNotFoundError)

        def alone() -> dict[str, RemoteFile]:
            try:
                return {"": self._describe(self.key(""))}
            except missing:
                return {}
            except self._errors as error:
                raise self._failure(error) from None

        return {**files, **retried(self.location.root, alone, done=self.done)}

    def put(self, name: str, data: bytes | FileIO, **options: Any) -> None:
        """Upload a file of the folder, which appears when it is whole.

        Raises:
            DataError: it can't be.
        """
        key = self.key(name)

        def put() -> None:
            try:
                if isinstance(data, FileIO):
                    data.seek(0)
                self._obstore.put(self._store, key, data, **options)
            except self._errors as error:
                raise self._failure(error) from None

        retried(self.location.url(key), put, done=self.done)

    def create(self, name: str, data: bytes) -> None:
        """Upload a file unless one is there, as far as the server can tell.

        Raises:
            DataError: it can't be.
        """
        exceptions = self._obstore.exceptions
        try:
            self._obstore.put(self._store, self.key(name), data, mode="create")
        except (exceptions.AlreadyExistsError, exceptions.PreconditionError):
            return
        except self._errors:  # some servers write without conditions only
            self.put(name, data)

    def remove(self, name: str) -> None:
        """Remove a file of the folder.

        Raises:
            DataError: it can't be.
        """
        key = self.key(name)

        def remove() -> None:
            try:
                self._obstore.delete(self._store, key)
            except self._errors as error:
                raise self._failure(error) from None

        retried(self.location.url(key), remove, done="removed")

    def job(self, marker: RemoteFile) -> str | None:
        """The job in a file `UPLOADING`; None if it is something else."""
        text = retried(
            self.location.url(marker.key), lambda: b"".join(self.read(marker, 0, marker.size)), done=self.done
        )
        try:
            return str(json.loads(text)["job"])
        except (ValueError, LookupError, TypeError):
            return None


class _Counted(FileIO):
    """A file that counts the bytes that are read of it."""

    def __init__(self, path: Path, add: Callable[[int], None]) -> None:
        super().__init__(path)
        self._add = add

    def read(self, size: int | None = -1) -> bytes:
        data = super().read(size) or b""
        self._add(len(data))
        return data


class Upload:
    """Writes a file or the files of a folder.

    Args:
        target: where they go.
        path: of the file or folder.
        job: identifies the bytes.
        part_bytes: see `PART_BYTES`.
    """

    def __init__(self, target: Target, path: Path, job: str, part_bytes: int) -> None:
        self._target, self._job, self._part_bytes = target, job, part_bytes
        found = [path] if path.is_file() else sorted(filter(Path.is_file, path.rglob("*")))
        self._files = {"" if file == path else str(file.relative_to(path)): file for file in found}
        self._sizes = {name: file.stat().st_size for name, file in self._files.items()}
        self._url, self._lock, self.bytes = target.location.root, threading.Lock(), 0

    def run(self) -> dict[str, int]:
        """Write what isn't there.

        Raises:
            ConfigError: something else is there.
            DataError: it can't be written.
            OSError: a local file can't be read.
        """
        missing = self._missing()
        child.say(total=sum(map(self._sizes.__getitem__, missing)))
        if missing and "" not in self._files:
            text = {"job": self._job, "why": "effloop convert uploads to this folder; it isn't complete"}
            self._target.create(UPLOADING, json.dumps(text).encode())
            self._check_marker(self._target.found().get(UPLOADING))
        headers = [name for name in missing if _is_header(name)]
        for some in ([name for name in missing if name not in headers], headers):
            large = [name for name in some if self._sizes[name] > self._part_bytes]
            in_threads(self._put, large, _LARGE_AT_ONCE)
            in_threads(self._put, [name for name in some if name not in large], self._target.at_once)
        if missing:
            self._check_complete()
        return {"files": len(self._files), "bytes": sum(self._sizes.values())}

    def _missing(self) -> list[str]:
        """The files to send."""
        found = self._target.found()
        marker = found.pop(UPLOADING, None)
        sizes = {name: file.size for name, file in found.items()}
        if marker is None:
            if found and sizes != self._sizes:  # else all was done, and the process killed before it could say so
                raise ConfigError(
                    f"out: {self._url} is there already, and nothing is overwritten; remove it or set out=URL"
                )
        else:
            self._check_marker(marker)
        if others := sorted({*found} - {*self._files}):
            named = ", ".join(others[:_FEW]) + ", …" * (len(others) > _FEW)
            raise ConfigError(f"out: {self._url} has files of something else ({named}); remove them or set out=URL")
        missing = [name for name, size in self._sizes.items() if sizes.get(name) != size]
        if marker and not missing:
            self._target.remove(UPLOADING)
        return missing

    def _check_marker(self, marker: RemoteFile | None) -> None:
        if marker is not None and self._target.job(marker) != self._job:
            raise ConfigError(
                f"out: {self._url} has what another conversion has uploaded and not completed; remove it or set out=URL"
            )

    def _put(self, name: str) -> None:
        size = self._sizes[name]
        part = max(self._part_bytes, -(-size // _MOST_PARTS))
        options = {"chunk_size": part, "max_concurrency": self._target.at_once // _LARGE_AT_ONCE}
        with _Counted(self._files[name], self._add) as file:
            self._target.put(name, file, use_multipart=size > part, **options)

    def _add(self, count: int) -> None:
        with self._lock:
            self.bytes += count

    def _check_complete(self) -> None:
        found = self._target.found()
        for name, size in self._sizes.items():
            if name not in found or found[name].size != size:
                has = f"{found[name].size:,} bytes" if name in found else "nothing"
                url = self._target.location.url(self._target.key(name))
                raise DataError(f"{url} has {has} after {size:,} were written; start again")
        if "" in self._files:
            return
        marker = found.get(UPLOADING)
        self._check_marker(marker)
        if marker is None:
            raise ConfigError(
                f"out: {self._url} was completed by another process while this one has uploaded to it; "
                "remove it or set out=URL"
            )
        self._target.remove(UPLOADING)


def _is_header(name: str) -> bool:
    path = PurePosixPath(name)
    return path.suffix in _HEADERS or path.name.startswith(".z")


def _look(target: Target) -> dict[str, Any]:
    found = target.found()
    marker = found.get(UPLOADING)
    if not found or marker:
        probe = Target(Location.of(f"{target.location.root}.effloop-{token_hex(4)}"))  # nobody's: it is removed
        probe.put("", b"{}")
        probe.remove("")
    return {"whole": bool(found) and not marker, "job": target.job(marker) if marker else None}


def _run(request: dict[str, Any]) -> dict[str, Any]:
    location = Location.of(request["url"])
    with child.telling():
        if type(store_of(location)) is not BucketStore:
            raise ConfigError(
                f"out: {location.root} can't be written; set out=s3://BUCKET/NAME, gs:// or az://, or out=PATH, and "
                "copy that by a program of the store's"
            )
        target = Target(location)
        if request["path"] is None:
            return _look(target)
        upload = Upload(target, Path(request["path"]), request["job"], request["part_bytes"])
        with child.telling(lambda: upload.bytes):
            return upload.run()


def _unreadable(request: dict[str, Any], error: OSError) -> str:
    return f"out: {error.filename or request['path']} can't be read: {error.strerror or error}; start again"


if __name__ == "__main__":
    child.serve(_run, _unreadable)

"""Files written to a bucket by a child process, `python -m effloop.data.remote.upload`.

As long as a folder isn't complete, it contains a file `manifest.UPLOADING`, which names the job that uploads to it, and
nothing reads the folder. A single file appears when it is complete.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from io import FileIO
from pathlib import Path, PurePosixPath
from secrets import token_hex
from typing import Any

from effloop.data.remote import child
from effloop.data.remote.buckets import BUCKETS, BucketStore
from effloop.data.remote.location import Location, Url
from effloop.data.remote.manifest import UPLOADING, RemoteFile
from effloop.data.remote.store import in_threads
from effloop.errors import ConfigError, DataError

PART_BYTES = 8 << 20
"""Size of the parts of a larger file: 16 at once have 300 s for an answer, which needs 3.6 Mbit/s."""
_MOST_PARTS = 10_000  # of an object, as S3 has it
_LARGE_AT_ONCE = 2
_HEADERS = (".index", ".idx", ".lst", ".json", ".txt", ".md", ".csv")
"""Suffixes of files that describe the others: these come last."""
_FEW = 3


@dataclass(frozen=True)
class There:
    """The state of a URL.

    Attributes:
        whole: a file, or a complete folder.
        job: the job whose upload to it isn't complete.
    """

    whole: bool
    job: str | None


@dataclass(frozen=True)
class Sent:
    """The cost of writing to a URL.

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
    if location.scheme not in BUCKETS:
        raise ConfigError(
            f"out: {url} can't be written; set out=s3://BUCKET/NAME, gs:// or az://, or out=PATH, and copy that by "
            "another program, as hf upload or rclone"
        )
    if patterns:
        raise ConfigError(f"out: {url} has wildcards or braces; set out to the URL of one file or folder")
    if not location.path or location.path.endswith("/"):
        raise ConfigError(f"out: {url} has no name; set out={location.place}/NAME")


def look(url: Url) -> There:
    """Look at a URL, and make sure that files can be written and removed there, before hours of work.

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
    who = f"out: {url}: the process that uploads"
    return child.run("effloop.data.remote.upload", who, f"to {url}", request)


class Upload(BucketStore):
    """Writes a file or the files of a folder; the location's path has no patterns."""

    done = "written"

    def _options(self) -> dict[str, Any]:
        plain = {"disable_bulk_delete": "true"} if self.location.scheme.startswith("s3") else {}  # not all servers do
        return {**super()._options(), **plain}

    def _client(self) -> dict[str, Any]:
        return {**super()._client(), "read_timeout": "300s"}  # the answer comes when a part was sent

    def _key(self, name: str) -> str:
        """The path of a file of the folder; of an empty name, that of the folder itself."""
        return f"{self.location.path}/{name}" if name else self.location.path

    def _found(self) -> dict[str, RemoteFile]:
        """Name in the folder -> file that is there; the name is empty for a file in the folder's place."""
        folder = self._key("") + "/"
        files = {file.key.removeprefix(folder): file for file in self.listed(folder) if file.key.startswith(folder)}

        def alone() -> dict[str, RemoteFile]:
            try:
                return {"": self._describe(self._key(""))}
            except (self._obstore.exceptions.NotFoundError, FileNotFoundError):
                return {}

        return files | self.ask(self._key(""), alone)

    def look(self) -> There:
        """See the function; where files may be written, one is, and removed."""
        found = self._found()
        marker = found.get(UPLOADING)
        if not found or marker:
            key = f"{self._key('')}.effloop-{token_hex(4)}"  # nobody's
            self.ask(self._key(""), lambda: self._obstore.put(self._store, key, b"{}"))
            self._remove(key)
        return There(bool(found) and not marker, self._job(marker) if marker else None)

    def send(self, path: Path, job: str, part_bytes: int) -> dict[str, int]:
        """See the function; returns how many files and bytes are there then."""
        found = [path] if path.is_file() else sorted(filter(Path.is_file, path.rglob("*")))
        files = {"" if file == path else str(file.relative_to(path)): file for file in found}
        sizes = {name: file.stat().st_size for name, file in files.items()}
        missing = self._missing(sizes, job)
        child.say(total=sum(sizes[name] for name in missing))
        if missing and "" not in files:
            self._claim(job)

        def put(name: str) -> None:
            self._put(name, files[name], max(part_bytes, -(-sizes[name] // _MOST_PARTS)))

        headers = [name for name in missing if _is_header(name)]
        for some in ([name for name in missing if name not in headers], headers):
            large = [name for name in some if sizes[name] > part_bytes]
            in_threads(put, large, _LARGE_AT_ONCE)
            in_threads(put, [name for name in some if name not in large], self.at_once)
        self._complete(sizes, job, sent=bool(missing))
        return {"files": len(files), "bytes": sum(sizes.values())}

    def _missing(self, sizes: Mapping[str, int], job: str) -> list[str]:
        """The files to send."""
        found = self._found()
        marker = found.pop(UPLOADING, None)
        there = {name: file.size for name, file in found.items()}
        self._check_job(marker, job)
        if others := sorted({*found} - {*sizes}):
            named = ", ".join(others[:_FEW]) + ", …" * (len(others) > _FEW)
            raise ConfigError(f"out: {self._url} has files of something else ({named}); remove them or set out=URL")
        if found and marker is None and there != sizes:  # else all was done before a kill
            raise ConfigError(
                f"out: {self._url} is there already, and nothing is overwritten; remove it or set out=URL"
            )
        return [name for name, size in sizes.items() if there.get(name) != size]

    def _claim(self, job: str) -> None:
        """Write which job uploads to the folder, unless another one does, as far as the server can tell."""
        key, exceptions = self._key(UPLOADING), self._obstore.exceptions
        why = "effloop convert uploads to this folder; it isn't complete"
        text = json.dumps({"job": job, "why": why}).encode()
        try:
            self._obstore.put(self._store, key, text, mode="create")
        except (exceptions.AlreadyExistsError, exceptions.PreconditionError):
            pass
        except self._errors:  # some servers write without conditions only
            self.ask(key, lambda: self._obstore.put(self._store, key, text))
        self._check_job(self._found().get(UPLOADING), job)

    def _put(self, name: str, path: Path, part_bytes: int) -> None:
        def put() -> None:
            options = {"chunk_size": part_bytes, "max_concurrency": self.at_once // _LARGE_AT_ONCE}
            with _Counted(path) as file:
                large = path.stat().st_size > part_bytes
                self._obstore.put(self._store, self._key(name), file, use_multipart=large, **options)

        self.ask(self._key(name), put)

    def _complete(self, sizes: Mapping[str, int], job: str, *, sent: bool) -> None:
        """Compare the sizes, and remove the mark of an incomplete folder."""
        found = self._found()
        for name, size in sizes.items():
            if name not in found or found[name].size != size:
                has = f"{found[name].size:,} bytes" if name in found else "nothing"
                url = self.location.url(self._key(name))
                raise DataError(f"{url} has {has} after {size:,} were written; start again")
        marker = found.get(UPLOADING)
        self._check_job(marker, job)
        if marker:
            self._remove(marker.key)
        elif sent and "" not in sizes:
            raise ConfigError(
                f"out: {self._url} was completed by another process while this one has uploaded to it; remove it or "
                "set out=URL"
            )

    def _check_job(self, marker: RemoteFile | None, job: str) -> None:
        if marker and self._job(marker) != job:
            raise ConfigError(
                f"out: {self._url} has what another conversion has uploaded and not completed; remove it or set out=URL"
            )

    def _job(self, marker: RemoteFile) -> str | None:
        """The job in a file `UPLOADING`; None if it is something else."""
        text = self.ask(marker.key, lambda: b"".join(self.read(marker, 0, marker.size)))
        try:
            return str(json.loads(text)["job"])
        except (ValueError, LookupError, TypeError):
            return None

    def _remove(self, key: str) -> None:
        self.ask(key, lambda: self._obstore.delete(self._store, key), "removed")

    @property
    def _url(self) -> str:
        return self.location.root


class _Counted(FileIO):
    """A file that counts the bytes that are read of it."""

    def read(self, size: int | None = -1) -> bytes:
        data = super().read(size) or b""
        child.moved(len(data))
        return data


def _is_header(name: str) -> bool:
    path = PurePosixPath(name)
    return path.suffix in _HEADERS or path.name.startswith(".z")


def _run(request: dict[str, Any]) -> dict[str, Any]:
    location = Location.of(request["url"])
    try:
        upload = Upload(location)
    except ConfigError as error:
        raise ConfigError(str(error).replace("data.root", "out")) from None
    if request["path"] is None:
        return asdict(upload.look())
    return upload.send(Path(request["path"]), request["job"], request["part_bytes"])


def _unreadable(request: dict[str, Any], error: OSError) -> str:
    return f"out: {error.filename or request['path']} can't be read: {error.strerror or error}; start again"


if __name__ == "__main__":
    child.serve(_run, _unreadable)

"""Where files are uploaded to: buckets by obstore, and other schemes by fsspec."""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from datetime import timedelta
from io import FileIO
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from effloop.data.remote.buckets import BucketStore, bucket_file, store_of
from effloop.data.remote.filesystems import SFTP, FsspecStore
from effloop.data.remote.location import Location
from effloop.data.remote.manifest import RemoteFile
from effloop.data.remote.sftp import SftpStore
from effloop.data.remote.store import FetchError, Store, retried
from effloop.errors import ConfigError, optional_package

T = TypeVar("T")

LARGE_AT_ONCE = 2
"""Files of several parts."""
_CLIENT = {"read_timeout": "300s"}
"""A client waits as long for the answer as it takes to send a part."""
_MOST_PARTS = 10_000  # of an object, as S3 has it
_UNCONDITIONAL = ("400", "405", "501")
"""What servers answer that write without conditions only."""
_RETRIES = {"max_retries": 4, "backoff": {"init_backoff": timedelta(seconds=0.5)}}
"""Of a part of a large file, before all of it is sent again."""


class Target(Store, ABC):
    """A file or folder that is written; the location's path has no patterns."""

    done = "written"

    def found(self) -> dict[str, RemoteFile]:
        """What is there: name in the folder -> file; the name is empty for a file in the folder's place.

        Raises:
            DataError: it can't be listed.
        """
        folder = f"{self.location.path}/"
        files = {file.key.removeprefix(folder): file for file in self._files(folder) if file.key.startswith(folder)}
        alone = retried(self.location.root, lambda: self._at(self.location.path), done=self.done)
        return files if alone is None else {**files, "": alone}

    def key(self, name: str) -> str:
        """The path of a file of the folder; of an empty name, that of the folder itself."""
        return f"{self.location.path}/{name}" if name else self.location.path

    @abstractmethod
    def _files(self, folder: str) -> list[RemoteFile]: ...

    @abstractmethod
    def _at(self, key: str) -> RemoteFile | None: ...

    @abstractmethod
    def same(self, there: RemoteFile, path: Path) -> bool:
        """Whether a file there is known to have the bytes of a local one."""

    @abstractmethod
    def put(self, data: bytes | Path, key: str, sent: Callable[[int], None] = lambda _: None) -> None:
        """Upload a file; it appears when it is whole, if it is alone in the place of a folder.

        Args:
            data: the file, or what it is to have.
            key: its path there.
            sent: is called with bytes that were taken to be sent.

        Raises:
            FetchError: it can't be.
            OSError: the local file can't be read.
        """

    @abstractmethod
    def create(self, data: bytes, key: str) -> None:
        """Upload a file, unless one is there, as far as the store can tell.

        Raises:
            FetchError: it can't be.
        """

    @abstractmethod
    def remove(self, key: str) -> None:
        """Remove a file.

        Raises:
            FetchError: it can't be.
        """


class BucketTarget(BucketStore, Target):
    """A place in a bucket.

    Args:
        location: the place.
        part_bytes: what a request sends of a larger file.
    """

    def __init__(self, location: Location, part_bytes: int) -> None:
        super().__init__(location)
        plain = {"disable_bulk_delete": "true"} if location.scheme.startswith("s3") else {}  # not all servers have that
        self._patient = self._opened(_RETRIES, _CLIENT, **plain)
        self._part_bytes = part_bytes

    def _files(self, folder: str) -> list[RemoteFile]:
        return self._listed(folder)

    def _at(self, key: str) -> RemoteFile | None:
        try:
            return bucket_file(self._obstore.head(self._store, key))
        except (self._obstore.exceptions.NotFoundError, FileNotFoundError):
            return None
        except self._errors as error:
            raise self._failure(error, key) from None

    def same(self, there: RemoteFile, path: Path) -> bool:
        return there.size == path.stat().st_size and there.version == _etag(path, self._part_of(there.size))

    def _part_of(self, size: int) -> int:
        return max(self._part_bytes, -(-size // _MOST_PARTS))

    def put(self, data: bytes | Path, key: str, sent: Callable[[int], None] = lambda _: None) -> None:
        if isinstance(data, bytes):
            self._put(self._patient, key, data)
            return
        size = data.stat().st_size
        part, large = self._part_of(size), size > self._part_of(size)
        options = {"use_multipart": large, "chunk_size": part, "max_concurrency": self.at_once // LARGE_AT_ONCE}
        with _Counted(data, sent) as file:
            self._put(self._patient, key, file, **options)

    def create(self, data: bytes, key: str) -> None:
        exceptions = self._obstore.exceptions
        try:
            self._obstore.put(self._patient, key, data, mode="create")
        except (exceptions.AlreadyExistsError, exceptions.PreconditionError):
            return
        except self._errors as error:
            failure = self._failure(error, key)
            if not str(failure).startswith(_UNCONDITIONAL):
                raise failure from None
            self._put(self._patient, key, data)

    def _put(self, store: Any, key: str, data: Any, **options: Any) -> None:
        try:
            self._obstore.put(store, key, data, **options)
        except self._errors as error:
            raise self._failure(error, key) from None

    def _failure(self, error: Exception, key: str) -> FetchError:
        missing = isinstance(error, self._obstore.exceptions.NotFoundError | FileNotFoundError)
        if missing or "NoSuchBucket" in str(error):
            return FetchError("there is no such bucket", final=True)
        return super()._failure(error, key)

    def remove(self, key: str) -> None:
        try:
            self._obstore.delete(self._patient, key)
        except self._errors as error:
            raise self._failure(error, key) from None


class _Counted(FileIO):
    """A file that says how many bytes were read of it."""

    def __init__(self, path: Path, told: Callable[[int], None]) -> None:
        super().__init__(path)
        self._told = told

    def read(self, size: int | None = -1) -> bytes:
        data = super().read(size) or b""
        self._told(len(data))
        return data


def _etag(path: Path, part_bytes: int) -> str:
    """The ETag that S3 gives to the bytes of a file that was sent in such parts."""
    digests = []
    with path.open("rb") as file:
        while data := file.read(part_bytes):
            digests.append(hashlib.md5(data, usedforsecurity=False).digest())
    if len(digests) == 1:
        return digests[0].hex()
    return f"{hashlib.md5(b''.join(digests), usedforsecurity=False).hexdigest()}-{len(digests)}"


class FsspecTarget(FsspecStore, Target):
    """What fsspec writes."""

    def __init__(self, location: Location) -> None:
        super().__init__(location)
        if not getattr(self._system, "async_impl", False):  # others may have one connection
            self.at_once = 1

    def _asked(self, call: Callable[[], T]) -> T:
        """What a file system answers.

        Raises:
            FetchError: it raises; each has exceptions of its own.
        """
        try:
            return call()
        except Exception as error:
            raise self._refused(error) from None

    def _files(self, folder: str) -> list[RemoteFile]:
        path = self._path(folder)
        there = retried(self.location.url(folder), lambda: self._asked(lambda: self._info(path)), done=self.done)
        return [] if there is None else self._listed(folder)

    def _at(self, key: str) -> RemoteFile | None:
        path = self._path(key)
        row = self._asked(lambda: self._info(path))
        return self._file(path, row) if row is not None and row.get("type") != "directory" else None

    def _info(self, path: str) -> Mapping[str, Any] | None:
        """What is there; None if nothing is. `exists` and `isfile` take any failure for that."""
        self._system.invalidate_cache()
        try:
            return dict(self._system.info(path))
        except FileNotFoundError:
            return None

    def same(self, there: RemoteFile, path: Path) -> bool:
        return False

    def put(self, data: bytes | Path, key: str, sent: Callable[[int], None] = lambda _: None) -> None:
        alone, path = key == self.location.path, self._path(key)
        first = f"{path}.effloop-part" if alone else path

        def put() -> None:
            self._system.makedirs(str(PurePosixPath(path).parent), exist_ok=True)
            if isinstance(data, bytes):
                self._system.pipe_file(first, data)
            else:
                self._send(data, first, sent)
            if alone:
                self._system.mv(first, path)

        self._asked(put)

    def _send(self, path: Path, to: str, sent: Callable[[int], None]) -> None:
        self._system.put_file(os.fspath(path), to, callback=_callback(sent))

    def create(self, data: bytes, key: str) -> None:
        if self._at(key) is None:
            self.put(data, key)

    def remove(self, key: str) -> None:
        self._asked(lambda: self._system.rm_file(self._path(key)))


class SftpTarget(FsspecTarget, SftpStore):
    """What an SSH server writes."""

    def _send(self, path: Path, to: str, sent: Callable[[int], None]) -> None:
        told = 0

        def tell(gone: int, _: int) -> None:
            nonlocal told
            sent(gone - told)
            told = gone

        self._system.ftp.put(os.fspath(path), to, callback=tell)  # fsspec's says nothing until all has gone


def _callback(sent: Callable[[int], None]) -> Any:
    callbacks = optional_package("fsspec.callbacks", "out", "effloop[remote]")

    class Sent(callbacks.Callback):  # type: ignore[misc,name-defined]
        def relative_update(self, inc: int = 1) -> None:
            sent(inc)

    return Sent()


def target_of(location: Location, part_bytes: int) -> Target:
    """What writes to a location.

    Args:
        location: the file or folder.
        part_bytes: what a request sends of a larger file.

    Raises:
        ConfigError: a package is missing, or nothing is written to such a URL.
    """
    try:
        store = store_of(location)
        if isinstance(store, BucketStore):
            return BucketTarget(location, part_bytes)
        return SftpTarget(location) if location.scheme in SFTP else FsspecTarget(location)
    except ConfigError as error:
        raise ConfigError(str(error).replace("data.root", "out")) from None

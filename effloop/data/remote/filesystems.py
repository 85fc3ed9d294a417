"""Files of the schemes that fsspec opens, beside buckets and web servers."""

from __future__ import annotations

import ftplib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from effloop.data.remote.buckets import EXTRA
from effloop.data.remote.location import Location, redacted
from effloop.data.remote.manifest import RemoteFile
from effloop.data.remote.store import MOST_FILES, TIMEOUT_S, ChangedError, FetchError, Store, TooManyError, retried
from effloop.errors import ConfigError, DataError, optional_package

T = TypeVar("T")

_SFTP = ("sftp", "ssh")
_CONNECTED = ("ftp", *_SFTP)  # file systems that are one connection: no two threads may use it, and it may be lost
_FINAL = (FileNotFoundError, PermissionError, NotImplementedError, ImportError, ftplib.error_perm)
"""Exceptions after which another attempt is of no use."""
_DEEPEST = 32  # folders in each other
_VERSIONS = (
    *("ETag", "etag", "md5Hash", "md5", "checksum", "blob_id", "sha256", "sha"),
    *("LastModified", "last_modified", "mtime", "modified", "modificationTime", "modify"),
)
"""Keys by which file systems of fsspec describe the content of a file."""


class FsspecStore(Store):
    """A file system of fsspec."""

    def __init__(self, location: Location) -> None:
        super().__init__(location)
        self._core = optional_package("fsspec.core", f"data.root: '{location.root}'", EXTRA)
        if location.scheme in _CONNECTED:
            self.at_once = 1
        self._known: Any = None
        try:
            self._kind = type(self._ask("", lambda system: system))
        except (ImportError, ValueError) as error:
            raise ConfigError(f"data.root: '{location.root}': {redacted(str(error))[:300]}") from None
        self._root = self._path("").rstrip("/")

    def _ask(self, key: str, call: Callable[[Any], T]) -> T:
        return retried(self.location.url(key), lambda: self._asked(call))

    def _asked(self, call: Callable[[Any], T]) -> T:
        """The result of a call with the file system.

        Raises:
            FetchError: it fails; each file system has exceptions of its own. The next call has another connection.
            ImportError, ValueError: there is no such file system.
        """
        try:
            if self._known is None:
                self._known = self._opened()
            return call(self._known)
        except (DataError, FetchError):
            raise
        except Exception as error:
            if self._known is None and isinstance(error, ImportError | ValueError):
                raise
            if self.location.scheme in _CONNECTED:
                self._known = None
            again = not isinstance(error, _FINAL)
            raise FetchError(f"{type(error).__name__}: {error}", again=again) from None

    def _opened(self) -> Any:
        if self.location.scheme not in _SFTP:
            return self._core.url_to_fs(self.location.place, skip_instance_cache=True)[0]
        paramiko = optional_package("paramiko", f"data.root: '{self.location.root}'", "paramiko")
        kind = self._core.get_filesystem_class("sftp")

        class Checked(kind):  # type: ignore[misc, valid-type]
            """Connects to hosts in `~/.ssh/known_hosts` alone, and with timeouts; fsspec's class takes any key."""

            def _connect(self) -> None:
                self.client = paramiko.SSHClient()
                self.client.load_system_host_keys()
                times = ("timeout", "banner_timeout", "auth_timeout", "channel_timeout")
                self.client.connect(self.host, **dict.fromkeys(times, TIMEOUT_S), **self.ssh_kwargs)
                self.ftp = self.client.open_sftp()
                self.ftp.get_channel().settimeout(TIMEOUT_S)

        return Checked(**kind._get_kwargs_from_urls(self.location.place), skip_instance_cache=True)

    def _path(self, key: str) -> str:
        return str(self._kind._strip_protocol(self.location.url(key)))

    def listed(self, folder: str) -> list[RemoteFile]:
        path = self._path(folder).rstrip("/")

        def listed(system: Any) -> list[RemoteFile]:
            if system.isfile(path):
                return []
            return [self._file(name, row) for name, row in self._walked(system, path).items()]

        return self._ask(folder, listed)

    def _walked(self, system: Any, top: str) -> dict[str, Mapping[str, Any]]:
        """Like `find`, which omits folders that it can't list, and takes the size of a link for that of its file."""
        found: dict[str, Mapping[str, Any]] = {}
        pending = [(top, 0)]
        while pending:
            folder, depth = pending.pop()
            if depth > _DEEPEST:
                raise FetchError(f"it has more than {_DEEPEST} folders in each other, as {folder}")
            for row in system.ls(folder or "/" * (self.location.scheme in _CONNECTED), detail=True):
                name = row["name"].rstrip("/")
                row = system.info(name) if row.get("type") == "link" else row
                if row.get("type") != "directory":
                    found[name] = row
                elif name != folder:
                    pending.append((name, depth + 1))
            if len(found) > MOST_FILES:
                raise TooManyError
        return found

    def described(self, key: str) -> RemoteFile:
        path = self._path(key)
        return self._file(path, self._ask(key, lambda system: system.info(path)))

    def _file(self, name: str, row: Mapping[str, Any]) -> RemoteFile:
        key = name.removeprefix(self._root).lstrip("/")
        version = next((str(row[each]) for each in _VERSIONS if row.get(each) is not None), "")
        if row.get("size") is None:
            raise DataError(f"{self.location.url(key)} has no known size; set data.root to another URL")
        return RemoteFile(key, int(row["size"]), version.strip('"'))

    def read(self, file: RemoteFile, start: int, stop: int) -> Iterator[bytes | memoryview]:
        yield self._asked(lambda system: system.cat_file(self._path(file.key), start=start, end=stop))

    def check(self, file: RemoteFile) -> None:
        path = self._path(file.key)
        folder = self._kind._parent(path)

        def is_same(system: Any) -> bool:
            system.invalidate_cache(folder)
            if self._file(path, system.info(path)) == file:
                return True
            rows = system.ls(folder, detail=True)  # some describe a file there otherwise than by itself
            return file in [self._file(row["name"], row) for row in rows if row.get("size") is not None]

        if not self._ask(file.key, is_same):
            raise ChangedError

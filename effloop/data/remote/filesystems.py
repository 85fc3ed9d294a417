"""Files of every scheme that fsspec has, beside those of buckets and web servers."""

from __future__ import annotations

import ftplib
import threading
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

from effloop.data.remote.location import Location, redacted
from effloop.data.remote.manifest import Manifest, RemoteFile, manifest_of
from effloop.data.remote.store import MOST_FILES, ChangedError, FetchError, Store, TooManyError, retried
from effloop.errors import ConfigError, DataError, optional_package

SFTP = ("sftp", "ssh")
_CONNECTED = ("ftp", *SFTP)  # file systems that are one connection: no two threads may use it, and it may be lost
_EXTRA = "effloop[remote]"
_FIRST_ATTEMPTS = 4
_FINAL = (FileNotFoundError, PermissionError, NotImplementedError, ImportError, ftplib.error_perm)
"""What another attempt can't mend."""
_DEEPEST = 32  # folders in each other
_VERSIONS = (
    *("ETag", "etag", "md5Hash", "md5", "checksum", "blob_id", "sha256", "sha"),
    *("LastModified", "last_modified", "mtime", "modified", "modificationTime", "modify"),
)
"""What file systems of fsspec tell about the content of a file."""


class FsspecStore(Store):
    """What fsspec reads."""

    def __init__(self, location: Location) -> None:
        super().__init__(location)
        self._core, self._spec, self._asyn = (
            optional_package(f"fsspec.{name}", f"data.root: '{location.root}'", _EXTRA)
            for name in ("core", "spec", "asyn")
        )
        self._own = location.scheme in _CONNECTED
        self._kept: Any = threading.local() if self._own else SimpleNamespace()
        try:
            self._kind = type(retried(location.place, self._first, _FIRST_ATTEMPTS, done=self.done))
        except (ImportError, ValueError) as error:
            raise ConfigError(f"data.root: '{location.root}': {redacted(str(error))[:300]}") from None
        self._root = self._path("").rstrip("/")
        if location.scheme == "ftp":  # whose servers may allow but a few connections
            self.at_once = 1

    def _opened(self) -> Any:
        """A file system of fsspec; another one each time if it is one connection."""
        return self._core.url_to_fs(self.location.place)[0]

    def _first(self) -> Any:
        try:
            return self._system
        except (ImportError, ValueError):
            raise
        except Exception as error:  # each file system has its own
            raise self._refused(error) from None

    @property
    def _system(self) -> Any:
        if getattr(self._kept, "system", None) is None:
            self._kept.system = self._opened()
        return self._kept.system

    def _refused(self, error: Exception) -> FetchError:
        """An attempt that has failed; the next one has another connection."""
        if self._own:
            self._kept.system = None
        return refused(error)

    def manifest(self) -> Manifest:
        location = self.location
        if location.has_patterns:
            listed = self._listed(location.base)
            found = [file for file in listed if location.matches(file.key)]
            return manifest_of(location, found, alone=False, base=location.base, listed=listed)
        found = self._listed(location.path)
        alone = [file.key for file in found] == [location.path]
        folder = location.path.rstrip("/") + "/" if location.path else ""
        return manifest_of(location, found, alone=alone, base=location.base if alone else folder)

    def _path(self, key: str) -> str:
        return str(self._kind._strip_protocol(self.location.url(key)))

    def _listed(self, folder: str) -> list[RemoteFile]:
        path = self._path(folder).rstrip("/")

        def listed() -> list[RemoteFile]:
            try:
                if self._system.isfile(path):  # which `find` of some takes for a folder
                    return [self._file(path, self._system.info(path))]
                rows = self._found(path)
            except DataError:
                raise
            except Exception as error:
                raise self._refused(error) from None
            return [self._file(name, row) for name, row in rows.items()]

        return retried(self.location.url(folder), listed, _FIRST_ATTEMPTS, done=self.done)

    def _found(self, path: str) -> dict[str, Mapping[str, Any]]:
        """The files below a folder, by path."""
        found = self._walked(path) if self._is_plain else self._system.find(path, detail=True)
        if len(found) > MOST_FILES:
            raise TooManyError
        return found

    @property
    def _is_plain(self) -> bool:
        """Whether `find` is fsspec's own, which asks for one folder after the other."""
        plain = (self._spec.AbstractFileSystem, self._asyn.AsyncFileSystem)
        names = ("find", "walk", "_find", "_walk")
        return all(getattr(self._kind, name, None) in [getattr(each, name, None) for each in plain] for name in names)

    def _walked(self, top: str) -> dict[str, Mapping[str, Any]]:
        """As `find`, which leaves out folders that it can't list, and takes the size of a link for that of its file."""
        found: dict[str, Mapping[str, Any]] = {}
        pending = [(top, 0)]
        while pending and len(found) <= MOST_FILES:
            folder, depth = pending.pop()
            if depth > _DEEPEST:
                raise FetchError(f"it has more than {_DEEPEST} folders in each other, as {folder}", final=True)
            for row in self._system.ls(folder or "/" * self._own, detail=True):
                name = row["name"].rstrip("/")
                at = self._system.info(name) if row.get("type") == "link" else row
                if at.get("type") != "directory":
                    found[name] = at
                elif name != folder:
                    pending.append((name, depth + 1))
        return found

    def _file(self, name: str, row: Mapping[str, Any]) -> RemoteFile:
        key = name.removeprefix(self._root).lstrip("/")
        version = next((str(row[each]) for each in _VERSIONS if row.get(each) is not None), "")
        if row.get("size") is None:
            raise DataError(f"{self.location.url(key)} has no known size; set data.root to another URL")
        return RemoteFile(key, int(row["size"]), version.strip('"'))

    def read(self, file: RemoteFile, start: int, stop: int) -> Iterator[bytes | memoryview]:
        try:
            yield self._system.cat_file(self._path(file.key), start=start, end=stop)
        except Exception as error:
            raise self._refused(error) from None

    def check(self, file: RemoteFile) -> None:
        path = self._path(file.key)
        folder = self._kind._parent(path)
        try:
            self._system.invalidate_cache(folder)
            if self._file(path, self._system.info(path)) == file:
                return
            rows = self._system.ls(folder, detail=True)  # which some tell otherwise than of a single file
        except Exception as error:
            raise self._refused(error) from None
        if file not in [self._file(row["name"], row) for row in rows if row.get("size") is not None]:
            raise ChangedError


def refused(error: Exception) -> FetchError:
    """An attempt that fsspec has refused."""
    if isinstance(error, FetchError):
        return error
    return FetchError(f"{type(error).__name__}: {error}", final=isinstance(error, _FINAL))

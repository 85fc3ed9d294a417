"""Files behind a plain HTTP server: named one by one, by an index, or in the server's listing of a folder."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from threading import Event
from urllib.parse import urlsplit

from effloop.data.remote.answers import (
    NO_AUTHORIZATION,
    PIECE,
    EmptyError,
    UnlistedError,
    first_of,
    open_url,
    pieces,
    size_of,
    version_of,
)
from effloop.data.remote.listing import Links, names_in, names_in_json
from effloop.data.remote.manifest import Manifest, RemoteFile, manifest_of
from effloop.data.remote.store import MOST_FILES, ChangedError, FetchError, Store, TooManyError, retried, steady
from effloop.errors import DataError

_MOST_INDEX = 64 << 20  # bytes; 100,000 names of 600 bytes
_THREADS = 16
_DEEPEST = 8  # folders in each other
_MOST_FOLDERS = 10_000
_PACKED = (".gz", ".tgz", ".bz2", ".xz", ".zst", ".br", ".Z")  # some servers say so of what is stored like that
_FIRST_ATTEMPTS = 4  # 3 s: a wrong address should not be tried for minutes


class HttpStore(Store):
    """An HTTP server."""

    def manifest(self) -> Manifest:
        location = self.location
        if location.has_wildcards:
            names = self._below(location.base, location.levels, location.matches)
            return manifest_of(location, self._described(names), alone=False, base=location.base)
        if location.has_patterns:
            return manifest_of(location, self._described(location.names), alone=False, base=location.base)
        key = location.key(location.path)
        if key.endswith(".json"):
            return manifest_of(location, self._described(self._indexed(key)), alone=False, base=location.base)
        if key and not key.endswith("/"):
            (found,) = self._described([key], or_folder=True)
            if not found.key.endswith("/"):
                return manifest_of(location, [found], alone=True, base=location.base)
        folder = key.rstrip("/") + "/" if key else ""
        return manifest_of(location, self._described(self._below(folder)), alone=False, base=folder)

    def read(self, file: RemoteFile, start: int, stop: int) -> Iterator[bytes | memoryview]:
        part = file.ranges and (start > 0 or stop < file.size)
        headers = {"Range": f"bytes={start}-{stop - 1}"} if part else {}
        try:
            opened = open_url(self.location.url(file.key), headers)
        except EmptyError:  # it has become shorter
            raise ChangedError from None
        with opened as answer:
            if part and answer.status != 206:
                raise FetchError(f"the server answers {answer.status} to a request for a part", final=True)
            if version_of(answer.headers) != file.version or size_of(answer) != file.size:
                raise ChangedError
            if (packed := answer.headers.get("Content-Encoding")) and not file.key.endswith(_PACKED):
                raise FetchError(f"the server sends it compressed ({packed}), which was not asked for", final=True)
            if answer.status == 206 and first_of(answer) != start:
                told = answer.headers.get("Content-Range")
                raise FetchError(f"the server sends {told} where bytes {start}-{stop - 1} were asked for", final=True)
            yield from pieces(answer)

    def check(self, file: RemoteFile) -> None:
        if file.size > PIECE:  # one written over while it is sent has the old header; a small one is sent at once
            now = _describe(self.location.url(file.key), file.key, or_folder=False)
            if (now.size, now.version) != (file.size, file.version):
                raise ChangedError

    def _described(self, names: Sequence[str], *, or_folder: bool = False) -> list[RemoteFile]:
        """Sizes and versions of some files.

        Args:
            names: of the files.
            or_folder: whether one may be a folder, whose key ends with `/` then.
        """
        stopped = Event()

        def describe(name: str) -> RemoteFile:
            url = self.location.url(name)
            return retried(url, lambda: _describe(url, name, or_folder=or_folder), _FIRST_ATTEMPTS, stopped)

        with ThreadPoolExecutor(_THREADS) as pool:
            found = [pool.submit(describe, name) for name in names]
            try:
                for each in as_completed(found):
                    each.result()  # the first that fails ends the others
                return [each.result() for each in found]
            except DataError:
                stopped.set()
                pool.shutdown(cancel_futures=True)
                raise

    def _indexed(self, key: str) -> list[str]:
        """The files that a JSON file lists."""
        url = self.location.url(key)
        try:
            listed = json.loads(self._text(url))
            names = [*names_in(listed)]
        except (ValueError, RecursionError):
            raise DataError(f"{url} is no list of file names in JSON; set data.root to a folder or a pattern") from None
        self._check_number(names)
        return [self.location.base + name for name in dict.fromkeys(names)]

    def _below(
        self, folder: str, levels: int | None = None, wanted: Callable[[str], bool] = lambda _: True
    ) -> list[str]:
        """The files in a folder and the folders in it, as the server lists them.

        Args:
            folder: ends with `/`, or is empty.
            levels: of folders in it that are looked into; None is all.
            wanted: whether a file is.

        Raises:
            DataError: there are too many.
        """
        found: list[str] = []
        pending, seen = [(folder, 0)], {folder}
        while pending:
            parent, depth = pending.pop()
            for name in self._listed(parent):
                key = parent + name
                if not key.endswith("/"):
                    found += [key] * wanted(key)
                elif key not in seen and (levels is None or depth < levels):
                    if depth == _DEEPEST or len(seen) == _MOST_FOLDERS:
                        raise DataError(
                            f"data.root: '{self.location.root}' has more than {_MOST_FOLDERS:,} folders, or more than "
                            f"{_DEEPEST} in each other; pack the files into shards, or name some by a pattern"
                        )
                    seen.add(key)
                    pending.append((key, depth + 1))
            self._check_number(found)
        return found

    def _check_number(self, names: Sequence[str]) -> None:
        if len(names) > MOST_FILES:
            raise DataError(f"data.root: '{self.location.root}' can't be fetched: {TooManyError()}")

    def _listed(self, folder: str) -> list[str]:
        """The names in a folder, those of folders with `/`, from the server's page or JSON of it."""
        url = self.location.url(folder)
        text = self._text(url)
        try:
            return names_in_json(json.loads(text))
        except (ValueError, RecursionError):
            links = Links()
            links.feed(text)
            return links.names(f"/{folder}")

    def _text(self, url: str) -> str:
        def read() -> str:
            with open_url(url) as answer:
                found = b""
                for piece in steady(pieces(answer)):
                    found += piece
                    if len(found) > _MOST_INDEX:
                        raise FetchError("it is no listing: it is too long", final=True)
                if len(found) < (size_of(answer) or 0):
                    raise FetchError(f"the connection ended after {len(found):,} bytes")
                return found.decode("utf-8", "replace")

        try:
            return retried(url, read, _FIRST_ATTEMPTS)
        except DataError as error:
            if not re.search(r"\b(403|404|405)\b", str(error)):
                raise
            raise DataError(
                f"{error}; a server that lists no folders needs names: {self.location.place}/…/train-{{000..127}}.tar"
            ) from None


def _describe(url: str, name: str, *, or_folder: bool) -> RemoteFile:
    """Size and version of a file, by its first byte: some servers answer HEAD otherwise."""
    try:
        answer = open_url(url, {"Range": "bytes=0-0"})
    except EmptyError:
        return RemoteFile(name, 0, "")
    except UnlistedError:
        if or_folder:
            return RemoteFile(f"{name}/", 0, "")
        raise
    with answer:
        if or_folder and urlsplit(answer.url).path.endswith("/"):
            return RemoteFile(f"{name}/", 0, "")
        if answer.headers.get_content_type() == "text/html" and _last(answer.url) != _last(url):
            raise FetchError(f"it leads to a web page, as of a login: {answer.url} ({NO_AUTHORIZATION})", final=True)
        size = size_of(answer)
        if size is None:
            raise FetchError("the server doesn't tell its size", final=True)
        if answer.status == 206:
            next(pieces(answer), None)  # the connection is kept if nothing is left to read
        return RemoteFile(name, size, version_of(answer.headers), ranges=answer.status == 206)


def _last(url: str) -> str:
    return urlsplit(url).path.rpartition("/")[2]

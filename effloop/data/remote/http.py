"""Files on a web server: named one by one, by an index, or in the server's listing of a folder. obstore reads them."""

from __future__ import annotations

import email.utils
import http.client
import json
import os
import re
import ssl
from collections.abc import Callable, Mapping, Sequence
from html.parser import HTMLParser
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import unquote, urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from effloop.data.remote.buckets import BucketStore
from effloop.data.remote.manifest import Manifest, RemoteFile, manifest_of
from effloop.data.remote.store import (
    MOST_FILES,
    TIMEOUT_S,
    ChangedError,
    FetchError,
    TooManyError,
    in_threads,
    retried,
)
from effloop.errors import ConfigError, DataError

AUTHORIZATION = "EFFLOOP_HTTP_AUTHORIZATION"
"""Environment variable with the header `Authorization`, which other hosts don't get."""
_AUTHORIZE = f"set {AUTHORIZATION} in the environment, e.g. to 'Bearer …'"
_AGAIN = (408, 425, 429, 500, 502, 503, 504)
_MOST_INDEX = 64 << 20  # bytes; 100,000 names of 600 bytes
_DEEPEST = 8  # folders in each other
_MOST_FOLDERS = 10_000
_PACKED = (".gz", ".tgz", ".bz2", ".xz", ".zst", ".br", ".Z")  # some servers call such files compressed answers
_PAGES = (".html", ".htm")
_CHECKED = 1 << 20  # bytes; a smaller file is sent at once


class HttpStore(BucketStore):
    """A web server."""

    def _options(self) -> dict[str, Any]:
        return {}

    def _client(self) -> dict[str, Any]:
        return {"default_headers": _authorization()}

    def manifest(self) -> Manifest:
        location = self.location
        if location.has_wildcards:
            names = self._below(location.base, location.levels, location.matches)
            return manifest_of(location, self._all(names), alone=False, base=location.base)
        if location.has_patterns:
            return manifest_of(location, self._all(location.names), alone=False, base=location.base)
        key = location.key(location.path)
        if key.endswith(".json"):
            return manifest_of(location, self._all(self._indexed(key)), alone=False, base=location.base)
        if key and not key.endswith("/"):
            try:
                return manifest_of(location, [self.described(key)], alone=True, base=location.base)
            except _PageError:
                if not (names := self._below(f"{key}/")):  # else the page lists a folder
                    raise
                return manifest_of(location, self._all(names), alone=False, base=f"{key}/")
            except DataError as error:
                raise error if "." in key.rpartition("/")[2] else self._named(error) from None
        folder = key.rstrip("/") + "/" if key else ""
        return manifest_of(location, self.listed(folder), alone=False, base=folder)

    def listed(self, folder: str) -> list[RemoteFile]:
        return self._all(self._below(folder))

    def _all(self, names: Sequence[str]) -> list[RemoteFile]:
        return in_threads(self.described, names, self.at_once)

    def _describe(self, key: str) -> RemoteFile:
        """Size and version of a file by its first byte: some servers answer HEAD otherwise."""
        try:
            answer, ranges = self._obstore.get(self._first, key, options={"range": (0, 1)}), True
        except self._errors as error:
            # A server without ranges; an empty file, which has no first byte; or a size that only a whole answer has.
            if not re.search(r"RangeNotSupported|status code: 416|ParseContentRange", str(error)):
                raise
            answer, ranges = self._obstore.get(self._first, key), False
        if answer.attributes.get("Content-Type", "").startswith("text/html") and not key.endswith(_PAGES):
            line = f"it leads to a web page, as of a login ({_AUTHORIZE})"
            raise _PageError(f"{self.location.url(key)} can't be fetched: {line}")
        if ranges:
            answer.bytes()  # the connection is kept if nothing is left to read
        file = self._file(answer.meta)
        return RemoteFile(key, file.size, file.version, ranges)

    def _file(self, meta: Mapping[str, Any]) -> RemoteFile:
        time = meta["last_modified"]  # 1970 where the server doesn't tell it
        modified = email.utils.format_datetime(time, usegmt=True) if time.timestamp() else ""
        version = (meta["e_tag"] or modified).removeprefix("W/").strip('"')
        return RemoteFile(meta["path"], int(meta["size"]), version)

    def _can_match(self, file: RemoteFile) -> bool:
        return False  # an ETag here may have been a weak one

    def _check_answer(self, file: RemoteFile, answer: Any) -> None:
        packed = answer.attributes.get("Content-Encoding")
        if packed and not file.key.endswith(_PACKED):
            raise FetchError(f"the server sends it compressed ({packed}), which was not requested")

    def check(self, file: RemoteFile) -> None:
        # A file that is overwritten while it is sent has the old header.
        if file.size > _CHECKED:
            now = self.described(file.key)
            if (now.size, now.version) != (file.size, file.version):
                raise ChangedError

    @property
    def _allowing(self) -> str:
        return _AUTHORIZE

    def _named(self, error: DataError) -> DataError:
        """The failure to list a folder, with what to do about it."""
        if not re.search(r"\b(403|404|405)\b", str(error)):
            return error
        names = f"{self.location.place}/…/train-{{000..127}}.tar"
        return DataError(f"{error}; a server that lists no folders needs names: {names}")

    def _indexed(self, key: str) -> list[str]:
        """The files that a JSON file lists."""
        url = self.location.url(key)
        try:
            names = names_in(json.loads(self._page(url)))
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
            levels: how deep to look into its folders; None for all of them.
            wanted: whether to keep a file.

        Raises:
            DataError: there are too many.
        """
        found: list[str] = []
        pending, seen = [(folder, 0)], {folder}
        while pending:
            parent, depth = pending.pop()
            for name in self._names(parent):
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

    def _names(self, folder: str) -> list[str]:
        """The names in a folder, those of folders with `/`, from the server's page or JSON of it."""
        try:
            text = self._page(self.location.url(folder))
        except DataError as error:
            raise self._named(error) from None
        try:
            return names_in(json.loads(text))
        except (ValueError, RecursionError):
            links = Links()
            links.feed(text)
            return links.names(f"/{folder}")

    def _page(self, url: str) -> str:
        """A page's text; obstore can't ask for a URL that ends with `/`."""
        request = Request(url, headers={"User-Agent": "effloop"})  # noqa: S310
        for name, value in _authorization().items():
            request.add_unredirected_header(name, value)

        def page() -> str:
            try:
                with build_opener(_Redirects).open(request, timeout=TIMEOUT_S) as answer:
                    data = answer.read(_MOST_INDEX + 1)
            except HTTPError as error:
                error.close()
                hint = f"; {_AUTHORIZE}" if error.code == 401 else ""
                raise FetchError(f"{error.code} {error.reason}{hint}", again=error.code in _AGAIN) from None
            except (OSError, http.client.HTTPException) as error:
                raise _no_answer(error) from None
            if len(data) > _MOST_INDEX:
                raise FetchError("it is no listing: it is too long")
            if answer.length:
                raise FetchError(f"the answer ended after {len(data):,} bytes", again=True)
            return str(data.decode("utf-8", "replace"))

        return retried(url, page)


class _PageError(DataError):
    """A web page in the place of a file."""


class _Redirects(HTTPRedirectHandler):
    """Redirects to http and https alone, with the header `Authorization` on the same host."""

    def redirect_request(self, req: Request, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Request | None:
        if (scheme := urlsplit(newurl).scheme) not in ("http", "https"):
            raise HTTPError(newurl, code, f"a redirect to {scheme}://", headers, fp)
        again = super().redirect_request(req, fp, code, msg, headers, newurl)
        value = req.unredirected_hdrs.get("Authorization")
        if again and value and urlsplit(newurl)[:2] == urlsplit(req.full_url)[:2]:
            again.add_unredirected_header("Authorization", value)
        return again


def _no_answer(error: Exception) -> FetchError:
    cause = error.reason if isinstance(error, URLError) else error
    if isinstance(cause, TimeoutError):
        return FetchError(f"no answer for {TIMEOUT_S:g} s", again=True)
    if isinstance(cause, ssl.SSLCertVerificationError):
        line = f"its certificate is not valid: {cause.verify_message}; SSL_CERT_FILE=FILE names authorities to trust"
        return FetchError(line)
    if isinstance(cause, ssl.SSLError) and cause.reason == "WRONG_VERSION_NUMBER":
        return FetchError("it doesn't answer by HTTPS, perhaps by http://")
    return FetchError(getattr(cause, "strerror", None) or str(cause) or type(cause).__name__, again=True)


def _authorization() -> dict[str, str]:
    """The header `Authorization`, if the environment has one.

    Raises:
        ConfigError: it has characters that a header can't have.
    """
    value = os.environ.get(AUTHORIZATION, "").strip()
    if not (value.isascii() and value.isprintable()):
        raise ConfigError(f"{AUTHORIZATION} has characters that a header can't have; correct it")
    return {"Authorization": value} if value else {}


def names_in(listed: Any) -> list[str]:
    """The names in JSON: an index, which is a list of names or WebDataset's `shardlist`, or nginx's list of a folder.

    Returns:
        Names, those of folders with `/`.

    Raises:
        ValueError: it is something else.
    """
    rows = listed.get("shardlist", listed.get("files")) if isinstance(listed, dict) else listed
    if not isinstance(rows, list):
        raise ValueError
    names = []
    for row in rows:
        name = next((row[key] for key in ("name", "url", "key") if key in row), None) if isinstance(row, dict) else row
        if not isinstance(name, str) or not _is_name(name):
            raise ValueError
        is_folder = isinstance(row, dict) and row.get("type") == "directory"
        names.append(name.removeprefix("./") + "/" * is_folder)
    return names


def _is_name(name: str) -> bool:
    strange = name.startswith("/") or "://" in name or ".." in name.split("/") or re.search("[\ud800-\udfff]", name)
    return bool(name) and not strange


class Links(HTMLParser):
    """The links in a page that lists a folder."""

    def __init__(self) -> None:
        super().__init__()
        self._found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a":
            self._found += [value for name, value in attrs if name == "href" and value]

    def names(self, folder: str) -> list[str]:
        """Those directly in a folder, which has this path."""
        plain = [unquote(href) for href in self._found if not re.search(r"[?#]|^[a-z]+:", href)]
        names = [href.removeprefix(folder).removeprefix("./") for href in plain]
        return list(dict.fromkeys(name for name in names if _is_name(name) and "/" not in name.rstrip("/")))

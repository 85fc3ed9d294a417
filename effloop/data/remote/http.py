"""Files behind a plain HTTP server: named one by one, by an index, or in the server's listing of a folder."""

from __future__ import annotations

import email.utils
import http.client
import json
import os
import re
import socket
import ssl
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from html.parser import HTMLParser
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import quote, unquote, urlsplit
from urllib.request import HTTPRedirectHandler, OpenerDirector, Request, build_opener

from effloop.data.remote.manifest import Manifest, RemoteFile, manifest_of
from effloop.data.remote.store import TIMEOUT_S, ChangedError, FetchError, Store, retried
from effloop.errors import DataError

AUTHORIZATION = "EFFLOOP_HTTP_AUTHORIZATION"
"""Environment variable with the header `Authorization`, which other hosts don't get."""
_AGAIN = (408, 425, 429, 500, 502, 503, 504, 520, 521, 522, 523, 524, 529)
_PIECE = 1 << 20
_MOST_INDEX = 64 << 20  # bytes; 100,000 names of 600 bytes
_THREADS = 16
_DEEPEST = 8  # folders in each other
_MOST_FOLDERS = 10_000
_FIRST_ATTEMPTS = 4  # 3 s: a wrong address should not be tried for minutes


class HttpStore(Store):
    """An HTTP server."""

    def manifest(self) -> Manifest:
        location = self.location
        if location.has_wildcards:
            names = [name for name in self._below(location.base) if location.matches(name)]
            return manifest_of(location, self._described(names), alone=False, base=location.base)
        if location.has_patterns:
            return manifest_of(location, self._described(location.names), alone=False, base=location.base)
        if location.path.endswith(".json"):
            return manifest_of(location, self._described(self._indexed()), alone=False, base=location.base)
        if location.path and not location.path.endswith("/"):
            (found,) = self._described([location.path], or_folder=True)
            if not found.key.endswith("/"):
                return manifest_of(location, [found], alone=True, base=location.base)
        folder = location.path.rstrip("/") + "/" if location.path else ""
        return manifest_of(location, self._described(self._below(folder)), alone=False, base=folder)

    def read(self, file: RemoteFile, start: int, stop: int) -> Iterator[bytes | memoryview]:
        part = file.ranges and (start > 0 or stop < file.size)
        headers = {"Range": f"bytes={start}-{stop - 1}"} if part else {}
        with _open(self.location.url(file.key), headers) as answer:
            if part and answer.status != 206:
                raise FetchError(f"the server answers {answer.status} to a request for a part", final=True)
            if _version(answer.headers) != file.version or _size(answer) != file.size:
                raise ChangedError
            yield from _pieces(answer)

    def check(self, file: RemoteFile) -> None:
        if file.size > _PIECE:  # one written over while it is sent has the old header; a small one is sent at once
            now = _describe(self.location.url(file.key), file.key, or_folder=False)
            if (now.size, now.version) != (file.size, file.version):
                raise ChangedError

    def _described(self, names: Sequence[str], *, or_folder: bool = False) -> list[RemoteFile]:
        """Sizes and versions of some files.

        Args:
            names: of the files.
            or_folder: whether one may be a folder, whose key ends with `/` then.
        """

        def describe(name: str) -> RemoteFile:
            url = self.location.url(name)
            return retried(url, lambda: _describe(url, name, or_folder=or_folder), _FIRST_ATTEMPTS)

        with ThreadPoolExecutor(_THREADS) as pool:
            found = [pool.submit(describe, name) for name in names]
            try:
                return [each.result() for each in found]
            except DataError:
                pool.shutdown(cancel_futures=True)
                raise

    def _indexed(self) -> list[str]:
        """The files that a JSON file lists."""
        url = self.location.url(self.location.path)
        try:
            listed = json.loads(self._text(url))
            names = [*_names_in(listed)]
        except (ValueError, RecursionError):
            raise DataError(f"{url} is no list of file names in JSON; set data.root to a folder or a pattern") from None
        return [self.location.base + name for name in names]

    def _below(self, folder: str) -> list[str]:
        """The files in a folder and the folders in it, as the server lists them."""
        found: list[str] = []
        pending, seen = [(folder, 0)], {folder}
        while pending:
            parent, depth = pending.pop()
            for name in self._listed(parent):
                key = parent + name
                if not key.endswith("/"):
                    found.append(key)
                elif key not in seen and depth < _DEEPEST and len(seen) < _MOST_FOLDERS:
                    seen.add(key)
                    pending.append((key, depth + 1))
        return found

    def _listed(self, folder: str) -> list[str]:
        """The names in a folder, those of folders with `/`, from the server's page or JSON of it."""
        url = self.location.url(folder)
        text = self._text(url)
        try:
            return _names_in_json(json.loads(text))
        except (ValueError, RecursionError):
            links = _Links()
            links.feed(text)
            return links.names(urlsplit(url).path)

    def _text(self, url: str) -> str:
        def read() -> str:
            with _open(url) as answer:
                found = b""
                for piece in _pieces(answer):
                    found += piece
                    if len(found) > _MOST_INDEX:
                        raise FetchError("it is no listing: it is too long", final=True)
                return found.decode("utf-8", "replace")

        try:
            return retried(url, read, _FIRST_ATTEMPTS)
        except DataError as error:
            if not re.search(r"\b(403|404|405)\b", str(error)):
                raise
            raise DataError(
                f"{error}; a server that lists no folders needs names: {self.location.place}/…/train-{{000..127}}.tar"
            ) from None


def _names_in(listed: Any) -> Iterator[str]:
    """The names in an index: a list of names, or of objects with a name, or WebDataset's `shardlist`."""
    rows = listed.get("shardlist", listed.get("files")) if isinstance(listed, dict) else listed
    if not isinstance(rows, list):
        raise ValueError
    for row in rows:
        name = next((row[key] for key in ("name", "url", "key") if key in row), None) if isinstance(row, dict) else row
        if not isinstance(name, str) or not _is_name(name):
            raise ValueError
        yield name


def _names_in_json(rows: Any) -> list[str]:
    """The names in a listing of nginx's, those of folders with `/`; what else is in there is left out."""
    if not isinstance(rows, list):
        raise ValueError
    found = [row for row in rows if isinstance(row, dict) and isinstance(row.get("name"), str)]
    names = [row["name"].rstrip("/") + "/" * (row.get("type") == "directory") for row in found]
    return [name for name in names if _is_name(name.rstrip("/"))]


def _is_name(name: str) -> bool:
    return bool(name) and not name.startswith("/") and "://" not in name and ".." not in name.split("/")


class _Links(HTMLParser):
    """The links in a page that lists a folder."""

    def __init__(self) -> None:
        super().__init__()
        self._found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a":
            self._found += [value for name, value in attrs if name == "href" and value]

    def names(self, folder: str) -> list[str]:
        """Those directly in a folder, which has this path."""
        plain = [href.removeprefix(quote(folder)).removeprefix("./") for href in self._found]
        names = [unquote(href) for href in plain if not re.search(r"[?#]|^[a-z]+:", href)]
        return list(dict.fromkeys(name for name in names if _is_name(name) and "/" not in name.rstrip("/")))


class _EmptyError(FetchError):
    """A file without a single byte."""

    def __init__(self) -> None:
        super().__init__("it is empty", final=True)


def _describe(url: str, name: str, *, or_folder: bool) -> RemoteFile:
    """Size and version of a file, by its first byte: some servers answer HEAD otherwise."""
    try:
        answer = _open(url, {"Range": "bytes=0-0"})
    except _EmptyError:
        return RemoteFile(name, 0, "")
    with answer:
        if or_folder and urlsplit(answer.url).path.endswith("/"):
            return RemoteFile(f"{name}/", 0, "")
        size = _size(answer)
        if size is None:
            raise FetchError("the server doesn't tell its size", final=True)
        return RemoteFile(name, size, _version(answer.headers), ranges=answer.status == 206)


def _size(answer: http.client.HTTPResponse) -> int | None:
    """Bytes of the whole file."""
    told = answer.headers.get("Content-Range", "") if answer.status == 206 else answer.headers.get("Content-Length", "")
    end = told.rpartition("/")[2]
    return int(end) if end.isdecimal() else None


def _version(headers: Any) -> str:
    return str(headers.get("ETag") or headers.get("Last-Modified") or "").removeprefix("W/").strip('"')


class _Redirects(HTTPRedirectHandler):
    """Redirects to HTTP alone, and with `Authorization` on the same host."""

    def redirect_request(self, req: Request, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Request | None:
        to, before = urlsplit(newurl), urlsplit(req.full_url)
        if to.scheme not in ("http", "https"):
            raise HTTPError(newurl, code, f"a redirect to {to.scheme}://", headers, fp)
        again = super().redirect_request(req, fp, code, msg, headers, newurl)
        if again and (said := req.unredirected_hdrs.get("Authorization")) and to[:2] == before[:2]:
            again.add_unredirected_header("Authorization", said)
        return again


@cache
def opener() -> OpenerDirector:
    """Opens requests, redirected ones with care."""
    return build_opener(_Redirects)  # with the certificates, which take milliseconds to load


def _open(url: str, headers: dict[str, str] | None = None) -> Any:
    """The answer to a request.

    Raises:
        FetchError: there is none, or it is a failure.
    """
    request = Request(quote(url, safe="/:%[]!$&'()*+,;=@~"), headers={"User-Agent": "effloop", **(headers or {})})  # noqa: S310
    if said := os.environ.get(AUTHORIZATION):
        request.add_unredirected_header("Authorization", said)
    try:
        return opener().open(request, timeout=TIMEOUT_S)
    except HTTPError as error:
        error.close()
        if error.code == 416:  # an empty file has no first byte
            raise _EmptyError from None
        again = error.code in _AGAIN
        raise FetchError(f"{error.code} {error.reason}", final=not again, after_s=retry_after(error.headers)) from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise _failure(error) from None


def _pieces(answer: Any) -> Iterator[bytes]:
    try:
        while piece := answer.read(_PIECE):
            yield piece
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise _failure(error) from None


def _failure(error: Exception) -> FetchError:
    """An attempt that got no answer, or not all of it."""
    cause = error.reason if isinstance(error, URLError) else error
    if isinstance(cause, TimeoutError):
        return FetchError(f"no answer for {TIMEOUT_S:g} s")
    final = isinstance(cause, ssl.SSLCertVerificationError | ValueError)
    if isinstance(cause, socket.gaierror):
        final = cause.errno == socket.EAI_NONAME
    reason = getattr(cause, "strerror", None) or str(cause) or type(cause).__name__
    return FetchError(str(reason), final=final)


def retry_after(headers: Any) -> float | None:
    """Seconds of the header `Retry-After`, a number or a date; None without."""
    said = str(headers.get("Retry-After", ""))
    if said.strip().isdecimal():
        return float(said)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(said).timestamp() - time.time())
    except ValueError:
        return None

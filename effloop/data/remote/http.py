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
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import cache
from threading import Event
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, OpenerDirector, Request, build_opener

from effloop.data.remote.connections import Connections, KeptHTTP, KeptHTTPS
from effloop.data.remote.listing import Links, names_in, names_in_json
from effloop.data.remote.manifest import Manifest, RemoteFile, manifest_of
from effloop.data.remote.store import TIMEOUT_S, ChangedError, FetchError, Store, retried
from effloop.errors import DataError

AUTHORIZATION = "EFFLOOP_HTTP_AUTHORIZATION"
"""Environment variable with the header `Authorization`, which other hosts don't get."""
_NO_AUTHORIZATION = f"set {AUTHORIZATION} in the environment, e.g. to 'Bearer …'"
_AGAIN = (408, 425, 429, 500, 502, 503, 504, 520, 521, 522, 523, 524, 529)
_PIECE = 1 << 20
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
            names = [name for name in self._below(location.base, location.levels) if location.matches(name)]
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
            opened = _open(self.location.url(file.key), headers)
        except _EmptyError:  # it has become shorter
            raise ChangedError from None
        with opened as answer:
            if part and answer.status != 206:
                raise FetchError(f"the server answers {answer.status} to a request for a part", final=True)
            if _version(answer.headers) != file.version or _size(answer) != file.size:
                raise ChangedError
            if (packed := answer.headers.get("Content-Encoding")) and not file.key.endswith(_PACKED):
                raise FetchError(f"the server sends it compressed ({packed}), which was not asked for", final=True)
            if answer.status == 206 and _first(answer) != start:
                told = answer.headers.get("Content-Range")
                raise FetchError(f"the server sends {told} where bytes {start}-{stop - 1} were asked for", final=True)
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
        return [self.location.base + name for name in dict.fromkeys(names)]

    def _below(self, folder: str, levels: int | None = None) -> list[str]:
        """The files in a folder and the folders in it, as the server lists them.

        Args:
            folder: ends with `/`, or is empty.
            levels: of folders in it that are looked into; None is all.

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
                    found.append(key)
                elif key not in seen and (levels is None or depth < levels):
                    if depth == _DEEPEST or len(seen) == _MOST_FOLDERS:
                        raise DataError(
                            f"data.root: '{self.location.root}' has more than {_MOST_FOLDERS:,} folders, or more than "
                            f"{_DEEPEST} in each other; pack the files into shards, or name some by a pattern"
                        )
                    seen.add(key)
                    pending.append((key, depth + 1))
        return found

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
            with _open(url) as answer:
                found = b""
                for piece in _pieces(answer):
                    found += piece
                    if len(found) > _MOST_INDEX:
                        raise FetchError("it is no listing: it is too long", final=True)
                if len(found) < (_size(answer) or 0):
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
        if answer.status == 206:
            next(_pieces(answer), None)  # the connection is kept if nothing is left to read
        return RemoteFile(name, size, _version(answer.headers), ranges=answer.status == 206)


def _size(answer: http.client.HTTPResponse) -> int | None:
    """Bytes of the whole file."""
    told = answer.headers.get("Content-Range", "") if answer.status == 206 else answer.headers.get("Content-Length", "")
    end = told.rpartition("/")[2]
    return int(end) if end.isdecimal() else None


def _first(answer: http.client.HTTPResponse) -> int | None:
    """Where the part begins that is sent."""
    told = re.match(r"bytes\s+(\d{1,18})-", answer.headers.get("Content-Range", ""))
    return int(told[1]) if told else None


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
    kept = Connections()
    return build_opener(_Redirects, KeptHTTP(kept), KeptHTTPS(kept))


def _open(url: str, headers: dict[str, str] | None = None) -> Any:
    """The answer to a request.

    Raises:
        FetchError: there is none, or it is a failure.
    """
    request = Request(url, headers={"User-Agent": "effloop", **(headers or {})})  # noqa: S310
    if said := os.environ.get(AUTHORIZATION, "").strip():
        if not (said.isascii() and said.isprintable()):
            raise FetchError(f"{AUTHORIZATION} has characters that a header can't have; correct it", final=True)
        request.add_unredirected_header("Authorization", said)
    try:
        return opener().open(request, timeout=TIMEOUT_S)
    except HTTPError as error:
        error.close()
        if error.code == 416:  # an empty file has no first byte
            raise _EmptyError from None
        again = error.code in _AGAIN
        hint = f" ({_NO_AUTHORIZATION})" if error.code == 401 else ""
        after_s = retry_after(error.headers)
        reason = f"{error.code} {error.reason}{hint}"
        raise FetchError(reason, final=not again, after_s=after_s, answered=True) from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise _failure(error) from None


def _pieces(answer: Any) -> Iterator[bytes]:
    try:
        while piece := answer.read1(_PIECE):  # what has come: `read` waits for all, and loses it when that fails
            yield piece
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise _failure(error) from None


def _failure(error: Exception) -> FetchError:
    """An attempt that got no answer, or not all of it."""
    cause = error.reason if isinstance(error, URLError) else error
    if isinstance(cause, TimeoutError):
        return FetchError(f"no answer for {TIMEOUT_S:g} s")
    final = isinstance(cause, ssl.SSLCertVerificationError | ValueError | http.client.InvalidURL)
    if isinstance(cause, socket.gaierror):
        final = cause.errno == socket.EAI_NONAME
    reason = getattr(cause, "strerror", None) or str(cause) or type(cause).__name__
    if isinstance(cause, ssl.SSLCertVerificationError):
        reason = f"its certificate is not valid: {cause.verify_message}; SSL_CERT_FILE=FILE names authorities to trust"
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

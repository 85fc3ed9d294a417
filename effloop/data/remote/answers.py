"""A request to a web server, and what its answer says."""

from __future__ import annotations

import email.utils
import http.client
import os
import re
import socket
import ssl
import time
from collections.abc import Iterator
from functools import cache
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, OpenerDirector, Request, build_opener

from effloop.data.remote.connections import Connections, KeptHTTP, KeptHTTPS
from effloop.data.remote.store import NO_TLS, TIMEOUT_S, FetchError

AUTHORIZATION = "EFFLOOP_HTTP_AUTHORIZATION"
"""Environment variable with the header `Authorization`, which other hosts don't get."""
NO_AUTHORIZATION = f"set {AUTHORIZATION} in the environment, e.g. to 'Bearer …'"
"""What is to be done about a refusal."""
_AGAIN = (408, 425, 429, 500, 502, 503, 504, 520, 521, 522, 523, 524, 529)
PIECE = 1 << 20
"""Bytes of an answer that are read at once, at most."""


class EmptyError(FetchError):
    """A file without a single byte."""

    def __init__(self) -> None:
        super().__init__("it is empty", final=True)


def size_of(answer: http.client.HTTPResponse) -> int | None:
    """Bytes of the whole file."""
    told = answer.headers.get("Content-Range", "") if answer.status == 206 else answer.headers.get("Content-Length", "")
    end = re.search(r"(?:^|/)\s*(\d{1,18})\s*$", told)
    return int(end[1]) if end else None


def first_of(answer: http.client.HTTPResponse) -> int | None:
    """Where the part begins that is sent."""
    told = re.match(r"bytes\s+(\d{1,18})-", answer.headers.get("Content-Range", ""))
    return int(told[1]) if told else None


def version_of(headers: Any) -> str:
    """The ETag, else when the file was modified; empty without."""
    return str(headers.get("ETag") or headers.get("Last-Modified") or "").removeprefix("W/").strip('"')


class UnlistedError(FetchError):
    """A folder, as a redirect says, that the server doesn't list."""

    def __init__(self) -> None:
        super().__init__("it is a folder that the server doesn't list", final=True)


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


def open_url(url: str, headers: dict[str, str] | None = None) -> Any:
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
        if error.code in (403, 404) and urlsplit(error.url).path.endswith("/") and not url.endswith("/"):
            raise UnlistedError from None
        if error.code == 416:  # an empty file has no first byte
            raise EmptyError from None
        again = error.code in _AGAIN
        hint = f" ({NO_AUTHORIZATION})" if error.code == 401 else ""
        after_s = retry_after(error.headers)
        reason = f"{error.code} {error.reason}{hint}"
        raise FetchError(reason, final=not again, after_s=after_s, answered=True) from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise _failure(error) from None


def pieces(answer: Any) -> Iterator[bytes]:
    """What comes, as it comes.

    Raises:
        FetchError: nothing for `TIMEOUT_S`, or the connection breaks.
    """
    try:
        while piece := answer.read1(PIECE):  # what has come: `read` waits for all, and loses it when that fails
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
    if isinstance(cause, ssl.SSLError) and cause.reason == "WRONG_VERSION_NUMBER":
        return FetchError(NO_TLS, final=True)
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
    except (ValueError, OverflowError):
        return None

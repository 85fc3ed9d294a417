"""HTTP connections that are kept: a request of its own connection each takes two or three round trips more."""

from __future__ import annotations

import http.client
import select
import ssl
import threading
import time
from collections import deque
from typing import Any
from urllib.error import URLError
from urllib.request import HTTPHandler, HTTPSHandler, Request

_MOST_IDLE = 64  # connections without a request; four of each thread
_OLDEST_S = 60.0  # routers forget one after minutes, some without a word: a request would wait for its timeout

_Kept = tuple[tuple[Any, ...], http.client.HTTPConnection, http.client.HTTPResponse, float]
"""A server, a connection to it, the last answer, and when its header came."""


class Connections:
    """Connections to servers; any thread takes one that is idle, and leaves it behind when its answer was read."""

    def __init__(self) -> None:
        self._known: deque[_Kept] = deque()
        self._lock = threading.Lock()

    def take(self, server: tuple[Any, ...]) -> http.client.HTTPConnection | None:
        """One to a server whose last answer was read to its end; None if there is none."""
        with self._lock:
            for each in [*self._known]:
                known, connection, answer, since = each
                if not answer.isclosed():  # somebody still reads it
                    continue
                if time.monotonic() - since > _OLDEST_S or not _is_idle(connection, answer):
                    self._known.remove(each)
                    connection.close()
                elif known == server:
                    self._known.remove(each)
                    return connection
        return None

    def put(
        self, server: tuple[Any, ...], connection: http.client.HTTPConnection, answer: http.client.HTTPResponse
    ) -> None:
        """Keep one, to be taken when its answer was read."""
        with self._lock:
            self._known.append((server, connection, answer, time.monotonic()))
            while len(self._known) > _MOST_IDLE:
                _, oldest, reading, _ = self._known.popleft()
                if reading.isclosed():
                    oldest.close()


def _is_idle(connection: http.client.HTTPConnection, answer: http.client.HTTPResponse) -> bool:
    """Whether another request may follow: the answer had a length and was read to it, and the server waits."""
    if connection.sock is None or answer.length != 0:
        return False
    poll = select.poll()
    poll.register(connection.sock, select.POLLIN)
    return not poll.poll(0)  # what could be read now is its end


def _opened(kept: Connections, new: type[http.client.HTTPConnection], request: Request, **options: Any) -> Any:
    """As `urllib`'s `do_open`, without closing the connection.

    Raises:
        URLError: no answer.
    """
    server = (new, request.host)
    headers = {**request.headers, **request.unredirected_hdrs}
    connection = kept.take(server)
    while True:
        fresh = connection is None
        if connection is None:
            connection = new(request.host, timeout=request.timeout, **options)
        try:
            connection.request(request.get_method(), request.selector, headers=headers)
            answer = connection.getresponse()
            break
        except OSError as error:
            connection.close()
            if fresh or isinstance(error, TimeoutError):
                raise URLError(error) from error
            connection = None  # the server has just closed it
        except BaseException:
            connection.close()
            raise
    if not answer.will_close:
        kept.put(server, connection, answer)
    answer.url = request.full_url  # as `urllib` has it
    answer.msg = answer.reason  # type: ignore[assignment]
    return answer


class KeptHTTP(HTTPHandler):
    """Opens `http://`, by connections that are kept; another one for a proxy."""

    def __init__(self, kept: Connections) -> None:
        super().__init__()
        self._kept = kept

    def http_open(self, req: Request) -> Any:
        return super().http_open(req) if req.has_proxy() else _opened(self._kept, http.client.HTTPConnection, req)


class KeptHTTPS(HTTPSHandler):
    """Opens `https://`, by connections that are kept; another one through a proxy."""

    def __init__(self, kept: Connections) -> None:
        self._shared = ssl.create_default_context()  # once: the certificates take milliseconds to load
        self._shared.set_alpn_protocols(["http/1.1"])
        super().__init__(context=self._shared)
        self._kept = kept

    def https_open(self, req: Request) -> Any:
        if req._tunnel_host:  # type: ignore[attr-defined]
            return super().https_open(req)
        return _opened(self._kept, http.client.HTTPSConnection, req, context=self._shared)

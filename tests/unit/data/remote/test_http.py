"""What is asked of web servers, and what they answer."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from effloop.data.remote.http import _open, retry_after
from effloop.data.remote.store import FetchError


class _Redirecting(BaseHTTPRequestHandler):
    """Some paths are elsewhere; the others need the header `Authorization`."""

    def do_GET(self):
        where = {"/slash": "/slash/", "/host": f"http://localhost:{self.server.server_port}/x", "/ftp": "ftp://h/x"}
        found = where.get(self.path)
        self.send_response(302 if found else 200 if self.headers["Authorization"] else 401)
        self.send_header("Content-Length", "0")
        if found:
            self.send_header("Location", found)
        self.end_headers()

    def log_message(self, *_):
        pass


def test_redirects_keep_the_header_on_the_same_host(monkeypatch):
    monkeypatch.setenv("EFFLOOP_HTTP_AUTHORIZATION", "Bearer secret")
    with ThreadingHTTPServer(("127.0.0.1", 0), _Redirecting) as server:
        threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        with _open(f"{url}/slash") as answer:
            assert answer.url == f"{url}/slash/"
        for path, failure in (("host", "401"), ("ftp", r"redirect to ftp://")):
            with pytest.raises(FetchError, match=failure):
                _open(f"{url}/{path}")
        server.shutdown()


@pytest.mark.parametrize(
    ("said", "seconds"), [("7", 7), ("Thu, 01 Jan 1970 00:00:00 GMT", 0), ("soon", None), ("", None)]
)
def test_retry_after_is_seconds_or_a_date(said, seconds):
    assert retry_after({"Retry-After": said}) == seconds

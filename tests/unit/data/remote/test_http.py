"""Listings as web servers write them."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from effloop.data.remote.http import _Links, _names_in, _names_in_json, _open, retry_after
from effloop.data.remote.store import FetchError

NGINX = """<html><head><title>Index of /set/</title></head><body><h1>Index of /set/</h1><hr><pre><a href="../">../</a>
<a href="train/">train/</a>                               23-Nov-2026 13:43                   -
<a href="a%20b.tar">a b.tar</a>                           23-Nov-2026 13:43                1024
</pre><hr></body></html>"""
APACHE = """<table><tr><th><a href="?C=N;O=D">Name</a></th></tr><tr><td><a href="/">Parent Directory</a></td></tr>
<tr><td><a href="train/">train/</a></td></tr><tr><td><a href="a%20b.tar">a b.tar</a></td></tr></table>"""
OTHERS = """<a href="https://elsewhere/x.tar">x</a><a href="/set/train/">train</a><a href="./a%20b.tar">a</a>
<a href="mailto:me">me</a><a href="#top">top</a><a href="../up.tar">up</a><a href="deep/x.tar">deep</a>"""


@pytest.mark.parametrize("page", [NGINX, APACHE, OTHERS])
def test_names_in_a_folders_page(page):
    links = _Links()
    links.feed(page)
    assert links.names("/set/") == ["train/", "a b.tar"]


@pytest.mark.parametrize(
    "listed",
    [
        ["a.tar", "b/c.tar"],
        [{"name": "a.tar", "size": 3}, {"name": "b/c.tar"}],
        {"shardlist": [{"url": "a.tar", "nsamples": 3}, {"url": "b/c.tar"}]},
    ],
)
def test_names_in_an_index(listed):
    assert [*_names_in(listed)] == ["a.tar", "b/c.tar"]


@pytest.mark.parametrize("listed", [{}, "a.tar", [3], ["../a.tar"], ["/a.tar"], [{"size": 3}], ["https://h/a.tar"]])
def test_what_is_no_index_is_refused(listed):
    with pytest.raises(ValueError, match=r"^$"):
        [*_names_in(listed)]


def test_names_in_a_listing_in_json():
    rows = [{"name": "train", "type": "directory"}, {"name": "a b.tar"}, {"name": 3}, {}, "x", {"name": "../up.tar"}]
    assert _names_in_json(rows) == ["train/", "a b.tar"]
    for rows in (3, {"name": "a.tar"}):
        with pytest.raises(ValueError, match=r"^$"):
            _names_in_json(rows)


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

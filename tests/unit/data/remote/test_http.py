"""What is asked of web servers, and what they answer."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from remotes import serving

from effloop.data.remote.http import HttpStore, _open, retry_after
from effloop.data.remote.location import Location
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


@pytest.mark.parametrize("hangs_up", [False, True])
def test_connections_are_kept(tmp_path, hangs_up):
    (tmp_path / "d").mkdir()
    for number in range(100):
        (tmp_path / f"d/{number:02}.tar").write_bytes(bytes(number + 1))
    with serving(tmp_path) as server:
        server.hangs_up = hangs_up
        store = HttpStore(Location.of(f"{server.url}/d/{{00..99}}.tar"))
        files = store.manifest().files
        assert [file.size for file in files] == [*range(1, 101)]
        for file in files[:20]:
            assert b"".join(store.read(file, 0, file.size)) == bytes(file.size)
        assert len(server.requests) == 120
        assert server.connections == 120 if hangs_up else server.connections <= 16


def test_an_answer_that_is_not_read_to_its_end_takes_its_connection_along(tmp_path):
    (tmp_path / "a.tar").write_bytes(bytes(4 << 20))
    (tmp_path / "b.tar").write_bytes(b"whole")
    with serving(tmp_path) as server:
        store = HttpStore(Location.of(f"{server.url}/{{a,b}}.tar"))
        first, second = store.manifest().files
        before = server.connections
        next(pieces := store.read(first, 0, first.size))
        pieces.close()
        assert b"".join(store.read(second, 0, second.size)) == b"whole"
        assert server.connections <= before + 1

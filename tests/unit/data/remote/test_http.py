"""What is asked of web servers, and what they answer."""

import json
import socket
import struct
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
from remotes import Fault, serving

from effloop.data.remote import connections, http, store
from effloop.data.remote.answers import open_url, retry_after, size_of
from effloop.data.remote.http import HttpStore
from effloop.data.remote.location import Location
from effloop.data.remote.store import ChangedError, FetchError
from effloop.errors import DataError


class _Redirecting(BaseHTTPRequestHandler):
    """Some paths are elsewhere; the others need the header `Authorization`."""

    def do_GET(self):
        where = {"/slash": "/slash/", "/host": f"http://localhost:{self.server.server_port}/x", "/ftp": "ftp://h/x"}
        found = where.get(self.path, "/login?of=not-to-be-shown" if self.path.endswith(".tar") else None)
        login = self.path.startswith("/login")
        self.send_response(302 if found else 200 if self.headers["Authorization"] or login else 401)
        self.send_header("Content-Type", "text/html" if login else "application/octet-stream")
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
        with open_url(f"{url}/slash") as answer:
            assert answer.url == f"{url}/slash/"
        for path, failure in (("host", "401"), ("ftp", r"redirect to ftp://")):
            with pytest.raises(FetchError, match=failure):
                open_url(f"{url}/{path}")
        server.shutdown()


def test_a_page_to_log_in_is_no_file():
    with ThreadingHTTPServer(("127.0.0.1", 0), _Redirecting) as server:
        threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        said = r"[ab]\.tar can't be fetched: it leads to a web page, as of a login: .*/login\?\*\*\* \(set EFFLOOP_"
        with pytest.raises(DataError, match=said):
            HttpStore(Location.of(f"{url}/{{a,b}}.tar")).manifest()
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


@pytest.fixture
def server(tmp_path):
    """A server of `a.tar` and `b.tar`, of 300,000 bytes each."""
    for name in ("a.tar", "b.tar"):
        (tmp_path / name).write_bytes(name.encode() * 60_000)
    with serving(tmp_path) as found:
        yield found


def _store(server, path):
    return HttpStore(Location.of(f"{server.url}/{path}"))


def test_old_connections_are_not_used_again(server, monkeypatch):
    reads = _store(server, "a.tar")
    (file,) = reads.manifest().files
    list(reads.read(file, 0, file.size))
    before = server.connections
    list(reads.read(file, 0, file.size))
    assert server.connections == before
    monkeypatch.setattr(connections, "_OLDEST_S", 0)
    list(reads.read(file, 0, file.size))
    assert server.connections == before + 1


def test_another_part_than_was_asked_for_is_not_taken(server):
    reads = _store(server, "a.tar")
    (file,) = reads.manifest().files
    server.shift = 100
    with pytest.raises(FetchError, match="sends bytes 900-1899/300000 where bytes 1000-1999 were asked for"):
        list(reads.read(file, 1000, 2000))


def test_a_file_that_has_become_too_short_has_changed(server):
    reads = _store(server, "a.tar")
    (file,) = reads.manifest().files
    server.faults = [Fault(416)]
    with pytest.raises(ChangedError):
        list(reads.read(file, 1000, 2000))


@contextmanager
def _resetting():
    """The URL of a server that resets each connection before the only byte of its answer."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer():
            while True:
                try:
                    accepted, _ = listening.accept()
                except OSError:
                    return
                accepted.recv(1 << 16)
                accepted.sendall(
                    b"HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 0-0/9\r\nContent-Length: 1\r\n\r\n"
                )
                accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                accepted.close()

        threading.Thread(target=answer, daemon=True).start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        listening.shutdown(socket.SHUT_RDWR)


def test_a_connection_that_is_reset_after_its_header_is_another_attempt(monkeypatch):
    monkeypatch.setattr(store, "_FIRST_S", 0.01)
    with _resetting() as url, pytest.raises(DataError, match=r"a\.tar can't be fetched: .* reset .*attempt 4 of 4"):
        HttpStore(Location.of(f"{url}/a.tar")).manifest()


def test_the_header_of_a_file_with_a_line_break_is_sent_without(server, monkeypatch):
    monkeypatch.setenv("EFFLOOP_HTTP_AUTHORIZATION", "Bearer hidden-token\n")
    _store(server, "a.tar").manifest()
    assert server.queries[-1][1] == "Bearer hidden-token"


@pytest.mark.parametrize("said", ["Bearer hidden\ntoken", "Bearer …hidden"])
def test_a_header_that_cannot_be_sent_is_refused_and_not_shown(said, server, monkeypatch):
    monkeypatch.setenv("EFFLOOP_HTTP_AUTHORIZATION", said)
    with pytest.raises(DataError, match="EFFLOOP_HTTP_AUTHORIZATION has characters") as error:
        _store(server, "a.tar").manifest()
    assert "hidden" not in str(error.value)


@pytest.mark.parametrize(("busy", "refused"), [("a.tar", "b.tar"), ("b.tar", "a.tar")])
def test_the_first_file_that_is_refused_ends_the_others(busy, refused, server):
    server.faults = [
        Fault(429, times=10_000, retry_after="60", of=busy, on_listing=True),
        Fault(403, of=refused, on_listing=True),
    ]
    with pytest.raises(DataError, match=rf"/{refused} can't be fetched: 403 Forbidden"):
        _store(server, "{a,b}.tar").manifest()
    assert len(server.requests) <= 3


def test_folders_are_looked_into_as_deep_as_the_pattern_goes(server):
    folder = server.root / "d/1/2/3/4/5/6/7/8/9"
    folder.mkdir(parents=True)
    for path in (folder, server.root / "d/1", server.root / "d"):
        (path / "x.tar").write_bytes(b"x")
    for pattern, keys in (("d/*.tar", ["d/x.tar"]), ("d/*/*.tar", ["d/1/x.tar"])):
        server.requests.clear()
        assert [file.key for file in _store(server, pattern).manifest().files] == keys
        assert len(server.requests) == pattern.count("/") + 1
    for root in ("d/", "d/**/*.tar"):
        with pytest.raises(DataError, match="or more than 8 in each other; pack"):
            _store(server, root).manifest()


def test_a_file_that_an_index_names_twice_is_one(server):
    (server.root / "index.json").write_text(json.dumps(["a.tar", "./a.tar", "a.tar"]))
    assert [file.key for file in _store(server, "index.json").manifest().files] == ["a.tar"]


def test_more_files_than_a_dataset_may_have_are_refused(server, monkeypatch):
    monkeypatch.setattr(http, "MOST_FILES", 1)
    (server.root / "index.json").write_text(json.dumps(["a.tar", "b.tar"]))
    for root in ("", "*.tar", "index.json"):
        server.requests.clear()
        with pytest.raises(DataError, match=r"can't be fetched: it has more than .* files; pack them"):
            _store(server, root).manifest()
        assert len(server.requests) == 1
    assert len(_store(server, "a*.tar").manifest().files) == 1


def test_a_listing_that_trickles_is_not_waited_for_to_its_end(server, monkeypatch):
    monkeypatch.setattr(store, "_SLOW_S", 0.0)
    monkeypatch.setattr(store, "_FIRST_S", 0.01)
    with pytest.raises(DataError, match=r"bytes in 0 s are too slow \(attempt 4 of 4"):
        _store(server, "").manifest()


@pytest.mark.parametrize("name", ["a%2Etar", "{a,%61}.tar"])
def test_a_file_with_two_spellings_is_one(name, server):
    assert [file.key for file in _store(server, name).manifest().files] == ["a.tar"]


@pytest.mark.parametrize("said", ["x", f"Mon, 01 Jan {10**19} 00:00:00 GMT", "Mon, 01 Jan 0001 00:00:00 GMT"])
def test_a_pause_that_means_nothing_is_none(said):
    assert not retry_after({"Retry-After": said})


@pytest.mark.parametrize(
    ("status", "header", "value", "size"),
    [
        (206, "Content-Range", "bytes 0-0/12", 12),
        (206, "Content-Range", "bytes 0-0/*", None),
        (206, "Content-Range", "bytes 0-0/" + "9" * 5000, None),
        (200, "Content-Length", "12", 12),
        (200, "Content-Length", "", None),
        (200, "Content-Length", "1,2", None),
    ],
)
def test_the_size_that_an_answer_tells(status, header, value, size):
    assert size_of(SimpleNamespace(status=status, headers={header: value})) == size


class _Unlisted(BaseHTTPRequestHandler):
    """A folder `/d/` that nginx doesn't list."""

    def do_GET(self):
        self.send_response(301 if self.path == "/d" else 403)
        self.send_header("Location", "/d/")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.mark.parametrize("path", ["d", "d/"])
def test_a_folder_that_is_not_listed_needs_names(path):
    with ThreadingHTTPServer(("127.0.0.1", 0), _Unlisted) as server:
        threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
        place = f"http://127.0.0.1:{server.server_port}"
        with pytest.raises(DataError, match=r"/d/ can't be fetched: 403 .*; a server that lists no folders needs"):
            HttpStore(Location.of(f"{place}/{path}")).manifest()
        server.shutdown()

"""Requests to web servers, and their answers."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from remotes import Fault, serving

from effloop.data.remote import buckets, http, store
from effloop.data.remote.http import HttpStore, Links, names_in
from effloop.data.remote.location import Location
from effloop.data.remote.store import ChangedError, FetchError
from effloop.errors import ConfigError, DataError


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(store, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(buckets, "FIRST_RETRIES", 0)


@contextmanager
def answering(answer):
    """The URL of a server; `answer` gets the handler of each request."""
    handler = type("Handler", (BaseHTTPRequestHandler,), {"do_GET": answer, "log_message": lambda *_: None})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def answer(request, status, body=b"", **headers):
    request.send_response(status)
    for name, value in {"Content_Length": str(len(body)), **headers}.items():
        request.send_header(name.replace("_", "-"), value)
    request.end_headers()
    request.wfile.write(body)


@pytest.fixture
def server(tmp_path):
    """A server of `a.tar` and `b.tar`, of 300,000 bytes each."""
    for name in ("a.tar", "b.tar"):
        (tmp_path / name).write_bytes(name.encode() * 60_000)
    with serving(tmp_path) as found:
        yield found


def store_at(server, path):
    return HttpStore(Location.of(f"{server.url}/{path}"))


def _redirected(request):
    """Some paths are elsewhere; all others need the header `Authorization`."""
    port = request.server.server_port
    places = {
        "/same.tar": "/x.tar",
        "/host.tar": f"http://localhost:{port}/x.tar",
        "/host/": f"http://localhost:{port}/x.tar",
        "/ftp/": "ftp://h/x",
        "/moved/": "/x/",
    }
    place = places.get(request.path)
    answer(
        request,
        302 if place else 200 if request.headers["Authorization"] else 401,
        b"" if place else b"x",
        **({"Location": place} if place else {}),
    )


def test_other_hosts_do_not_get_the_header(monkeypatch):
    monkeypatch.setenv("EFFLOOP_HTTP_AUTHORIZATION", "Bearer secret")
    with answering(_redirected) as url:
        assert HttpStore(Location.of(f"{url}/same.tar")).manifest().bytes == 1
        for path, failure in (
            ("host.tar", "401 Unauthorized; set EFFLOOP_HTTP_AUTHORIZATION"),
            ("host/", "401 Unauthorized; set EFFLOOP_HTTP_AUTHORIZATION"),
            ("ftp/", "a redirect to ftp://"),
            ("moved/", "has no files"),  # of the page, which had the header
        ):
            with pytest.raises(DataError, match=failure):
                HttpStore(Location.of(f"{url}/{path}")).manifest()


def test_a_page_to_log_in_is_no_file():
    with answering(lambda request: answer(request, 200, b"<html>", Content_Type="text/html")) as url:
        for root in ("{a,b}.tar", "a.tar"):
            said = r"[ab]\.tar can't be fetched: it leads to a web page, as of a login \(set EFFLOOP_"
            with pytest.raises(DataError, match=said):
                HttpStore(Location.of(f"{url}/{root}")).manifest()


def test_connections_are_kept(tmp_path):
    (tmp_path / "d").mkdir()
    for number in range(100):
        (tmp_path / f"d/{number:02}.tar").write_bytes(bytes(number + 1))
    with serving(tmp_path) as server:
        reads = store_at(server, "d/{00..99}.tar")
        files = reads.manifest().files
        assert [file.size for file in files] == [*range(1, 101)]
        for file in files[:20]:
            assert b"".join(reads.read(file, 0, file.size)) == bytes(file.size)
        assert len(server.requests) == 120
        assert server.connections <= 50  # of two clients, with 16 threads


@pytest.mark.parametrize(
    ("body", "headers", "why"),
    [
        (b"xxx", {"Content_Range": "bytes 1-5/9"}, "Requested 0..5, got 1..6"),
        (b"xxx", {"Content_Range": "bytes 0-4/8"}, "it has changed"),
        (b"xxxxx", {"Content_Range": "bytes 0-4/9", "Content_Encoding": "gzip"}, r"sends it compressed \(gzip\)"),
    ],
)
def test_a_wrong_answer_is_not_taken(body, headers, why):
    with answering(lambda request: answer(request, 206, body, **headers)) as url:
        reads = HttpStore(Location.of(f"{url}/a.tar"))
        with pytest.raises(FetchError, match=why):
            list(reads.read(http.RemoteFile("a.tar", 9, ""), 0, 5))


def test_a_file_that_has_become_too_short_has_changed(server):
    reads = store_at(server, "a.tar")
    (file,) = reads.manifest().files
    server.faults = [Fault(416)]
    with pytest.raises(ChangedError):
        list(reads.read(file, 1000, 2000))


def test_the_header_of_a_file_with_a_line_break_is_sent_without(server, monkeypatch):
    monkeypatch.setenv("EFFLOOP_HTTP_AUTHORIZATION", "Bearer hidden-token\n")
    store_at(server, "a.tar").manifest()
    assert server.queries[-1][1] == "Bearer hidden-token"


@pytest.mark.parametrize("value", ["Bearer hidden\ntoken", "Bearer …hidden"])
def test_a_header_that_cannot_be_sent_is_refused_and_not_shown(value, server, monkeypatch):
    monkeypatch.setenv("EFFLOOP_HTTP_AUTHORIZATION", value)
    with pytest.raises(ConfigError, match="EFFLOOP_HTTP_AUTHORIZATION has characters") as error:
        store_at(server, "a.tar").manifest()
    assert "hidden" not in str(error.value)


def test_the_first_file_that_is_refused_ends_the_others(server):
    over = threading.Event()
    server.faults = [
        Fault(of="a.tar", act=lambda: over.wait(20), on_listing=True),
        Fault(403, of="b.tar", on_listing=True),
    ]
    with pytest.raises(DataError, match=r"/b.tar can't be fetched: 403 Forbidden"):
        store_at(server, "{a,b}.tar").manifest()
    assert not over.is_set()
    over.set()


def test_folders_are_looked_into_as_deep_as_the_pattern_goes(server):
    folder = server.root / "d/1/2/3/4/5/6/7/8/9"
    folder.mkdir(parents=True)
    for path in (folder, server.root / "d/1", server.root / "d"):
        (path / "x.tar").write_bytes(b"x")
    for pattern, keys in (("d/*.tar", ["d/x.tar"]), ("d/*/*.tar", ["d/1/x.tar"])):
        server.requests.clear()
        assert [file.key for file in store_at(server, pattern).manifest().files] == keys
        assert len(server.requests) == pattern.count("/") + 1
    for root in ("d/", "d/**/*.tar"):
        with pytest.raises(DataError, match="or more than 8 in each other; pack"):
            store_at(server, root).manifest()


def test_a_file_that_an_index_names_twice_is_one(server):
    (server.root / "index.json").write_text(json.dumps(["a.tar", "./a.tar", "a.tar"]))
    assert [file.key for file in store_at(server, "index.json").manifest().files] == ["a.tar"]


def test_more_files_than_a_dataset_may_have_are_refused(server, monkeypatch):
    monkeypatch.setattr(http, "MOST_FILES", 1)
    (server.root / "index.json").write_text(json.dumps(["a.tar", "b.tar"]))
    for root in ("", "*.tar", "index.json"):
        server.requests.clear()
        with pytest.raises(DataError, match=r"can't be fetched: it has more than .* files; pack them"):
            store_at(server, root).manifest()
        assert len(server.requests) == 1
    assert len(store_at(server, "a*.tar").manifest().files) == 1


@pytest.mark.parametrize("name", ["a%2Etar", "{a,%61}.tar"])
def test_a_file_with_two_spellings_is_one(name, server):
    assert [file.key for file in store_at(server, name).manifest().files] == ["a.tar"]


@pytest.mark.parametrize("ranged", ["bytes 0-0/*", "bytes 0--1/9", ""])
def test_a_server_that_answers_a_request_for_a_byte_otherwise_is_asked_for_all(ranged):
    def respond(request):
        if "Range" in request.headers and ranged:
            answer(request, 206, b"x", Content_Range=ranged)
        else:
            answer(request, 200, b"x" * 9, ETag='W/"v"')

    with answering(respond) as url:
        (file,) = HttpStore(Location.of(f"{url}/a.tar")).manifest().files
    assert (file.size, file.version, file.ranges) == (9, "v", False)


def test_a_file_without_a_size_is_refused():
    def respond(request):
        request.send_response(200)
        request.end_headers()

    with answering(respond) as url, pytest.raises(DataError, match="Content-Length Header missing"):
        HttpStore(Location.of(f"{url}/a.tar")).manifest()


@pytest.mark.parametrize("path", ["d", "d/"])
def test_a_folder_that_is_not_listed_needs_names(path):
    def respond(request):
        answer(request, 301 if request.path == "/d" else 403, Location="/d/")

    wanted = r"/d/? can't be fetched: 403 .*; a server that lists no folders needs"
    with answering(respond) as url, pytest.raises(DataError, match=wanted):
        HttpStore(Location.of(f"{url}/{path}")).manifest()


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
    links = Links()
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
    assert names_in(listed) == ["a.tar", "b/c.tar"]


@pytest.mark.parametrize(
    "listed", [{}, "a.tar", [3], ["../a.tar"], ["/a.tar"], [{"size": 3}], ["https://h/a.tar"], ["\ud800"]]
)
def test_other_json_is_no_index(listed):
    with pytest.raises(ValueError, match=r"^$"):
        names_in(listed)


def test_names_in_a_listing_in_json():
    assert names_in([{"name": "train", "type": "directory"}, {"name": "a b.tar", "type": "file"}]) == [
        "train/",
        "a b.tar",
    ]

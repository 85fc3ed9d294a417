"""What lists and reads files behind URLs, and the lines for servers, answers and environments that are of no use."""

import functools
import json
import shutil
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from plans import line
from remotes import Fault, Server, serving

from effloop.data.remote import location as locations
from effloop.data.remote import stores
from effloop.data.remote.location import Location, RemoteFile, manifest_of
from effloop.data.remote.stores import ChangedError, FetchError, FsspecStore, describe_answer, names_in, store_of
from effloop.errors import ConfigError, DataError

fsspec = pytest.importorskip("fsspec")
pytest.importorskip("obstore")


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Credentials, and no patience."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "of-no-use")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setattr(stores, "FIRST_RETRIES", 0)
    monkeypatch.setattr(stores, "FIRST_PAUSE_S", 0.001)


@contextmanager
def answering(answer: Callable[[BaseHTTPRequestHandler], None]) -> Iterator[str]:
    """The URL of a server; `answer` gets the handler of each request."""
    handler = type("Handler", (BaseHTTPRequestHandler,), {"do_GET": answer, "log_message": lambda *_: None})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def answer(request: BaseHTTPRequestHandler, status: int, body: bytes = b"", **headers: str) -> None:
    request.send_response(status)
    for name, value in {"Content_Length": str(len(body)), **headers}.items():
        request.send_header(name.replace("_", "-"), value)
    request.end_headers()
    request.wfile.write(body)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """A server of `a.tar` and `b.tar`, of 300,000 bytes each, and of lists of them."""
    for name in ("a.tar", "b.tar"):
        (tmp_path / name).write_bytes(name.encode() * 60_000)
    (tmp_path / "index.json").write_text(json.dumps(["a.tar", "./a.tar", "b.tar", "a.tar"]))
    (tmp_path / "other.json").write_text("{}")
    with serving(tmp_path) as found:
        yield found


def keys_at(server: Server, path: str) -> list[str]:
    """The files of a URL."""
    return [file.key for file in store_of(Location.of(f"{server.url}/{path}")).manifest().files]


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("a.tar", ["a.tar"]),
        ("a%2Etar", ["a.tar"]),
        ("{a,%61}.tar", ["a.tar"]),
        ("{a,b}.tar", ["a.tar", "b.tar"]),
        ("index.json", ["a.tar", "b.tar"]),
    ],
)
def test_files_of_a_web_server(path, names, server):
    assert keys_at(server, path) == names


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("", "needs a listing, and web servers have none in common; set data.root to names as http://"),
        ("set/", "needs a listing"),
        ("*.tar", "needs a listing"),
        ("other.json", "other.json is no list of file names in JSON; set data.root"),
        ("{a,none}.tar", "/none.tar can't be fetched: 404 Not Found"),
    ],
)
def test_what_a_web_server_does_not_name(path, why, server):
    with pytest.raises((ConfigError, DataError), match=why):
        keys_at(server, path)


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
    "listed", [{}, "a.tar", [], [3], [""], ["../a.tar"], ["/a.tar"], [{"size": 3}], ["https://h/a.tar"], ["\ud800"]]
)
def test_other_json_is_no_index(listed):
    with pytest.raises(ValueError, match=r"^$"):
        names_in(listed)


def test_other_hosts_do_not_get_the_header(monkeypatch):
    def respond(request: BaseHTTPRequestHandler) -> None:
        places = {"/same.tar": "/x.tar", "/host.tar": f"http://localhost:{request.server.server_port}/x.tar"}  # type: ignore[attr-defined]
        if place := places.get(request.path):
            answer(request, 302, Location=place)
        else:
            answer(request, 200 if request.headers["Authorization"] else 401, b"x")

    monkeypatch.setenv("EFFLOOP_HTTP_AUTHORIZATION", "Bearer secret\n")
    with answering(respond) as url:
        assert store_of(Location.of(f"{url}/same.tar")).manifest().bytes == 1
        with pytest.raises(DataError, match="401 Unauthorized; set EFFLOOP_HTTP_AUTHORIZATION"):
            store_of(Location.of(f"{url}/host.tar")).manifest()


@pytest.mark.parametrize("value", ["Bearer hidden\ntoken", "Bearer …hidden"])
def test_a_header_that_cannot_be_sent_is_refused_and_not_shown(value, monkeypatch):
    monkeypatch.setenv("EFFLOOP_HTTP_AUTHORIZATION", value)
    with pytest.raises(ConfigError, match="EFFLOOP_HTTP_AUTHORIZATION has characters") as error:
        store_of(Location.of("https://h/x"))
    assert "hidden" not in str(error.value)


def test_a_page_to_log_in_is_no_file():
    with answering(lambda request: answer(request, 200, b"<html>", Content_Type="text/html")) as url:
        for root in ("{a,b}.tar", "a.tar"):
            with pytest.raises(DataError, match=r"[ab]\.tar can't be fetched: it leads to a web page, as of a folder"):
                store_of(Location.of(f"{url}/{root}")).manifest()


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
        reads = store_of(Location.of(f"{url}/a.tar"))
        with pytest.raises(FetchError, match=why):
            list(reads.read(RemoteFile("a.tar", 9, ""), 0, 5))


@pytest.mark.parametrize("ranged", ["bytes 0-0/*", "bytes 0--1/9", ""])
def test_a_server_that_answers_a_request_for_a_byte_otherwise_is_asked_for_all(ranged):
    def respond(request: BaseHTTPRequestHandler) -> None:
        if "Range" in request.headers and ranged:
            answer(request, 206, b"x", Content_Range=ranged)
        else:
            answer(request, 200, b"x" * 9, ETag='W/"v"')

    with answering(respond) as url:
        (file,) = store_of(Location.of(f"{url}/a.tar")).manifest().files
    assert (file.size, file.version, file.ranges) == (9, "v", False)


def test_a_file_that_has_become_too_short_has_changed(server):
    reads = store_of(Location.of(f"{server.url}/a.tar"))
    (file,) = reads.manifest().files
    server.faults = [Fault(416)]
    with pytest.raises(ChangedError):
        list(reads.read(file, 1000, 2000))


def test_the_first_file_that_is_refused_ends_the_others(server):
    over = threading.Event()
    server.faults = [
        Fault(of="a.tar", act=lambda: over.wait(20), on_listing=True),
        Fault(403, of="b.tar", on_listing=True),
    ]
    with pytest.raises(DataError, match=r"/b.tar can't be fetched: 403 Forbidden"):
        keys_at(server, "{a,b}.tar")
    assert not over.is_set()
    over.set()


def test_connections_are_kept(server):
    reads = store_of(Location.of(f"{server.url}/" + "{a,b}.tar"))
    files = reads.manifest().files
    for _ in range(20):
        assert all(sum(map(len, reads.read(file, 0, file.size))) == file.size for file in files)
    assert len(server.requests) == 42
    assert server.connections <= 6


def test_more_files_than_allowed_are_refused(server, system, monkeypatch):
    for module in (stores, locations):
        monkeypatch.setattr(module, "MOST_FILES", 1)
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    (server.root / "d").mkdir()
    for name in ("a", "b"):
        (server.root / "d" / name).write_text(name)
    # A pattern needs all of the listing, even if it names few of what there is of it.
    for root in (f"{server.url}/index.json", "s3://d", "s3://d/a*", "memory://bucket/set", "memory://bucket/set/a*"):
        server.requests.clear()
        location = Location.of(root)
        reads = FsspecStore(location) if location.scheme == "memory" else store_of(location)
        with pytest.raises(DataError, match=r"' has more than .* files; pack them"):
            reads.manifest()
        assert len(server.requests) < 3  # names in JSON aren't asked for one by one


@pytest.mark.parametrize("name", ["a//b.tar", "./a.tar", "a/./b.tar", "../a.tar", "/a.tar", "a\\b.tar", "x.tar/b.tar"])
def test_names_of_which_two_would_be_one_file_are_refused(name):
    files = [RemoteFile(f"set/{each}", 1, "v") for each in ("x.tar", name)]
    with pytest.raises(DataError, match="which can't be a local file's name; rename it"):
        manifest_of(Location.of("s3://b/set"), files, alone=False, base="set/")


def test_files_that_are_named_and_missing():
    there = [RemoteFile("train-0.tar", 1, "v")]
    with pytest.raises(DataError, match=r"names files that aren't there: s3://b/train-1\.tar and 1 more; correct it$"):
        manifest_of(Location.of("s3://b/train-{0..2}.tar"), there, alone=False, base="")


@pytest.mark.parametrize("root", ["zip://a/b", "simplecache://a", "s4://b/x", "sftp://h/x"])
def test_other_schemes_are_refused(root):
    with pytest.raises(ConfigError, match=r"is of no scheme that EffLoop reads; have s3, gs"):
        store_of(Location.of(root))


@pytest.mark.parametrize(
    ("endpoint", "why"),
    [("http://127.0.0.1:1", "Connection refused"), ("http://no-such-host.invalid", "Name or service not known")],
)
def test_why_a_bucket_does_not_answer(endpoint, why, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    with pytest.raises(DataError) as error:
        store_of(Location.of("s3://bucket/x")).manifest()
    assert why in str(error.value)


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@pytest.mark.parametrize("root", ["https://127.0.0.1:{port}/a.tar", "s3://bucket/x"])
@pytest.mark.parametrize("certified", [False, True])
def test_only_https_with_a_valid_certificate(certified, root, monkeypatch, tmp_path):
    if certified and shutil.which("openssl") is None:
        pytest.skip("makes the certificate")
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=tmp_path)) as server:
        if certified:
            key, certificate = tmp_path / "key", tmp_path / "certificate"
            words = f"-x509 -newkey rsa:2048 -nodes -subj /CN=me -addext subjectAltName=IP:127.0.0.1 -keyout {key} -out"
            subprocess.run(["openssl", "req", *words.split(), certificate], check=True, capture_output=True)
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate, key)
            server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"https://127.0.0.1:{server.server_port}")
        wanted = (
            r"its certificate is not valid: .*; SSL_CERT_FILE=FILE names"
            if certified
            else r"can't be fetched: it doesn't answer by HTTPS, perhaps by http://$"
        )
        with pytest.raises(DataError, match=wanted):
            store_of(Location.of(root.format(port=server.server_port))).manifest()
        server.shutdown()


def test_what_to_do_about_a_refusal():
    text = "Server returned non-2xx status code: 403 Forbidden: "
    wanted = "403 Forbidden: SignatureDoesNotMatch; log in"
    assert describe_answer(f"{text}<Error><Code>SignatureDoesNotMatch</Code></Error>", "log in") == wanted
    assert describe_answer(text, "log in") == "403 Forbidden; log in"
    busy = "in 1s, after 3 retries, max_retries: 3  - Server returned non-2xx status code: 503 Service Unavailable: "
    assert describe_answer(busy, "") == "503 Service Unavailable (4 attempts)"


@pytest.mark.parametrize(
    ("root", "names"),
    [("s3a://b/x", "AWS_ACCESS_KEY_ID and"), ("gs://b/x", "GOOGLE_APP"), ("abfs://b/x", "AZURE_STORAGE_ACCOUNT_NAME")],
)
def test_credentials_are_those_of_the_kind_of_bucket(root, names, monkeypatch):
    from obstore.exceptions import GenericError

    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "me")
    error = GenericError("HTTP error of http://169.254.169.254/latest")
    assert f"no credentials; set {names}" in str(store_of(Location.of(root))._failure(error))


def test_an_address_is_a_url(monkeypatch):
    for value in ("127.0.0.1:9000", "localhost", "", "http://", "http://h:abc", "ftp://h"):
        monkeypatch.setenv("AWS_ENDPOINT_URL", value)
        wanted = f"AWS_ENDPOINT_URL: '{value}' is not a URL; set it to http://HOST:PORT or https://HOST"
        with pytest.raises(ConfigError, match=line(wanted)):
            store_of(Location.of("s3://bucket/x"))
    for value in ("http://127.0.0.1:9000/", "https://[::1]:9000", "https://minio.example.org/s3"):
        monkeypatch.setenv("AWS_ENDPOINT_URL", value)
        store_of(Location.of("s3://bucket/x"))


@pytest.mark.parametrize(
    ("url", "name", "value"),
    [
        ("s3://bucket/x", "AWS_REGION", "us east"),
        ("s3://bucket/x", "AWS_ACCESS_KEY_ID", "secret\r"),
        ("s3://bucket/x", "AWS_SESSION_TOKEN", "secret\n"),
        ("az://bucket/x", "AZURE_STORAGE_ACCOUNT_NAME", "secret\r"),
    ],
)
def test_a_line_end_is_no_part_of_a_key(url, name, value, monkeypatch):
    monkeypatch.setenv(name, value)
    wanted = f"{name}: it has a space, a line end or another character that no key has; correct it"
    with pytest.raises(ConfigError, match=line(wanted)):
        store_of(Location.of(url))


def test_profiles_are_read_by_boto3(tmp_path, monkeypatch):
    (tmp_path / "credentials").write_text("[mine]\naws_access_key_id = key\naws_secret_access_key = word\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_PROFILE", "mine")
    try:
        import boto3  # noqa: F401
    except ImportError:
        with pytest.raises(ConfigError, match=r"credentials of .* needs the package 'boto3'; pip install 'boto3'"):
            store_of(Location.of("s3://bucket/x"))
        return
    store_of(Location.of("s3://bucket/x"))
    monkeypatch.setenv("AWS_PROFILE", "other")
    with pytest.raises(ConfigError, match=r"other.*; correct it, or set AWS_ACCESS_KEY_ID"):
        store_of(Location.of("s3://bucket/x"))


@pytest.fixture
def system() -> Iterator[Any]:
    found = fsspec.filesystem("memory")
    for name in ("a.tar", "b.tar", "c.txt", "deep/d.tar"):
        found.pipe_file(f"/bucket/set/{name}", name.encode())
    yield found
    found.rm("/bucket", recursive=True)


@pytest.mark.parametrize(
    ("path", "names", "alone"),
    [
        ("set", ["a.tar", "b.tar", "c.txt", "deep/d.tar"], False),
        ("set/{a,b}.tar", ["a.tar", "b.tar"], False),
        ("set/**/*.tar", ["a.tar", "b.tar", "deep/d.tar"], False),
        ("set/c.txt", ["c.txt"], True),
    ],
)
def test_fsspec_lists_and_reads(path, names, alone, system):
    reads = FsspecStore(Location.of(f"memory://bucket/{path}"))
    manifest = reads.manifest()
    assert ([manifest.name(file) for file in manifest.files], manifest.alone) == (names, alone)
    for file in manifest.files:
        data = system.cat_file(f"/bucket/{file.key}")
        assert b"".join(reads.read(file, 1, file.size)) == data[1:]


def test_a_file_that_is_gone_is_no_bug(system):
    reads = FsspecStore(Location.of("memory://bucket/set"))
    file = reads.manifest().files[0]
    system.rm("/bucket/set/a.tar")
    with pytest.raises(FetchError, match="FileNotFoundError"):
        list(reads.read(file, 0, 1))
    with pytest.raises(DataError, match="FileNotFoundError"):
        FsspecStore(Location.of("memory://bucket/none")).manifest()


def test_files_of_fsspec_are_compared_at_the_end(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "set/a.tar"
    path.parent.mkdir()
    path.write_bytes(b"then")
    reads = FsspecStore(Location.of("local://set"))
    (file,) = reads.manifest().files
    assert file.version
    reads.check(file)
    path.write_bytes(b"now!!")
    with pytest.raises(ChangedError):
        reads.check(file)


def test_a_folder_that_cannot_be_listed_is_not_left_out(system, monkeypatch):
    listed = type(system).ls

    def ls(self: Any, path: str, *args: Any, **options: Any) -> Any:
        if path.endswith("deep"):
            raise TimeoutError("timed out")
        return listed(self, path, *args, **options)

    monkeypatch.setattr(type(system), "ls", ls)
    with pytest.raises(DataError, match="TimeoutError: timed out"):
        FsspecStore(Location.of("memory://bucket/set")).manifest()

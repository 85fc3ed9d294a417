"""Stores beside HTTP: which there are, what fsspec's look like, and what is said of servers that don't answer."""

import functools
import os
import shutil
import ssl
import subprocess
import threading
from dataclasses import replace
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest

from effloop.data.remote import buckets, http
from effloop.data.remote.buckets import FsspecStore, store_of
from effloop.data.remote.location import Location
from effloop.data.remote.store import ChangedError, FetchError
from effloop.errors import ConfigError, DataError

fsspec = pytest.importorskip("fsspec")


@pytest.fixture
def system():
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
    store = FsspecStore(Location.of(f"memory://bucket/{path}"))
    manifest = store.manifest()
    assert ([manifest.name(file) for file in manifest.files], manifest.alone) == (names, alone)
    for file in manifest.files:
        data = system.cat_file(f"/bucket/{file.key}")
        assert b"".join(store.read(file, 1, file.size)) == data[1:]


def test_what_is_gone_is_no_bug(system):
    store = FsspecStore(Location.of("memory://bucket/set"))
    file = store.manifest().files[0]
    system.rm("/bucket/set/a.tar")
    with pytest.raises(FetchError, match="FileNotFoundError"):
        list(store.read(file, 0, 1))


@pytest.mark.parametrize("root", ["zip://a/b", "reference://a/b", "simplecache://a", "s4://b/x"])
def test_other_schemes_are_refused(root):
    with pytest.raises(ConfigError, match=r"is of no scheme that EffLoop reads; have s3, gs"):
        store_of(Location.of(root))


def test_what_fsspec_reads_is_looked_at_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "set/a.tar"
    path.parent.mkdir()
    path.write_bytes(b"then")
    store = FsspecStore(Location.of("local://set"))
    (file,) = store.manifest().files
    assert file.version
    store.check(file)
    path.write_bytes(b"now!")  # as long as before
    os.utime(path, ns=(0, 0))
    with pytest.raises(ChangedError):
        store.check(file)


def test_what_is_told_otherwise_of_a_file_than_of_its_folder_is_no_change(system, monkeypatch):
    store = FsspecStore(Location.of("memory://bucket/set"))
    listed = type(system).ls
    monkeypatch.setattr(
        type(system),
        "ls",
        lambda *args, **options: [{**row, "modify": "Nov 23"} for row in listed(*args, **{**options, "detail": True})],
    )
    rows = [{**row, "name": row["name"]} for row in system.ls("/bucket/set", detail=True) if row["type"] == "file"]
    file = store._file(rows[0]["name"], rows[0])
    assert file.version == "Nov 23"
    store.check(file)
    with pytest.raises(ChangedError):
        store.check(replace(file, version="Nov 22"))


@pytest.fixture
def bucket(monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "of-no-use")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setattr(buckets, "_FIRST_ATTEMPTS", 1)
    return Location.of("s3://bucket/x")


@pytest.mark.parametrize(
    ("endpoint", "why"),
    [
        ("http://127.0.0.1:1", "Connection refused (attempt 1 of 1"),
        ("http://no-such-host.invalid", "Name or service not known"),
    ],
)
def test_why_a_bucket_does_not_answer_is_said(endpoint, why, bucket, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    with pytest.raises(DataError) as error:
        store_of(bucket).manifest()
    assert why in str(error.value)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes the certificate")
@pytest.mark.parametrize("root", ["https://127.0.0.1:{port}/", "s3://bucket/x"])
def test_certificates_are_checked(root, bucket, monkeypatch, tmp_path):
    key, certificate = tmp_path / "key", tmp_path / "certificate"
    words = f"-x509 -newkey rsa:2048 -nodes -subj /CN=me -addext subjectAltName=IP:127.0.0.1 -keyout {key} -out"
    subprocess.run(["openssl", "req", *words.split(), certificate], check=True, capture_output=True)
    (tmp_path / "set").mkdir()
    (tmp_path / "set/x").write_bytes(b"x")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    handler = functools.partial(_Quiet, directory=tmp_path / "set")
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"https://127.0.0.1:{server.server_port}")
        location = Location.of(root.format(port=server.server_port))
        http.opener.cache_clear()
        with pytest.raises(DataError, match=r"its certificate is not valid: .*; SSL_CERT_FILE=FILE names"):
            store_of(location).manifest()
        server.shutdown()


def test_a_bundle_of_certificates_is_a_file(bucket, monkeypatch, tmp_path):
    monkeypatch.setenv("AWS_CA_BUNDLE", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"^AWS_CA_BUNDLE: .*none.*; correct it, or unset it$"):
        store_of(bucket)


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass

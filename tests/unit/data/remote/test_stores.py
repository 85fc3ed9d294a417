"""Buckets and fsspec: which store reads a URL, and the lines for servers and environments that are of no use."""

from __future__ import annotations

import functools
import os
import shutil
import ssl
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from plans import line

from effloop.data.remote import buckets, filesystems, store
from effloop.data.remote.download import store_of
from effloop.data.remote.filesystems import FsspecStore
from effloop.data.remote.location import Location
from effloop.data.remote.store import ChangedError, FetchError
from effloop.errors import ConfigError, DataError

fsspec = pytest.importorskip("fsspec")
pytest.importorskip("obstore")


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Credentials, and no patience."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "of-no-use")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setattr(buckets, "FIRST_RETRIES", 0)
    monkeypatch.setattr(store, "FIRST_PAUSE_S", 0.001)


@pytest.mark.parametrize("root", ["zip://a/b", "reference://a/b", "simplecache://a", "s4://b/x"])
def test_other_schemes_are_refused(root: str) -> None:
    with pytest.raises(ConfigError, match=r"is of no scheme that EffLoop reads; have s3, gs"):
        store_of(Location.of(root))


@pytest.mark.parametrize(
    ("endpoint", "why"),
    [
        ("http://127.0.0.1:1", "Connection refused"),
        ("http://no-such-host.invalid", "Name or service not known"),
    ],
)
def test_why_a_bucket_does_not_answer(endpoint: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    with pytest.raises(DataError) as error:
        store_of(Location.of("s3://bucket/x")).manifest()
    assert why in str(error.value)


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@pytest.mark.parametrize("root", ["https://127.0.0.1:{port}/", "https://127.0.0.1:{port}/a.tar", "s3://bucket/x"])
@pytest.mark.parametrize("certified", [False, True])
def test_only_https_with_a_valid_certificate(
    certified: bool, root: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
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


def test_what_to_do_about_a_refusal() -> None:
    text = "Server returned non-2xx status code: 403 Forbidden: "
    wanted = "403 Forbidden: SignatureDoesNotMatch; correct AWS_SECRET_ACCESS_KEY"
    assert buckets._reason(f"{text}<Error><Code>SignatureDoesNotMatch</Code></Error>", "") == wanted
    assert buckets._reason(text, "log in") == "403 Forbidden; log in"
    busy = "in 1s, after 3 retries, max_retries: 3  - Server returned non-2xx status code: 503 Service Unavailable: "
    assert buckets._reason(busy, "") == "503 Service Unavailable (4 attempts)"


@pytest.mark.parametrize(
    ("root", "names"),
    [("s3a://b/x", "AWS_ACCESS_KEY_ID and"), ("gs://b/x", "GOOGLE_APP"), ("abfs://b/x", "AZURE_STORAGE_ACCOUNT_NAME")],
)
def test_credentials_are_those_of_the_kind_of_bucket(root: str, names: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from obstore.exceptions import GenericError

    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "me")
    error = GenericError("HTTP error of http://169.254.169.254/latest")
    assert f"no credentials; set {names}" in str(store_of(Location.of(root))._failure(error))


def test_a_bundle_of_certificates_is_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AWS_CA_BUNDLE", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"^AWS_CA_BUNDLE: .*none.*; correct it, or unset it$"):
        store_of(Location.of("s3://bucket/x"))


@pytest.mark.parametrize("name", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT"])
@pytest.mark.parametrize(
    "value", ["127.0.0.1:9000", "localhost", "", "http://", "http://h:abc", "http://h:99999", "ftp://h"]
)
def test_an_address_is_a_url(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    wanted = f"{name}: '{value}' is not a URL; set it to http://HOST:PORT or https://HOST"
    with pytest.raises(ConfigError, match=line(wanted)):
        store_of(Location.of("s3://bucket/x"))


@pytest.mark.parametrize("value", ["http://127.0.0.1:9000/", "https://[::1]:9000", "https://minio.example.org/s3"])
def test_addresses(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_a_line_end_is_no_part_of_a_key(url: str, name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    wanted = f"{name}: it has a space, a line end or another character that no key has; correct it"
    with pytest.raises(ConfigError, match=line(wanted)):
        store_of(Location.of(url))


def test_profiles_are_read_by_boto3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_fsspec_lists_and_reads(path: str, names: list[str], alone: bool, system: Any) -> None:
    reads = FsspecStore(Location.of(f"memory://bucket/{path}"))
    manifest = reads.manifest()
    assert ([manifest.name(file) for file in manifest.files], manifest.alone) == (names, alone)
    for file in manifest.files:
        data = system.cat_file(f"/bucket/{file.key}")
        assert b"".join(reads.read(file, 1, file.size)) == data[1:]


def test_a_file_that_is_gone_is_no_bug(system: Any) -> None:
    reads = FsspecStore(Location.of("memory://bucket/set"))
    file = reads.manifest().files[0]
    system.rm("/bucket/set/a.tar")
    with pytest.raises(FetchError, match="FileNotFoundError"):
        list(reads.read(file, 0, 1))
    with pytest.raises(DataError, match="FileNotFoundError"):
        FsspecStore(Location.of("memory://bucket/none")).manifest()


def test_files_of_fsspec_are_compared_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "set/a.tar"
    path.parent.mkdir()
    path.write_bytes(b"then")
    reads = FsspecStore(Location.of("local://set"))
    (file,) = reads.manifest().files
    assert file.version
    reads.check(file)
    path.write_bytes(b"now!")  # as long as before
    os.utime(path, ns=(0, 0))
    with pytest.raises(ChangedError):
        reads.check(file)


def test_a_file_that_its_folder_describes_otherwise_has_not_changed(
    system: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = FsspecStore(Location.of("memory://bucket/set"))
    listed = type(system).ls
    monkeypatch.setattr(
        type(system),
        "ls",
        lambda *args, **options: [{**row, "modify": "Nov 23"} for row in listed(*args, **{**options, "detail": True})],
    )
    file = reads.manifest().files[0]
    assert file.version == "Nov 23"
    reads.check(file)
    with pytest.raises(ChangedError):
        reads.check(replace(file, version="Nov 22"))


def test_a_folder_that_cannot_be_listed_is_not_left_out(system: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = type(system).ls

    def ls(self: Any, path: str, *args: Any, **options: Any) -> Any:
        if path.endswith("deep"):
            raise TimeoutError("timed out")
        return listed(self, path, *args, **options)

    monkeypatch.setattr(type(system), "ls", ls)
    with pytest.raises(DataError, match="TimeoutError: timed out"):
        FsspecStore(Location.of("memory://bucket/set")).manifest()


def test_more_files_than_a_dataset_may_have_are_refused(system: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filesystems, "MOST_FILES", 3)
    with pytest.raises(DataError, match="it has more than"):
        FsspecStore(Location.of("memory://bucket/set")).manifest()


def test_a_server_that_does_not_answer_is_no_matter_of_this_disk() -> None:
    with pytest.raises(DataError, match=r"ftp://127\.0\.0\.1:1/ can't be fetched: ConnectionRefusedError"):
        FsspecStore(Location.of("ftp://127.0.0.1:1/set"))

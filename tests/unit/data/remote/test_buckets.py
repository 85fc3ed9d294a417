"""Stores beside HTTP: which there are, and what is said of servers that don't answer."""

import functools
import shutil
import ssl
import subprocess
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest

from effloop.data.remote import answers, buckets
from effloop.data.remote.buckets import store_of
from effloop.data.remote.location import Location
from effloop.errors import ConfigError, DataError

pytest.importorskip("fsspec")


@pytest.mark.parametrize("root", ["zip://a/b", "reference://a/b", "simplecache://a", "s4://b/x"])
def test_other_schemes_are_refused(root):
    with pytest.raises(ConfigError, match=r"is of no scheme that EffLoop reads; have s3, gs"):
        store_of(Location.of(root))


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


@pytest.mark.parametrize("root", ["https://127.0.0.1:{port}/", "s3://bucket/x"])
def test_a_server_without_tls_is_not_asked_again(root, bucket, monkeypatch, tmp_path):
    handler = functools.partial(_Quiet, directory=tmp_path)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"https://127.0.0.1:{server.server_port}")
        with pytest.raises(DataError, match=r"can't be fetched: it doesn't answer by HTTPS, perhaps by http://$"):
            store_of(Location.of(root.format(port=server.server_port))).manifest()
        server.shutdown()


def test_which_credential_is_wrong_is_said():
    text = "Server returned non-2xx status code: 403 Forbidden: <Error><Code>SignatureDoesNotMatch</Code></Error>"
    wanted = "403 Forbidden: SignatureDoesNotMatch; correct AWS_SECRET_ACCESS_KEY"
    assert str(buckets._told(text, final=False, after_s=None)) == wanted


@pytest.mark.parametrize(
    ("root", "names"),
    [("s3a://b/x", "AWS_ACCESS_KEY_ID and"), ("gs://b/x", "GOOGLE_APP"), ("abfs://b/x", "AZURE_STORAGE_ACCOUNT_NAME")],
)
def test_credentials_are_those_of_the_kind_of_bucket(root, names, bucket, monkeypatch):
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "me")
    error = pytest.importorskip("obstore.exceptions").GenericError("HTTP error of http://169.254.169.254/latest")
    assert f"no credentials; set {names}" in str(store_of(Location.of(root))._failure(error, ""))


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
        answers.opener.cache_clear()
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

"""Environment variables of buckets that can't be used: one line, where obstore's own code panics."""

from __future__ import annotations

from pathlib import Path

import pytest
from plans import line

from effloop.data.remote.buckets import store_of
from effloop.data.remote.location import Location
from effloop.errors import ConfigError

pytest.importorskip("obstore")


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "of-no-use")


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


def test_a_profile_is_checked_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config").write_text("[profile mine]\nendpoint_url = 127.0.0.1:9000\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_PROFILE", "mine")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match=r"^endpoint_url of profile mine: .* is not a URL; set it"):
        store_of(Location.of("s3://bucket/x"))

"""Environment variables of buckets, checked: obstore's own code ends with a panic where one can't be used."""

from __future__ import annotations

import os
from urllib.parse import urlsplit

from effloop.data.remote.location import Location, redacted
from effloop.errors import ConfigError

ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
"""Of a server of S3 that isn't Amazon's."""

_AWS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_REGION", "AWS_DEFAULT_REGION")
_AZURE = ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT_KEY")


def check_environment(location: Location) -> None:
    """Refuse values that no server can be asked with.

    Raises:
        ConfigError: an address is no URL, or a value has characters that no key has.
    """
    aws = location.scheme.startswith("s3")
    for name in ENDPOINTS if aws else ():
        check_endpoint(name, os.environ.get(name))
    for name in _AWS if aws else _AZURE:
        check_value(name, os.environ.get(name))


def check_endpoint(name: str, value: str | None) -> None:
    """Refuse an address that is no URL; `name` is what it was said by.

    Raises:
        ConfigError: it is none.
    """
    if value is not None and not _is_url(value):
        raise ConfigError(f"{name}: '{redacted(value)}' is not a URL; set it to http://HOST:PORT or https://HOST")


def check_value(name: str, value: str | None) -> None:
    """Refuse a value, which may be a secret, that a header can't have.

    Raises:
        ConfigError: it has a space, the line end of a file, or a character beyond ASCII.
    """
    if value is not None and not _is_word(value):
        raise ConfigError(f"{name}: it has a space, a line end or another character that no key has; correct it")


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and _is_word(text)
    except ValueError:  # its port is no number, or too large
        return False


def _is_word(text: str) -> bool:
    return text.isascii() and text.isprintable() and " " not in text

"""Buckets of S3, Google and Azure, by obstore."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from effloop.data.remote.location import Location, redacted
from effloop.data.remote.manifest import RemoteFile
from effloop.data.remote.store import MOST_FILES, TIMEOUT_S, ChangedError, FetchError, Store, TooManyError, retried
from effloop.errors import ConfigError, optional_package
from effloop.system.files import describe_failure

T = TypeVar("T")

BUCKETS = ("s3", "s3a", "gs", "az", "azure", "adl", "abfs", "abfss")
EXTRA = "effloop[remote]"
_METADATA = "169.254.169.254"  # queried for credentials where the environment has none
_CREDENTIALS = {
    "s": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (AWS_SKIP_SIGNATURE=true for a public bucket)",
    "g": "GOOGLE_APPLICATION_CREDENTIALS",
    "a": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}
"""First letter of a scheme -> environment variables."""
_CODES = {
    "InvalidAccessKeyId": "correct AWS_ACCESS_KEY_ID",
    "SignatureDoesNotMatch": "correct AWS_SECRET_ACCESS_KEY",
    "ExpiredToken": "correct AWS_SESSION_TOKEN",
    "InvalidToken": "correct AWS_SESSION_TOKEN",
    "NoSuchBucket": "there is no such bucket",
}
"""Error codes of S3 -> what to do."""
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
_AWS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_REGION", "AWS_DEFAULT_REGION")
_AZURE = ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT_KEY")
_PIECE = 1 << 16
PAUSE_S = 0.5
RETRIES = 7
"""How often obstore repeats a failed request, with pauses that double up to 15 s: about a minute."""
FIRST_RETRIES = 3
"""The same for names and sizes: a wrong address shows within seconds."""


class BucketStore(Store):
    """A bucket of an object store. obstore repeats failed requests, and continues an answer that breaks off."""

    def __init__(self, location: Location) -> None:
        super().__init__(location)
        self._obstore = optional_package("obstore", f"data.root: '{location.root}'", EXTRA)
        self._store, self._first = self._opened(RETRIES), self._opened(FIRST_RETRIES)

    def _options(self) -> dict[str, Any]:
        """Arguments of `obstore.store.from_url`, beside `client_options` and `retry_config`."""
        _check_environment(self.location.scheme)
        return _credentials(self.location)

    def _client(self) -> dict[str, Any]:
        """`client_options`: which authorities to trust beside the system's.

        Raises:
            ConfigError: there is no file of authorities.
        """
        bundle = os.environ.get("AWS_CA_BUNDLE") if self.location.scheme.startswith("s3") else None
        try:
            authorities = {"root_certificate": Path(bundle).read_bytes()} if bundle else {}
        except OSError as error:
            line = describe_failure(Path(bundle or ""), error).replace("written", "read")
            raise ConfigError(f"AWS_CA_BUNDLE: {line}; correct it, or unset it") from None
        return authorities

    def _opened(self, retries: int) -> Any:
        location = self.location
        from_url = optional_package("obstore.store", "data.root", EXTRA).from_url
        timeouts = dict.fromkeys(("connect_timeout", "read_timeout"), f"{TIMEOUT_S:g}s") | {"timeout": "1d"}  # of all
        client = {**timeouts, "allow_http": True, "user_agent": "effloop", **self._client()}
        retry = {"max_retries": retries, "backoff": {"init_backoff": timedelta(seconds=PAUSE_S)}}
        options = self._options()
        try:
            return from_url(location.place, client_options=client, retry_config=retry, **options)
        except Exception as error:
            raise ConfigError(f"data.root: '{location.root}' can't be opened: {redacted(str(error))[:300]}") from None

    def ask(self, key: str, call: Callable[[], T], done: str = "") -> T:
        """The result of a call of obstore; `done` is what it does with the file, for messages.

        Raises:
            DataError: it fails.
        """

        def attempt() -> T:
            try:
                return call()
            except self._errors as error:
                raise self._failure(error) from None

        return retried(self.location.url(key), attempt, done or self.done)

    def listed(self, folder: str) -> list[RemoteFile]:
        def listed() -> list[RemoteFile]:
            found: list[RemoteFile] = []
            for batch in self._obstore.list(self._first, prefix=folder.rstrip("/") or None, chunk_size=1000):
                found.extend(map(self._file, batch))
                if len(found) > MOST_FILES:
                    raise TooManyError
            return found

        return self.ask(folder, listed)

    def described(self, key: str) -> RemoteFile:
        return self.ask(key, lambda: self._describe(key))

    def _describe(self, key: str) -> RemoteFile:
        return self._file(self._obstore.head(self._first, key))

    def _file(self, meta: Mapping[str, Any]) -> RemoteFile:
        """A file as obstore describes it."""
        version = meta["e_tag"] or meta["last_modified"].isoformat()
        return RemoteFile(meta["path"], int(meta["size"]), str(version).strip('"'))

    def read(self, file: RemoteFile, start: int, stop: int) -> Iterator[bytes | memoryview]:
        options: dict[str, Any] = {"range": (start, stop)} if file.ranges else {}
        if self._can_match(file):
            options["if_match"] = f'"{file.version}"'
        try:
            answer = self._obstore.get(self._store, file.key, options=options)
            now = self._file(answer.meta)
            if (now.size, now.version) != (file.size, file.version):
                raise ChangedError
            self._check_answer(file, answer)
            for piece in answer.stream(min_chunk_size=_PIECE):
                yield memoryview(piece)
        except self._errors as error:
            raise self._failure(error, whole=not file.ranges) from None

    def _can_match(self, file: RemoteFile) -> bool:
        """Whether `if_match` works: a weak ETag never matches, and a time is none."""
        return bool(file.version) and ":" not in file.version and not file.version.startswith("W/")

    def _check_answer(self, file: RemoteFile, answer: Any) -> None:
        return

    @property
    def _errors(self) -> tuple[type[Exception], ...]:
        return (self._obstore.exceptions.BaseError, OSError, ValueError)

    def _failure(self, error: Exception, *, whole: bool = False) -> FetchError:
        """The failure behind an exception of obstore; `whole`: the server sends no parts."""
        text = str(error)
        shorter = re.search("status code: 416|Wanted range starting at", text)
        if isinstance(error, self._obstore.exceptions.PreconditionError) or shorter:
            return ChangedError()
        if _METADATA in text:
            return FetchError(f"no credentials; set {_CREDENTIALS[self.location.scheme[0]]} in the environment")
        if whole and "RangeNotSupported" in text:
            return FetchError("the answer broke off, and the server sends no parts", again=True)
        return FetchError(_reason(text, self._allowing), again="response body error" in text)

    @property
    def _allowing(self) -> str:
        """What to do about 401 and 403."""
        return f"set {_CREDENTIALS[self.location.scheme[0]]} in the environment to credentials that allow this"


def _reason(text: str, allowing: str) -> str:
    """Condense a message of obstore: the server's answer, or why there was none, and the number of attempts."""
    retries = re.search(r"after (\d+) retries", text)
    attempts = f" ({int(retries[1]) + 1} attempts)" if retries else ""
    if status := re.search(r"status code: (\d{3})([ A-Za-z]*)", text):
        code = re.search(r"<Code>(\w+)</Code>", text)
        fix = _CODES.get(code[1]) if code else None
        fix = fix or (allowing if status[1] in ("401", "403") else None)
        return f"{status[1]}{status[2].rstrip()}{f': {code[1]}' if code else ''}{f'; {fix}' if fix else ''}{attempts}"
    if "TimedOut" in text:
        return f"no answer for {TIMEOUT_S:g} s{attempts}"
    if certificate := re.search(r"InvalidCertificate\(\s*(\w+)", text):
        return f"its certificate is not valid: {certificate[1]}; SSL_CERT_FILE=FILE names authorities to trust"
    if "InvalidContentType" in text:  # the first bytes are no TLS
        return "it doesn't answer by HTTPS, perhaps by http://"
    first, _, debug = text.partition("Debug source:")
    causes = re.findall(r'(?:message|error): "([^"]+)"', debug)  # the last one is the system's
    return (causes[-1] if causes else first.rpartition(" - ")[2].strip()) + attempts


def _credentials(location: Location) -> dict[str, Any]:
    """Keys, profiles, roles and SSO of `~/.aws` by boto3, where the environment has no keys: obstore doesn't read it.

    Raises:
        ConfigError: boto3 is missing, or finds nothing.
    """
    if not location.scheme.startswith("s3") or {"AWS_ACCESS_KEY_ID", "AWS_SKIP_SIGNATURE"} & os.environ.keys():
        return {}
    names = {"AWS_SHARED_CREDENTIALS_FILE": "credentials", "AWS_CONFIG_FILE": "config"}
    files = [Path(os.environ.get(key) or Path.home() / ".aws" / name) for key, name in names.items()]
    if not any(map(Path.is_file, files)):
        return {}
    part = f"data.root: '{location.root}' with the credentials of {files[0].parent}"
    optional_package("boto3", part, "boto3")
    try:
        return {"credential_provider": optional_package("obstore.auth.boto3", part, EXTRA).Boto3CredentialProvider()}
    except Exception as error:  # botocore's: a profile that isn't there, an SSO session that has ended
        raise ConfigError(f"{part}: {redacted(str(error))[:300]}; correct it, or set AWS_ACCESS_KEY_ID") from None


def _check_environment(scheme: str) -> None:
    """Refuse values that obstore's own code panics with.

    Raises:
        ConfigError: an address is no URL, or a value, which may be a secret, has characters that a header can't have.
    """
    aws = scheme.startswith("s3")
    for name in _ENDPOINTS if aws else ():
        if (value := os.environ.get(name)) is not None and not _is_url(value):
            raise ConfigError(f"{name}: '{redacted(value)}' is not a URL; set it to http://HOST:PORT or https://HOST")
    for name in _AWS if aws else _AZURE:
        if not _is_word(os.environ.get(name, "")):
            raise ConfigError(f"{name}: it has a space, a line end or another character that no key has; correct it")


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and _is_word(text)
    except ValueError:  # its port is no number, or too large
        return False


def _is_word(text: str) -> bool:
    return text.isascii() and text.isprintable() and " " not in text

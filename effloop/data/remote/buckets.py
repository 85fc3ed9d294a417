"""Buckets of S3, Google and Azure by obstore; and which store reads which scheme."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from effloop.data.remote.aws import aws_options
from effloop.data.remote.environment import check_environment
from effloop.data.remote.filesystems import SFTP, FsspecStore
from effloop.data.remote.http import HttpStore
from effloop.data.remote.location import Location, redacted
from effloop.data.remote.manifest import Manifest, RemoteFile, manifest_of
from effloop.data.remote.sftp import SftpStore
from effloop.data.remote.store import (
    MOST_FILES,
    NO_TLS,
    TIMEOUT_S,
    ChangedError,
    FetchError,
    Store,
    TooManyError,
    retried,
)
from effloop.data.remote.throttle import Throttle
from effloop.errors import ConfigError, optional_package
from effloop.system.files import describe_failure

_BUCKETS = ("s3", "s3a", "gs", "az", "azure", "adl", "abfs", "abfss")
_BY_FSSPEC = (
    *("box", "bos", "cos", "dbfs", "dropbox", "ftp", "gdrive", "github", "hdfs", "hf", "lakefs", "obs", "oci", "oss"),
    *("sftp", "smb", "ssh", "tos", "webdav", "webhdfs"),
)
"""Schemes of fsspec that are places; others wrap files in files, run templates or write caches of their own."""
_METADATA = "169.254.169.254"
_CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (AWS_SKIP_SIGNATURE=true for a public bucket)",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}
"""Environment variables of a kind of bucket."""
_WRONG = {
    **{"InvalidAccessKeyId": "AWS_ACCESS_KEY_ID", "SignatureDoesNotMatch": "AWS_SECRET_ACCESS_KEY"},
    **{"ExpiredToken": "AWS_SESSION_TOKEN", "InvalidToken": "AWS_SESSION_TOKEN"},
}
"""What S3 says of credentials -> which of them to correct."""
_EXTRA = "effloop[remote]"
_PIECE = 1 << 16  # what has come is kept when the rest does not
_FIRST_ATTEMPTS = 4


def store_of(location: Location) -> Store:
    """What reads a location.

    Raises:
        ConfigError: a package is missing, or nothing reads such a URL.
    """
    if location.is_http:
        return HttpStore(location)
    if location.scheme in _BUCKETS:
        return BucketStore(location)
    if location.scheme not in _BY_FSSPEC:
        known = ", ".join(("s3", "gs", "az", "https", *_BUCKETS[4:], *_BY_FSSPEC))
        raise ConfigError(f"data.root: '{location.root}' is of no scheme that EffLoop reads; have {known}")
    return SftpStore(location) if location.scheme in SFTP else FsspecStore(location)


class BucketStore(Store):
    """A bucket of an object store."""

    def __init__(self, location: Location) -> None:
        super().__init__(location)
        self._obstore = optional_package("obstore", f"data.root: '{location.root}'", _EXTRA)
        check_environment(location)
        self._store = self._opened({"max_retries": 0})
        self._throttle = Throttle(self._signed)

    def _opened(self, retries: Mapping[str, Any], client: Mapping[str, str] | None = None, **more: Any) -> Any:
        """A client that tries failed requests again, as `RetryConfig` of obstore has it; with other options."""
        location = self.location
        from_url = optional_package("obstore.store", "data.root", _EXTRA).from_url
        client_options = {**_client_options(location), "allow_http": True, **(client or {})}
        options = {**aws_options(location), "client_options": client_options, **more}
        try:
            return from_url(location.place, **options, retry_config=retries)
        except Exception as error:
            raise ConfigError(f"data.root: '{location.root}' can't be opened: {redacted(str(error))[:300]}") from None

    def manifest(self) -> Manifest:
        location = self.location
        if location.has_patterns:
            listed = self._listed(location.base)
            found = [file for file in listed if location.matches(file.key)]
            return manifest_of(location, found, alone=False, base=location.base, listed=listed)
        folder = location.path.rstrip("/") + "/" if location.path else ""
        found = self._listed(folder)
        if found or not location.path or location.path.endswith("/"):
            return manifest_of(location, found, alone=False, base=folder)
        return manifest_of(location, [self._head(location.path)], alone=True, base=location.base)

    def _listed(self, folder: str) -> list[RemoteFile]:
        def listed() -> list[RemoteFile]:
            found: list[RemoteFile] = []
            try:
                for batch in self._obstore.list(self._store, prefix=folder.rstrip("/") or None, chunk_size=1000):
                    found.extend(map(bucket_file, batch))
                    if len(found) > MOST_FILES:
                        raise TooManyError
            except self._errors as error:
                raise self._failure(error, "") from None
            return found

        return retried(self.location.url(folder), listed, _FIRST_ATTEMPTS, done=self.done)

    def _head(self, key: str) -> RemoteFile:
        def head() -> RemoteFile:
            try:
                return bucket_file(self._obstore.head(self._store, key))
            except self._errors as error:
                raise self._failure(error, key) from None

        return retried(self.location.url(key), head, _FIRST_ATTEMPTS, done=self.done)

    def read(self, file: RemoteFile, start: int, stop: int) -> Iterator[bytes | memoryview]:
        options: dict[str, Any] = {"range": (start, stop)}
        if file.version and ":" not in file.version and not file.version.startswith("W/"):  # a time is no ETag
            options["if_match"] = f'"{file.version}"'
        try:
            answer = self._obstore.get(self._store, file.key, options=options)
            now = bucket_file(answer.meta)
            if (now.size, now.version) != (file.size, file.version):
                raise ChangedError
            for piece in answer.stream(min_chunk_size=_PIECE):
                yield memoryview(piece)
        except self._errors as error:
            raise self._failure(error, file.key) from None

    @property
    def _errors(self) -> tuple[type[Exception], ...]:
        return (self._obstore.exceptions.BaseError, OSError, ValueError)

    def _signed(self, key: str) -> str:
        """A URL that is valid for a minute.

        Raises:
            OSError: it can't be signed.
        """
        try:
            return str(self._obstore.sign(self._store, "GET", key, timedelta(minutes=1)))
        except self._errors:
            raise OSError from None

    def _failure(self, error: Exception, key: str) -> FetchError:
        """An attempt that got no answer, or another one; `key` is of the file, if it is one."""
        errors = self._obstore.exceptions
        if isinstance(error, errors.PreconditionError):
            return ChangedError()
        scheme = self.location.scheme
        names = _CREDENTIALS["az" if scheme[0] == "a" else scheme[:2]]  # azure, adl, abfs; s3a
        allowing = f"set {names} in the environment to credentials that allow this"
        if _METADATA in str(error):  # which is asked where the environment has no credentials
            return FetchError(f"no credentials; set {names} in the environment")
        told = {
            errors.NotFoundError: "it is not there",
            FileNotFoundError: "it is not there",
            errors.PermissionDeniedError: f"403 Forbidden; {allowing}",
            errors.UnauthenticatedError: f"401 Unauthorized; {allowing}",
        }
        for kind, reason in told.items():
            if isinstance(error, kind):
                return FetchError(reason, final=True)
        final = isinstance(error, errors.InvalidPathError | errors.NotSupportedError | ValueError)
        return _told(str(error), final=final, after_s=self._throttle.pause_s(str(error), key))


def _told(text: str, *, final: bool, after_s: float | None) -> FetchError:
    """What obstore says of an answer, or of none, in fewer words."""
    status, code = re.search(r"status code: (\d{3}[ A-Za-z]*)", text), re.search(r"<Code>(\w+)</Code>", text)
    if status is None:
        return _unanswered(text, final=final)
    refused = status[1][0] == "4" and status[1][:3] not in ("408", "425", "429")
    reason = status[1].strip() + (f": {code[1]}" if code else "")
    if code and code[1] in _WRONG:
        reason += f"; correct {_WRONG[code[1]]}"
    return FetchError(reason, final=final or refused, after_s=after_s, answered=True)


def _unanswered(text: str, *, final: bool) -> FetchError:
    """Why there was no answer: the last that obstore tells is what the system has said."""
    if "TimedOut" in text:
        return FetchError(f"no answer for {TIMEOUT_S:g} s")
    if certificate := re.search(r"InvalidCertificate\(\s*(\w+)", text):
        reason = f"its certificate is not valid: {certificate[1]}; SSL_CERT_FILE=FILE names authorities to trust"
        return FetchError(reason, final=True)
    if "InvalidContentType" in text:  # the first bytes are no TLS
        return FetchError(NO_TLS, final=True)
    first, _, debug = text.partition("Debug source:")
    causes = re.findall(r'(?:message|error): "([^"]+)"', debug)
    reason = causes[-1] if causes else first.rpartition(" - ")[2].strip()
    return FetchError(reason, final=final or "Name or service not known" in reason)


def _client_options(location: Location) -> dict[str, Any]:
    """How long obstore waits, and what AWS's own programs trust beside the system's authorities.

    Raises:
        ConfigError: there is no such file.
    """
    timeouts = {"connect_timeout": f"{TIMEOUT_S:g}s", "read_timeout": f"{TIMEOUT_S:g}s", "timeout": "300s"}  # of all
    if not location.scheme.startswith("s3") or not (bundle := os.environ.get("AWS_CA_BUNDLE")):
        return timeouts
    try:
        return {**timeouts, "root_certificate": Path(bundle).read_bytes()}
    except OSError as error:
        raise ConfigError(f"AWS_CA_BUNDLE: {describe_failure(Path(bundle), error)}; correct it, or unset it") from None


def bucket_file(meta: Mapping[str, Any]) -> RemoteFile:
    """A file as obstore describes it."""
    version = meta.get("e_tag") or meta["last_modified"].isoformat()
    return RemoteFile(meta["path"], int(meta["size"]), str(version).strip('"'))

"""What lists and reads the files behind a URL: obstore for buckets and web servers, fsspec for other schemes."""

from __future__ import annotations

import email.utils
import json
import os
import random
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from effloop.data.remote.location import MOST_FILES, Location, Manifest, RemoteFile, manifest_of, redacted
from effloop.errors import ConfigError, DataError, optional_package

T = TypeVar("T")
R = TypeVar("R")

EXTRA = "effloop[remote]"
BUCKETS = ("s3", "s3a", "gs", "az", "azure", "adl", "abfs", "abfss")
BY_FSSPEC = (
    *("box", "bos", "cos", "dbfs", "dropbox", "gdrive", "github", "hdfs", "hf", "lakefs", "obs", "oci", "oss"),
    *("smb", "tos", "webdav", "webhdfs"),
)
"""Schemes of fsspec for remote files. Others read this machine, wrap files in files, keep caches of their own, are one
connection that threads can't share (ftp), or take any host's key (sftp)."""
AUTHORIZATION = "EFFLOOP_HTTP_AUTHORIZATION"
"""Environment variable with the header `Authorization`, which other hosts don't get."""
TIMEOUT_S = 30.0  # for a connection, and for the next bytes of an answer
ATTEMPTS = 4  # at what the libraries don't repeat themselves
FIRST_PAUSE_S = 1.0
PAUSE_S = 0.5
RETRIES = 7  # how often obstore repeats a failed request, with pauses that double up to 15 s: about a minute
FIRST_RETRIES = 3  # the same for names and sizes: a wrong address shows within seconds
_LONGEST_REASON = 300
_PIECE = 1 << 16
_CHECKED = 1 << 20  # bytes; a smaller file of a web server is sent at once
_ADDRESS = re.compile(r"https?://(\[[\da-fA-F:.]+\]|[^/:\s@\[]+)(:\d{1,5})?(/\S*)?")
_METADATA = "169.254.169.254"  # queried for credentials where the environment has none
_CREDENTIALS = {  # first letter of a scheme -> environment variables
    "s": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (AWS_SKIP_SIGNATURE=true for a public bucket)",
    "g": "GOOGLE_APPLICATION_CREDENTIALS",
    "a": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}
_AUTHORIZE = f"set {AUTHORIZATION} in the environment, e.g. to 'Bearer …'"
_PACKED = (".gz", ".tgz", ".bz2", ".xz", ".zst", ".br", ".Z")  # some servers call such files compressed answers
_VERSIONS = (  # keys by which file systems of fsspec describe the content of a file
    *("ETag", "etag", "md5Hash", "md5", "checksum", "blob_id", "sha256", "sha"),
    *("LastModified", "last_modified", "mtime", "modified", "modificationTime", "modify"),
)
_FINAL = (FileNotFoundError, PermissionError, NotImplementedError, ImportError)
"""Exceptions of fsspec after which another attempt is of no use."""


class FetchError(Exception):
    """A request that failed, and why; `again`: another attempt may succeed."""

    def __init__(self, reason: str, *, again: bool = False) -> None:
        super().__init__(redacted(reason)[:_LONGEST_REASON])
        self.again = again


class ChangedError(FetchError):
    """A file isn't the one that was listed."""

    def __init__(self) -> None:
        super().__init__("it has changed since it was listed; start again, which lists it anew")


def retried(url: str, call: Callable[[], T]) -> T:
    """The result of the first of `ATTEMPTS` calls that succeeds; raises DataError if none does."""
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return call()
        except FetchError as error:
            line = f"{redacted(url)} can't be fetched: {error}"
            if not error.again:
                raise DataError(line) from None
            if attempt == ATTEMPTS:
                raise DataError(f"{line} ({ATTEMPTS} attempts); start again: what was fetched is kept") from None
            time.sleep(FIRST_PAUSE_S * 2 ** (attempt - 1) * random.uniform(0.5, 1))
    raise AssertionError


def in_threads(call: Callable[[T], R], items: Iterable[T], at_once: int) -> list[R]:
    """The result for each item. The first call that fails ends it: calls that are under way aren't waited for."""
    pool = ThreadPoolExecutor(at_once)
    try:
        futures = [pool.submit(call, item) for item in items]
        for each in wait(futures, return_when=FIRST_EXCEPTION).done:
            each.result()
        return [each.result() for each in futures]
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


class Store(ABC):
    """A store with files. Reading is thread-safe; a store doesn't survive a fork."""

    at_once = 16  # requests at the same time

    def __init__(self, location: Location) -> None:
        self.location = location

    def manifest(self) -> Manifest:
        """The files that the location names.

        Raises:
            ConfigError: a package is missing, or the server can't list files.
            DataError: they can't be listed, or there are none.
        """
        location, path = self.location, self.location.path
        if location.has_patterns:
            found = [file for file in self._checked(location.base) if location.matches(file.key)]
            return manifest_of(location, found, alone=False, base=location.base)
        folder = path.rstrip("/") + "/" if path else ""
        found = self._checked(folder)
        if found or folder == path:
            return manifest_of(location, found, alone=False, base=folder)
        return manifest_of(location, [self.described(path)], alone=True, base=location.base)

    def _checked(self, folder: str) -> list[RemoteFile]:
        found = self.asked(folder, lambda: self._listed(folder))
        self.location.check_number(found)  # patterns need all of it
        return found

    def described(self, key: str) -> RemoteFile:
        """A single file; raises DataError if it isn't there, or can't be described."""
        return self.asked(key, lambda: self._described(key))

    def asked(self, key: str, call: Callable[[], T]) -> T:
        """The result of a call of the store's library about a file or folder; raises DataError if it fails."""

        def attempt() -> T:
            try:
                return call()
            except FetchError:
                raise
            except self._errors as error:
                raise self._failure(error) from None

        return retried(self.location.url(key), attempt)

    @abstractmethod
    def read(self, file: RemoteFile, start: int, stop: int) -> Iterator[bytes | memoryview]:
        """Yield the bytes from `start` to `stop`, piece by piece; raises FetchError."""

    def check(self, file: RemoteFile) -> None:  # noqa: B027  buckets compare each part
        """Compare a file, once all of it was read, with what was listed; raises ChangedError."""

    @abstractmethod
    def _listed(self, folder: str) -> list[RemoteFile]:
        """All files below a folder, which ends with `/` or is empty; none where there is no such folder."""

    @abstractmethod
    def _described(self, key: str) -> RemoteFile: ...

    _errors: tuple[type[Exception], ...] = ()  # exceptions of the library

    @abstractmethod
    def _failure(self, error: Exception, *, whole: bool = False) -> FetchError:
        """The failure behind an exception of the library; `whole`: the server sends no parts."""


class BucketStore(Store):
    """A bucket of S3, Google or Azure. obstore repeats failed requests, and continues an answer that breaks off."""

    def __init__(self, location: Location) -> None:
        super().__init__(location)
        self._obstore = optional_package("obstore", f"data.root: '{location.root}'", EXTRA)
        self._errors = (self._obstore.exceptions.BaseError, OSError, ValueError)
        options = self._options()
        self._store, self._first = self._opened(RETRIES, options), self._opened(FIRST_RETRIES, options)

    def _options(self) -> dict[str, Any]:
        """Arguments of `obstore.store.from_url`, beside `retry_config`."""
        _check_environment(self.location.scheme)
        return _credentials(self.location)

    def _opened(self, retries: int, options: Mapping[str, Any]) -> Any:
        location = self.location
        from_url = optional_package("obstore.store", "data.root", EXTRA).from_url
        timeouts = dict.fromkeys(("connect_timeout", "read_timeout"), f"{TIMEOUT_S:g}s") | {"timeout": "1d"}  # of all
        client = {**timeouts, "allow_http": True, "user_agent": "effloop", **options.get("client_options", {})}
        retry = {"max_retries": retries, "backoff": {"init_backoff": timedelta(seconds=PAUSE_S)}}
        try:
            return from_url(location.place, **{**options, "client_options": client, "retry_config": retry})
        except Exception as error:
            raise ConfigError(f"data.root: '{location.root}' can't be opened: {redacted(str(error))[:300]}") from None

    def _listed(self, folder: str) -> list[RemoteFile]:
        found: list[RemoteFile] = []
        for batch in self._obstore.list(self._first, prefix=folder.rstrip("/") or None, chunk_size=1000):
            found.extend(map(self._file, batch))
            if len(found) > MOST_FILES:
                break
        return found

    def _described(self, key: str) -> RemoteFile:
        return self._file(self._obstore.head(self._first, key))

    def _file(self, meta: Mapping[str, Any]) -> RemoteFile:
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
            packed = answer.attributes.get("Content-Encoding")
            if packed and self.location.is_http and not file.key.endswith(_PACKED):
                raise FetchError(f"the server sends it compressed ({packed}), which was not requested")
            for piece in answer.stream(min_chunk_size=_PIECE):
                yield memoryview(piece)
        except self._errors as error:
            raise self._failure(error, whole=not file.ranges) from None

    def _can_match(self, file: RemoteFile) -> bool:
        """Whether `if_match` works: a weak ETag never matches, and a time is none."""
        return bool(file.version) and ":" not in file.version and not file.version.startswith("W/")

    def _failure(self, error: Exception, *, whole: bool = False) -> FetchError:
        text = str(error)
        shorter = re.search("status code: 416|Wanted range starting at", text)
        if isinstance(error, self._obstore.exceptions.PreconditionError) or shorter:
            return ChangedError()
        if _METADATA in text:
            return FetchError(f"no credentials; set {_CREDENTIALS[self.location.scheme[0]]} in the environment")
        if whole and "RangeNotSupported" in text:
            return FetchError("the answer broke off, and the server sends no parts", again=True)
        return FetchError(describe_answer(text, self._allowing), again="response body error" in text)

    @property
    def _allowing(self) -> str:
        """What to do about 401 and 403."""
        return f"set {_CREDENTIALS[self.location.scheme[0]]} in the environment to credentials that allow this"


def describe_answer(text: str, allowing: str) -> str:
    """Condense a message of obstore: the server's answer, or why there was none, and the number of attempts."""
    retries = re.search(r"after (\d+) retries", text)
    attempts = f" ({int(retries[1]) + 1} attempts)" if retries else ""
    if status := re.search(r"status code: (\d{3})([ A-Za-z]*)", text):
        code = re.search(r"<Code>(\w+)</Code>", text)
        fix = allowing if status[1] in ("401", "403") else ""
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
    """Keys, profiles, roles and SSO of `~/.aws` by boto3, where the environment has no keys."""
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
    """Refuse values that obstore's own code panics with, as an address without http://, or a key with a line end."""
    for name, value in os.environ.items():
        if not name.startswith("AWS_" if scheme.startswith("s3") else "AZURE_"):
            continue
        if name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT") and not _ADDRESS.fullmatch(value):
            raise ConfigError(f"{name}: '{redacted(value)}' is not a URL; set it to http://HOST:PORT or https://HOST")
        if re.search("KEY|TOKEN|REGION|ACCOUNT", name) and re.search("[^!-~]", value):
            raise ConfigError(f"{name}: it has a space, a line end or another character that no key has; correct it")


class HttpStore(BucketStore):
    """A web server, whose files are named one by one: in the URL, or in a JSON file."""

    def _options(self) -> dict[str, Any]:
        value = os.environ.get(AUTHORIZATION, "").strip()
        if not (value.isascii() and value.isprintable()):
            raise ConfigError(f"{AUTHORIZATION} has characters that a header can't have; correct it")
        return {"client_options": {"default_headers": {"Authorization": value}} if value else {}}

    def manifest(self) -> Manifest:
        location = self.location
        key = location.key(location.path)
        if location.wildcards or not key or key.endswith("/"):
            raise ConfigError(
                f"data.root: '{location.root}' needs a listing, and web servers have none in common; set data.root "
                f"to names as {location.place}/…/train-{{000..127}}.tar, or to a JSON file with a list of names there"
            )
        alone = not location.has_patterns
        names = self._indexed(key) if alone and key.endswith(".json") else [*location.names]
        location.check_number(names)  # before each is asked for
        files = in_threads(self.described, names, self.at_once)
        return manifest_of(location, files, alone=alone and names == [key], base=location.base)

    def _indexed(self, key: str) -> list[str]:
        """The files that a JSON file lists."""
        data = self.asked(key, lambda: bytes(self._obstore.get(self._first, key).bytes()))
        try:
            return list(dict.fromkeys(self.location.base + name for name in names_in(json.loads(data))))
        except (ValueError, RecursionError):
            raise DataError(
                f"{self.location.url(key)} is no list of file names in JSON; set data.root to a file or names"
            ) from None

    def _described(self, key: str) -> RemoteFile:
        """Size and version of a file by its first byte: some servers answer HEAD otherwise."""
        try:
            answer, ranges = self._obstore.get(self._first, key, options={"range": (0, 1)}), True
        except self._errors as error:
            # A server without ranges; an empty file, which has no first byte; or a size that only a whole answer has.
            if not re.search(r"RangeNotSupported|status code: 416|ParseContentRange", str(error)):
                raise
            answer, ranges = self._obstore.get(self._first, key), False
        if answer.attributes.get("Content-Type", "").startswith("text/html") and not key.endswith((".html", ".htm")):
            raise FetchError(f"it leads to a web page, as of a folder, or of a login ({_AUTHORIZE})")
        if ranges:
            answer.bytes()  # the connection is kept if nothing is left to read
        file = self._file(answer.meta)
        return RemoteFile(key, file.size, file.version, ranges)

    def _file(self, meta: Mapping[str, Any]) -> RemoteFile:
        time = meta["last_modified"]  # 1970 where the server doesn't tell it
        modified = email.utils.format_datetime(time, usegmt=True) if time.timestamp() else ""
        version = (meta["e_tag"] or modified).removeprefix("W/").strip('"')
        return RemoteFile(meta["path"], int(meta["size"]), version)

    def _can_match(self, file: RemoteFile) -> bool:
        return False  # an ETag here may have been a weak one

    def check(self, file: RemoteFile) -> None:
        # A file that is overwritten while it is sent has the old header.
        if file.size > _CHECKED:
            now = self.described(file.key)
            if (now.size, now.version) != (file.size, file.version):
                raise ChangedError

    @property
    def _allowing(self) -> str:
        return _AUTHORIZE


def names_in(listed: Any) -> list[str]:
    """The names in a JSON file: a list of names, or WebDataset's `shardlist`; raises ValueError for other content."""
    rows = listed.get("shardlist", listed.get("files")) if isinstance(listed, dict) else listed
    if not isinstance(rows, list) or not rows:
        raise ValueError
    names = []
    for row in rows:
        name = row.get("name", row.get("url")) if isinstance(row, dict) else row
        if not isinstance(name, str) or re.search("^$|^/|://|(^|/)[.][.](/|$)|[\ud800-\udfff]", name):
            raise ValueError
        names.append(name.removeprefix("./"))
    return names


class FsspecStore(Store):
    """A file system of fsspec."""

    _errors = (Exception,)  # each file system has its own

    def __init__(self, location: Location) -> None:
        super().__init__(location)
        core = optional_package("fsspec.core", f"data.root: '{location.root}'", EXTRA)
        try:
            self._system: Any = core.url_to_fs(location.place, skip_instance_cache=True)[0]
        except Exception as error:
            raise ConfigError(f"data.root: '{location.root}': {redacted(str(error))[:300]}") from None
        self._root = self._path("").rstrip("/")

    def _path(self, key: str) -> str:
        return str(self._system._strip_protocol(self.location.url(key)))

    def _failure(self, error: Exception, *, whole: bool = False) -> FetchError:
        return FetchError(f"{type(error).__name__}: {error}", again=not isinstance(error, _FINAL))

    def _listed(self, folder: str) -> list[RemoteFile]:
        path = self._path(folder).rstrip("/")
        if self._system.isfile(path):
            return []
        found: list[RemoteFile] = []
        pending = [path]
        while pending and len(found) <= MOST_FILES:  # `find` and `walk` leave out folders that can't be listed
            folder = pending.pop()
            for row in self._system.ls(folder, detail=True):
                name = row["name"].rstrip("/")
                if row.get("type") != "directory":
                    found.append(self._file(name, row))
                elif name != folder:
                    pending.append(name)
        return found

    def _described(self, key: str) -> RemoteFile:
        return self._file(self._path(key), self._system.info(self._path(key)))

    def _file(self, name: str, row: Mapping[str, Any]) -> RemoteFile:
        version = next((str(row[each]) for each in _VERSIONS if row.get(each) is not None), "")
        if row.get("size") is None:
            raise FetchError("it has no known size; set data.root to another URL")
        return RemoteFile(name.removeprefix(self._root).lstrip("/"), int(row["size"]), version.strip('"'))

    def read(self, file: RemoteFile, start: int, stop: int) -> Iterator[bytes | memoryview]:
        try:
            yield self._system.cat_file(self._path(file.key), start=start, end=stop)
        except Exception as error:
            raise self._failure(error) from None

    def check(self, file: RemoteFile) -> None:
        self._system.invalidate_cache()
        folder = file.key.rpartition("/")[0]
        # Some describe a file in its folder otherwise than by itself.
        if file != self.described(file.key) and file not in self.asked(folder, lambda: self._listed(folder)):
            raise ChangedError


def store_of(location: Location) -> Store:
    """The store that reads a location; raises ConfigError if a package is missing, or nothing reads such a URL."""
    if location.is_http:
        return HttpStore(location)
    if location.scheme in BUCKETS:
        return BucketStore(location)
    if location.scheme in BY_FSSPEC:
        return FsspecStore(location)
    known = ", ".join(("s3", "gs", "az", "https", *BUCKETS[4:], *BY_FSSPEC))
    raise ConfigError(f"data.root: '{location.root}' is of no scheme that EffLoop reads; have {known}")

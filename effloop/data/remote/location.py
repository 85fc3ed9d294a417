"""URLs: what a remote `data.root` names, a bucket or host, a path in it, patterns of files, and the files."""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import islice, takewhile
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote, unquote

from effloop.errors import ConfigError, DataError, optional_package, printable
from effloop.system.files import write_text

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://([^/]*)/?(.*)", re.DOTALL)
_ONE_SLASH = re.compile(r"(s3|gs|az|hf|https?|s?ftp|hdfs|oss):/?([^/].*)", re.IGNORECASE | re.DOTALL)
_INNERMOST = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d{1,18})\.\.(\d{1,18})")
_GLOB = re.compile(r"[*?\[]")
_QUERY = re.compile(r"\?[A-Za-z][\w.-]*=")
_SECRET = re.compile(r"KEY|SECRET|TOKEN|PASSWORD|CREDENTIAL|AUTHORIZATION")
_NO_TEXT = re.compile("[\ud800-\udfff]")
_HTTP = ("http", "https")
_PLAIN = "/:[]!$&'()*+,;=@~"  # characters that stay as they are in the path of a URL; `%` in a name doesn't


@dataclass
class ThisProcess:
    """Facts about the process that needs data."""

    started_at: float  # Unix time; listings that other processes made later are reused
    progressed: Callable[[], None]  # called several times a second while it, or one it waits for, lists or fetches
    run: str = ""  # of several ranks, which count what one of them fetched; empty for a run of one process


this_process = ThisProcess(time.time(), lambda: None)


def is_remote(root: str | None) -> bool:
    """Whether a value of `data.root` is a URL; `file://` is this machine's."""
    found = _URL.match(root or "")
    return found is not None and found[1].lower() != "file"


def meant_url(root: str) -> str:
    """The URL that `s3:/bucket/x`, with a slash too few, stands for; empty for another text."""
    found = _ONE_SLASH.fullmatch(root)
    return f"{found[1]}://{found[2]}" if found else ""


def local_name(root: str) -> str:
    """A name for a local copy: the URL's last folder or file without patterns."""
    parts = [part for part in root.partition("://")[2].split("/") if part and not re.search(r"[*?\[{]", part)]
    return re.sub(r"[^\w.-]", "-", unquote(parts[-1]) if parts else "").strip("-.") or "data"


def check_root(root: str, key: str = "root") -> None:
    """Refuse a URL with credentials, which the run folder would keep; `data.KEY` is the key in messages.

    Raises:
        ConfigError: it has a user, a password or a query.
    """
    if not is_remote(root):
        return
    scheme, host, path = _parts(root)
    http = scheme in _HTTP
    if "@" in host and (http or ":" in host.partition("@")[0]):
        instead = "EFFLOOP_HTTP_AUTHORIZATION, e.g. to 'Bearer …'" if http else "AWS_ACCESS_KEY_ID and the like"
        raise ConfigError(
            f"data.{key}: '{redacted(root)}' has a user or a password, which would be kept with the run; leave it out, "
            f"and set the environment variable {instead}"
        )
    if ("?" in path or "#" in path) if http else _QUERY.search(path):
        raise ConfigError(
            f"data.{key}: '{redacted(root)}' has a query, as signed URLs have, which would be kept with the run; leave "
            "it out, and read a bucket as s3://, gs:// or az:// with credentials in the environment"
        )


def redacted(text: str) -> str:
    """A text on one line without secrets: passwords and queries of URLs, values of the environment."""
    text = re.sub(r"//[^/\s@'\"]*@", "//***@", " ".join(text.split()))
    text = re.sub(r"(://[^\s?'\"]*)\?[^\s'\")]*", r"\1?***", text)
    for name, value in os.environ.items():
        if _SECRET.search(name.upper()):
            words = value.split()
            for secret in (" ".join(words), *words[-1:]):  # of `Bearer …` the token, too
                text = text.replace(secret, "***") if len(secret) >= 6 else text
    return printable(text)


@dataclass(frozen=True)
class Location:
    """A remote `data.root`."""

    root: str  # as typed
    scheme: str
    host: str  # the bucket, or host and port
    path: str  # the rest, with its patterns, as typed: `%20` is a space in the name of a web server's file

    @classmethod
    def of(cls, root: str) -> Location:
        """Parse a URL.

        Raises:
            ConfigError: it names no host or bucket, holds credentials, or isn't UTF-8.
        """
        check_root(root)
        scheme, host, path = _parts(root)
        if _NO_TEXT.search(root):
            raise ConfigError(f"data.root: '{redacted(root)}' isn't UTF-8; set data.root to a URL in UTF-8")
        if not host and (scheme in _HTTP or not path):
            raise ConfigError(f"data.root: '{redacted(root)}' names no host or bucket; set data.root=s3://BUCKET/PATH")
        return cls(root, scheme, host, re.sub("/{2,}", "/", path))

    @property
    def is_http(self) -> bool:
        """Whether it is on a web server."""
        return self.scheme in _HTTP

    @property
    def place(self) -> str:
        """The URL of the bucket or host."""
        return f"{self.scheme}://{self.host}"

    def url(self, key: str) -> str:
        """The URL of a file."""
        return f"{self.place}/{quote(key, safe=_PLAIN) if self.is_http else key}"

    def key(self, text: str) -> str:
        """The name of a file as the store has it, from its text in the URL."""
        return unquote(text) if self.is_http else text

    def check_number(self, files: Sequence[Any]) -> None:
        """Refuse more than `MOST_FILES`, where a listing ends."""
        if len(files) > MOST_FILES:
            line = f"has more than {MOST_FILES:,} files; pack them into shards, or name a smaller folder"
            raise DataError(f"data.root: '{self.root}' {line}")

    @cached_property
    def _paths(self) -> list[str]:
        """The paths after braces are expanded, as typed."""
        found = list(dict.fromkeys(islice(_expanded(self.path), MOST_FILES + 1)))
        if len(found) > MOST_FILES:
            raise ConfigError(f"data.root: '{self.root}' names more than {MOST_FILES:,} files; name a folder instead")
        return found

    @cached_property
    def names(self) -> dict[str, None]:
        """The paths without wildcards, as the store has them.

        Raises:
            ConfigError: the root names too many files.
        """
        return dict.fromkeys(self.key(path) for path in self._paths if not _GLOB.search(path))

    @cached_property
    def wildcards(self) -> list[str]:
        """The paths with wildcards: a listing is needed to know the files' names."""
        return [path for path in self._paths if _GLOB.search(path)]

    @property
    def has_patterns(self) -> bool:
        """Whether the path has wildcards or braces; otherwise it is one file or folder."""
        return bool(self.wildcards) or self._paths != [self.path]

    @property
    def base(self) -> str:
        """The folder that all paths share, as `a/b/`, or empty."""
        folders = [_GLOB.split(name)[0].split("/")[:-1] for name in self._paths]
        shared = takewhile(lambda level: len({*level}) == 1, zip(*folders, strict=False))
        return self.key("".join(f"{name}/" for name, *_ in shared))

    def matches(self, key: str) -> bool:
        """Whether the patterns name a file."""
        return key in self.names or any(pattern.fullmatch(key) for pattern in self._patterns)

    @cached_property
    def _patterns(self) -> list[re.Pattern[str]]:
        utils = optional_package("fsspec.utils", f"data.root: '{self.root}'", "effloop[remote]")
        try:
            return [re.compile(utils.glob_translate(path)) for path in self.wildcards]
        except (re.error, ValueError) as error:
            raise ConfigError(f"data.root: '{self.root}' has a wrong pattern: {error}; correct it") from None


def _parts(root: str) -> tuple[str, str, str]:
    found = _URL.match(root)
    assert found is not None
    return found[1].lower(), found[2], found[3]


def _expanded(path: str) -> Iterator[str]:
    """Expand `{a,b}` and `{000..127}` as a shell does; other braces stay."""
    found = next((each for each in _INNERMOST.finditer(path) if "," in each[1] or _RANGE.fullmatch(each[1])), None)
    if found is None:
        yield path
        return
    choices: Iterable[str] = found[1].split(",")
    if ends := _RANGE.fullmatch(found[1]):
        first, last = map(int, ends.groups())
        width = max(map(len, ends.groups())) if any(re.match(r"0\d", end) for end in ends.groups()) else 0
        step = 1 if first <= last else -1
        choices = (f"{number:0{width}d}" for number in range(first, last + step, step))
    for each in choices:
        yield from _expanded(path[: found.start()] + each + path[found.end() :])


_LONGEST_NAME = 60
MOST_FILES = 100_000  # in a dataset behind a URL


@dataclass(frozen=True)
class RemoteFile:
    """A file in a store."""

    key: str  # its whole path there
    size: int
    version: str  # of its content: the ETag, or else the time of its last change; empty if neither is known
    ranges: bool = True  # whether a part of it can be read

    def identity(self, place: str) -> str:
        """A name for its content at a place."""
        return hashlib.sha256(f"{place}/{self.key}\0{self.size}\0{self.version}".encode()).hexdigest()


@dataclass(frozen=True)
class Manifest:
    """The files that a `data.root` names, as they were when a run began."""

    root: str  # as typed
    place: str  # the URL of the bucket or host
    base: str  # what the keys begin with, which local names leave out
    alone: bool  # whether the root is one file
    files: Sequence[RemoteFile]  # by key

    @property
    def bytes(self) -> int:
        """Sum of the files' sizes."""
        return sum(file.size for file in self.files)

    @cached_property
    def sha256(self) -> str:
        """Over the names, sizes and versions of all files, wherever they are."""
        rows = [[self.name(file), file.size, file.version] for file in self.files]
        return hashlib.sha256(json.dumps(rows).encode()).hexdigest()

    @property
    def folder(self) -> str:
        """The name of the local folder for these files in these versions."""
        name = re.sub(r"[^A-Za-z0-9]+", "-", self.root.partition("://")[2]).strip("-")[:_LONGEST_NAME]
        digest = hashlib.sha256(f"{self.place}/{self.base}\0{self.alone}\0{self.sha256}".encode())
        return f"{name}-{digest.hexdigest()[:16]}"

    def name(self, file: RemoteFile) -> str:
        """The path of a file in the local folder."""
        return file.key.removeprefix(self.base)

    def fingerprint(self) -> dict[str, Any]:
        """`files`, `bytes` and `sha256`."""
        return {"files": len(self.files), "bytes": self.bytes, "sha256": self.sha256}

    def to_plain(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {**vars(self), "files": [asdict(file) for file in self.files]} | {"sha256": self.sha256}

    def write(self, path: Path) -> None:
        """Write it as JSON, atomically."""
        write_text(path, json.dumps(self.to_plain()) + "\n")

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> Manifest:
        """The inverse of `to_plain`."""
        files = tuple(RemoteFile(**file) for file in plain["files"])
        return cls(plain["root"], plain["place"], plain["base"], plain["alone"], files)

    @classmethod
    def read(cls, path: Path) -> Manifest | None:
        """Read a file; None if it isn't there or is something else."""
        try:
            return cls.of(json.loads(path.read_text()))
        except (OSError, ValueError, LookupError, TypeError):
            return None


def manifest_of(location: Location, files: Sequence[RemoteFile], *, alone: bool, base: str) -> Manifest:
    """The manifest of a listing; empty files and the markers of folders are left out.

    Raises:
        DataError: there are no files, or one that is named is missing or can't be a local file's name.
    """
    missing = list(location.names.keys() - {file.key for file in files}) if location.has_patterns else []
    found = sorted((file for file in files if file.size and not file.key.endswith("/")), key=lambda file: file.key)
    root = location.root
    if missing:
        more = f" and {len(missing) - 1:,} more" if len(missing) > 1 else ""
        raise DataError(
            f"data.root: '{root}' names files that aren't there: {location.url(min(missing))}{more}; correct it"
        )
    if not found:
        raise DataError(f"data.root: '{root}' has no files; set data.root to the URL of a folder, a file or a pattern")
    names = {file.key.removeprefix(base) for file in found}
    for name in names:
        parts = PurePosixPath(name).parts
        strange = "/".join(parts) != name or ".." in parts or "\0" in name or "\\" in name or not name
        if strange or any("/".join(parts[:depth]) in names for depth in range(1, len(parts))):
            raise DataError(f"data.root: '{root}' has a file '{name}', which can't be a local file's name; rename it")
    return Manifest(root, location.place, base, alone, tuple(found))

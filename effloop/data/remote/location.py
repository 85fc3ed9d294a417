"""URLs: what a remote `data.root` names, a bucket or host, a path in it, and patterns of files."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from urllib.parse import quote, unquote

from effloop.errors import ConfigError, optional_package, printable

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://([^/]*)/?(.*)", re.DOTALL)
_ONE_SLASH = re.compile(r"(s3|gs|az|hf|https?|s?ftp|hdfs|oss):/?([^/].*)", re.IGNORECASE | re.DOTALL)
_INNERMOST = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(-?\d{1,18})\.\.(-?\d{1,18})(?:\.\.(\d{1,18}))?")
_GLOB = re.compile(r"[*?\[]")
_QUERY = re.compile(r"\?[A-Za-z][\w.-]*=")
_MOST_NAMES = 100_000
_SECRET = re.compile(r"KEY|SECRET|TOKEN|PASSWORD|CREDENTIAL|AUTHORIZATION")
_NO_TEXT = re.compile("[\ud800-\udfff]")
_HTTP = ("http", "https")
_PLAIN = "/:[]!$&'()*+,;=@~"
"""Characters that stay as they are in the path of a URL; `%` in a name doesn't."""


@dataclass
class ThisProcess:
    """Facts about the process that needs data.

    Attributes:
        started_at: Unix time; listings that other processes made later are reused.
        progressed: called several times a second while data is listed or fetched, by this process or one that it
            waits for.
        run: identifies a run of several ranks, which count what one of them fetched; empty for a run of one process.
    """

    started_at: float
    progressed: Callable[[], None]
    run: str = ""


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
    """A remote `data.root`.

    Attributes:
        root: as typed.
        scheme: `s3`, `https`, …
        host: the bucket, or host and port.
        path: the rest, with its patterns, as typed: `%20` is a space in the name of a web server's file.
    """

    root: str
    scheme: str
    host: str
    path: str

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

    @cached_property
    def names(self) -> list[str]:
        """The paths after braces are expanded, each with or without wildcards.

        Raises:
            ConfigError: they are too many.
        """
        return list(dict.fromkeys(map(self.key, self._typed)))

    @cached_property
    def _typed(self) -> list[str]:
        found = list(dict.fromkeys(_expanded(self.path)))
        if len(found) > _MOST_NAMES:
            raise ConfigError(f"data.root: '{self.root}' names more than {_MOST_NAMES:,} files; name a folder instead")
        return found

    @property
    def has_patterns(self) -> bool:
        """Whether the path has wildcards or braces; otherwise it is one file or folder."""
        return self.has_wildcards or self._typed != [self.path]

    @property
    def has_wildcards(self) -> bool:
        """Whether a listing is needed to know the files' names."""
        return any(_GLOB.search(name) for name in self._typed)

    @property
    def base(self) -> str:
        """The folder that all paths share, as `a/b/`, or empty."""
        folders = [_GLOB.split(name)[0].split("/")[:-1] for name in self._typed]
        shared = takewhile(lambda level: len({*level}) == 1, zip(*folders, strict=False))
        return self.key("".join(f"{name}/" for name, *_ in shared))

    def matches(self, key: str) -> bool:
        """Whether the patterns name a file."""
        return any(pattern.fullmatch(key) for pattern in self._patterns) or key in self._plain

    @cached_property
    def _plain(self) -> frozenset[str]:
        return frozenset(self.key(name) for name in self._typed if not _GLOB.search(name))

    @cached_property
    def _patterns(self) -> list[re.Pattern[str]]:
        utils = optional_package("fsspec.utils", f"data.root: '{self.root}'", "effloop[remote]")
        try:
            return [re.compile(utils.glob_translate(name)) for name in self._typed if _GLOB.search(name)]
        except (re.error, ValueError) as error:
            raise ConfigError(f"data.root: '{self.root}' has a wrong pattern: {error}; correct it") from None

    def missing(self, keys: set[str]) -> list[str]:
        """The files named without wildcards that aren't among `keys`."""
        return [name for name in self.names if name in self._plain and name not in keys]


def _parts(root: str) -> tuple[str, str, str]:
    found = _URL.match(root)
    assert found is not None
    return found[1].lower(), found[2], found[3]


def _expanded(path: str) -> Iterator[str]:
    """Expand `{a,b}` and `{000..127}` as a shell does; other braces stay."""
    pending, count = [path], 0
    while pending:
        text = pending.pop()
        found = next((each for each in _INNERMOST.finditer(text) if _choices(each[1])), None)
        if found is None:
            count += 1
            yield text
            if count > _MOST_NAMES:
                return
        else:
            words = [text[: found.start()] + each + text[found.end() :] for each in _choices(found[1])]
            pending.extend(reversed(words))


def _choices(inside: str) -> list[str]:
    """The alternatives in braces; empty for other text."""
    found = _RANGE.fullmatch(inside)
    if found is None:
        return inside.split(",") if "," in inside else []
    first, last, step = int(found[1]), int(found[2]), max(1, int(found[3] or 1))
    width = max(map(len, found.groups()[:2])) if any(re.match(r"-?0\d", end) for end in found.groups()[:2]) else 0
    if abs(last - first) // step > _MOST_NAMES:
        last = first + (step * _MOST_NAMES if last > first else -step * _MOST_NAMES)
    numbers = range(first, last + 1, step) if first <= last else range(first, last - 1, -step)
    return [f"{number:0{width}d}" for number in numbers]

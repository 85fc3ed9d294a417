"""Files of this machine written to a URL, by a process of its own."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from effloop.data.remote.child import EndedError, started
from effloop.data.remote.location import Location, Url
from effloop.data.remote.progress import ByteMeter
from effloop.data.remote.upload import PART_BYTES
from effloop.errors import ConfigError, DataError, warn

_STARTS = 3
_STALLED_S = 900.0
"""Without any progress; a request has 300 s, and is tried anew."""


@dataclass(frozen=True)
class There:
    """What a URL has.

    Attributes:
        whole: a file, or a folder of files that are not being uploaded.
        job: whose upload to it isn't complete.
    """

    whole: bool
    job: str | None


@dataclass(frozen=True)
class Sent:
    """What it took to write to a URL.

    Attributes:
        files, bytes: in all.
        sent_bytes: those that weren't there yet.
        seconds: for all of it.
    """

    files: int
    bytes: int
    sent_bytes: int
    seconds: float

    def line(self, url: Url) -> str:
        """`s3://bucket/in1k: 12 files, 1,070.1 MB; uploaded in 3.1 s, 345.2 MB/s`."""
        files = "1 file" if self.files == 1 else f"{self.files:,} files"
        line = f"{url}: {files}, {self.bytes / 1e6:,.1f} MB; "
        if self.sent_bytes < self.bytes:
            line += f"{(self.bytes - self.sent_bytes) / 1e6:,.1f} MB were there, {self.sent_bytes / 1e6:,.1f} MB "
        return line + f"uploaded in {self.seconds:.1f} s, {self.sent_bytes / 1e6 / max(self.seconds, 1e-9):,.1f} MB/s"


def check_url(url: Url) -> None:
    """Refuse a URL that nothing is written to.

    Raises:
        ConfigError: it is of a web server, has patterns or credentials, or names no file or folder.
    """
    try:
        location = Location.of(url)
        patterns = location.has_patterns
    except ConfigError as error:
        raise ConfigError(str(error).replace("data.root", "out")) from None
    if location.scheme == "hf":
        raise ConfigError(f"out: {url} can't be written; set to=parquet out=FOLDER, and upload that by hf upload")
    if location.is_http:
        raise ConfigError(f"out: {url} can't be written, web servers are read only; set out=s3://BUCKET/NAME or PATH")
    if patterns:
        raise ConfigError(f"out: {url} has wildcards or braces; set out to the URL of one file or folder")
    if not location.path or location.path.endswith("/"):
        raise ConfigError(f"out: {url} has no name; set out={location.place}/NAME")


def look(url: Url) -> There:
    """What a URL has; and whether it can be written.

    Raises:
        ConfigError: a package is missing.
        DataError: it can't be read, written, or removed there.
    """
    done = _done({"url": url, "path": None, "job": "", "part_bytes": PART_BYTES}, url)[0]
    return There(done["whole"], done["job"])


def send(path: Path, url: Url, job: str) -> Sent:
    """Write a file or a folder to a URL. It can be read when all of it is there, and not before.

    Args:
        path: of the file or folder.
        url: where it goes; what an earlier call has uploaded for the same job stays, if its bytes are known to be the
            same.
        job: what determines its bytes.

    Raises:
        ConfigError: something else is there.
        DataError: it can't be written.
    """
    began = time.monotonic()
    done, sent = _done({"url": url, "path": str(path), "job": job, "part_bytes": PART_BYTES}, url)
    return Sent(done["files"], done["size"], sent, time.monotonic() - began)


def _done(asked: Mapping[str, Any], url: Url) -> tuple[dict[str, Any], int]:
    """What the process says at its end, and how many bytes have gone."""
    for start in range(1, _STARTS + 1):
        try:
            return _once(asked, url)
        except EndedError as error:
            if start == _STARTS:
                raise DataError(f"out: {url} can't be written: {error}; start again") from None
            warn(f"out: {error}; it is started again")
    raise AssertionError


def _once(asked: Mapping[str, Any], url: Url) -> tuple[dict[str, Any], int]:
    with started("effloop.data.remote.upload", "uploads", asked) as child, ByteMeter(f"to {url}") as meter:
        moved = time.monotonic()
        for message in child.messages():
            meter.total = message.get("total", meter.total)
            if count := message.get("bytes"):
                meter.advance(count)
                moved = time.monotonic()
            if "checked" in message:
                moved = time.monotonic()
            if message.get("done"):
                return message, meter.bytes
            if time.monotonic() - moved > _STALLED_S:
                raise DataError(f"out: {url} can't be written: nothing was sent for {_STALLED_S:g} s; start again")
        raise child.ended()

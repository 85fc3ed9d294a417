"""Uploads to a server of this machine."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from remotes import Server, serving

from effloop.data.remote import upload as sending
from effloop.data.remote.fetch import forget

PART = 1 << 16
SECRET = "not-a-secret"


@contextmanager
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server with the empty bucket `b`, which gets 64 KiB at a time."""
    monkeypatch.setattr(sending, "PART_BYTES", PART)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "served/b").mkdir(parents=True)
    forget()
    with serving(tmp_path / "served") as found:
        monkeypatch.setenv("AWS_ENDPOINT_URL", found.url)
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(name, SECRET)
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        yield found
    forget()


def tree(root: Path) -> dict[str, bytes]:
    """The files of a folder, or a file, by name."""
    if root.is_file():
        return {"": root.read_bytes()}
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def until(server: Server, count: int) -> None:
    """Wait until so many files, or parts of them, were written."""
    deadline = time.monotonic() + 60
    while len(server.put()) < count:
        assert time.monotonic() < deadline
        time.sleep(0.01)

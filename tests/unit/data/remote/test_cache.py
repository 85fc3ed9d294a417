"""The folder of what was fetched, as several processes use it."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from remotes import serving

from effloop.data.remote import cache, child
from effloop.data.remote.cache import Cache
from effloop.data.remote.manifest import Manifest, RemoteFile
from effloop.errors import ConfigError

HUGE = Manifest("s3://b/x", "s3://b", "", True, (RemoteFile("x", 10**18, "v"),))


@pytest.fixture
def kept(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "kept")


def test_what_was_just_listed_is_in_use(kept, tmp_path):
    (tmp_path / "served").mkdir()
    (tmp_path / "served/a.tar").write_bytes(b"whole")
    heard = []

    def hear(message: Mapping[str, Any]) -> None:
        if {"manifest", "done"} & message.keys():
            with pytest.raises(ConfigError, match="has room for"):
                kept.make_room(HUGE, None)  # as another run does before this one has a lock of its own
            heard.append(kept.manifest(message.get("manifest") or heard[0].folder))

    with serving(tmp_path / "served") as server:
        request = {"root": f"{server.url}/a.tar", "folder": str(kept.folder), "limit": None, "chunk_bytes": 100}
        done = child.run("effloop.data.remote.download", "the process that fetches", "", request, hear)
    assert done == ({"files": 1, "bytes": 5}, 5)
    assert len(heard) == 2
    assert all(heard)


def test_another_run_is_waited_for(kept, monkeypatch, capsys):
    monkeypatch.setattr(cache, "_REPORT_S", 0.1)
    ended, order = threading.Event(), []

    def fetch() -> None:
        with kept.fetching("s3://waited-for", lambda: None) as (file, _):
            kept.note(file, {"roots": {"s3://b/x": 1}})
            started.set()
            ended.wait(20)
            order.append("other")

    started = threading.Event()
    thread = threading.Thread(target=fetch)
    thread.start()
    started.wait(20)
    with kept.fetching("s3://waited-for", ended.set) as (_, noted):
        order.append("this")
    thread.join()
    assert order == ["other", "this"]
    assert noted["roots"] == {"s3://b/x": 1}
    assert f"process {os.getpid()} on " in capsys.readouterr().err

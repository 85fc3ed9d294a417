"""The folder of what was fetched, as several processes use it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from remotes import serving

from effloop.data.remote import cache, child
from effloop.data.remote.cache import Cache
from effloop.data.remote.manifest import Manifest, RemoteFile
from effloop.errors import ConfigError, DataError

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

    with serving(tmp_path / "served") as server, child.ByteMeter("") as meter:
        request = {"root": f"{server.url}/a.tar", "folder": str(kept.folder), "limit": None, "chunk_bytes": 100}
        done = child.run("effloop.data.remote.download", "the process that fetches", request, meter, hear)
    assert (done, meter.bytes) == ({"files": 1, "bytes": 5}, 5)
    assert len(heard) == 2
    assert all(heard)


def test_another_run_is_waited_for_as_long_as_it_makes_progress(kept, monkeypatch):
    monkeypatch.setattr(cache, "_SILENT_S", 0.5)
    monkeypatch.setattr(cache, "_POLL_S", 0.05)
    ended, beats = threading.Event(), []
    with kept.fetching("s3://b", print, lambda: None) as (file, _):

        def beat() -> None:
            while not ended.wait(0.05):
                os.utime(file.fileno(), (now := time.time() - 3600, now))  # of a file server with another clock
                beats.append(now)

        thread = threading.Thread(target=beat)
        thread.start()

        def wait() -> None:
            if len(beats) > 20:
                ended.set()

        with (
            pytest.raises(DataError, match=rf"process {os.getpid()} .* has made no progress for 0.5 s; end it"),
            kept.fetching("s3://b", print, wait),
        ):
            pass
        assert ended.is_set()
        thread.join()

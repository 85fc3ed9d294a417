"""The folder of what was fetched, as several processes use it."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
from remotes import serving

from effloop.data.remote import cache
from effloop.data.remote.cache import Cache
from effloop.data.remote.child import started
from effloop.data.remote.manifest import Manifest, RemoteFile
from effloop.errors import ConfigError, DataError

HUGE = Manifest("s3://b/x", "s3://b", "", True, (RemoteFile("x", 10**18, "v"),))


@pytest.fixture
def kept(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "kept")


def test_what_was_just_listed_is_in_use(kept, tmp_path):
    (tmp_path / "served").mkdir()
    (tmp_path / "served/a.tar").write_bytes(b"whole")
    with serving(tmp_path / "served") as server:
        asked = {"root": f"{server.url}/a.tar", "folder": str(kept.folder)}
        with started("effloop.data.remote.download", "fetches", asked) as child:
            path = next(Path(message["manifest"]) for message in child.messages() if "manifest" in message)
            with pytest.raises(ConfigError, match="has room for"):
                kept.make_room(HUGE, None)  # as another run does before the one that has asked goes on
            assert Manifest.read(path)


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

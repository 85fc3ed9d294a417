"""Shards that are gone through before any training, and who comes meanwhile."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from remotes import serving

from effloop.data.remote import fetch
from effloop.data.remote.window_pass import ShardPass
from effloop.data.remote.window_room import Window

NAMES = [f"{number}.tar" for number in range(4)]


@pytest.fixture(autouse=True)
def _new_process():
    fetch.forget()
    yield
    fetch.forget()


def test_a_rank_that_comes_while_another_one_goes_through_the_shards_waits(tmp_path: Path) -> None:
    (tmp_path / "served").mkdir()
    for name in NAMES:
        (tmp_path / f"served/{name}").write_bytes(os.urandom(1 << 20))
    with serving(tmp_path / "served") as server:
        folder, window = tmp_path / "kept", Window(1, (), lambda _: NAMES)

        def open_root() -> Path:
            fetch.forget()
            return fetch.local_root(f"{server.url}/", folder, window=window)

        first = open_root() / NAMES[0]
        manifest = fetch.manifest_of_root(f"{server.url}/", folder)
        assert manifest is not None
        assert first.exists()
        server.pause_s = 0.05  # of 16 pieces of a shard
        turns = ShardPass(manifest, NAMES, folder, None, 1).each(lambda: NAMES[2:], lambda *_: None)
        found: list[str] = []
        thread = threading.Thread(target=lambda: found.extend(turns))
        thread.start()
        while first.exists():
            pass
        assert any((open_root() / name).exists() for name in NAMES[2:])
        thread.join()
        assert found == NAMES[2:]

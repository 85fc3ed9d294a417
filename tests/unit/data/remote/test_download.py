"""What a process fetches, by its threads."""

from __future__ import annotations

import pytest
from remotes import Fault, Server, serving

from effloop.data.remote import store
from effloop.data.remote.cache import Cache
from effloop.data.remote.download import Download
from effloop.data.remote.http import HttpStore
from effloop.data.remote.location import Location
from effloop.errors import DataError


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A server of `a.tar`, of 300,000 bytes."""
    monkeypatch.setattr(store, "_FIRST_S", 0.001)
    (tmp_path / "served").mkdir()
    (tmp_path / "served/a.tar").write_bytes(b"whole" * 60_000)
    with serving(tmp_path / "served") as found:
        yield found


def fetch(server: Server, cache: Cache) -> bytes:
    """What is fetched of its file."""
    reads = HttpStore(Location.of(f"{server.url}/a.tar"))
    manifest = reads.manifest()
    Download(reads, manifest, cache, 1 << 20).run()
    return cache.content(manifest, manifest.files[0]).read_bytes()


def test_bytes_that_come_again_are_no_progress(server, tmp_path):
    server.ranges = False
    server.faults = [Fault(cut=100_000, times=99)]
    with pytest.raises(DataError, match=r"ended after 100,000 of 300,000 bytes \(attempt 8 of 8"):
        fetch(server, Cache(tmp_path / "kept"))
    server.faults = [Fault(cut=20_000 * number) for number in range(1, 12)]
    assert fetch(server, Cache(tmp_path / "kept")) == b"whole" * 60_000

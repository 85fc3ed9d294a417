"""Fetching into the folder for fetched files, and that folder as several processes use it."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from remotes import Fault, Server, serving

from effloop.data.remote import cache, stores
from effloop.data.remote.cache import DONE, Cache
from effloop.data.remote.download import Download, Part
from effloop.data.remote.location import Location, Manifest, RemoteFile
from effloop.data.remote.stores import store_of
from effloop.errors import ConfigError, DataError

HUGE = Manifest("s3://b/x", "s3://b", "", True, (RemoteFile("x", 10**18, "v"),))


@pytest.fixture
def kept(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "kept")


def test_what_is_in_use_is_not_removed(kept):
    (kept.folder / "objects/left").write_bytes(b"nobody's")
    file = RemoteFile("a.tar", 5, "v")
    manifest = Manifest("s3://b/a.tar", "s3://b", "", True, (file,))
    kept.content(manifest, file).write_bytes(b"whole")
    for remains in (True, False):
        lock = kept.use(manifest)
        if not remains:
            lock.close()
        with pytest.raises(ConfigError, match="has room for"):
            kept.make_room(HUGE, None)
        assert (kept.manifest(manifest.folder) is not None, not kept.missing(manifest)) == (remains, remains)
        lock.close()
    assert not [*kept.folder.glob("objects/*")]


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


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server of `a.tar`, of 300,000 bytes."""
    monkeypatch.setattr(stores, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(stores, "PAUSE_S", 0.001)
    (tmp_path / "served").mkdir()
    (tmp_path / "served/a.tar").write_bytes(b"whole" * 60_000)
    with serving(tmp_path / "served") as found:
        yield found


def fetch(server: Server, cache: Cache) -> tuple[bytes, int]:
    """What is fetched of its file, and how many bytes are said to be."""
    reads = store_of(Location.of(f"{server.url}/a.tar"))
    manifest = reads.manifest()
    download = Download(reads, manifest, cache, 1 << 20)
    download.run()
    return cache.content(manifest, manifest.files[0]).read_bytes(), download.moved


def test_a_whole_file_that_breaks_off_is_fetched_anew(server, tmp_path):
    server.ranges = False
    server.faults = [Fault(cut=100_000, times=99)]
    with pytest.raises(DataError, match=r"a\.tar can't be fetched: .* \(4 attempts\); start again"):
        fetch(server, Cache(tmp_path / "kept"))
    server.faults = [Fault(cut=100_000, times=3)]
    assert fetch(server, Cache(tmp_path / "kept")) == (b"whole" * 60_000, 300_000)


def test_an_answer_that_is_shorter_than_it_says_is_continued(server, tmp_path):
    server.short = 1
    assert fetch(server, Cache(tmp_path / "kept")) == (b"whole" * 60_000, 300_000)
    server.short = 300_000  # of each answer but its first byte
    with pytest.raises(DataError, match=r"a\.tar can't be fetched: the answer ended after 4 of 300,000 bytes \(4 att"):
        fetch(server, Cache(tmp_path / "other"))


@pytest.mark.parametrize("boot", [None, "another", ""])
def test_parts_are_known_until_the_machine_starts_again(boot, tmp_path):
    file, path = RemoteFile("a.tar", 10, "v"), tmp_path / "a"
    part = Part(file, path, 4)
    part.write(b"0123", 0)
    assert not part.chunk_done(0, 4)
    part.close()
    done = path.with_name(path.name + DONE)
    if boot is not None:
        done.write_text("\n".join([boot, *done.read_text().splitlines()[1:], ""]))
    again = Part(file, path, 4)
    assert again.missing == [(0, 4), (4, 8), (8, 10)][boot is None :]
    assert not again.chunk_done(4, 8)
    again.close()
    last = Part(file, path, 4)  # what a second start has added is known as well
    assert len(last.missing) == (1 if boot is None else 2)
    last.close()

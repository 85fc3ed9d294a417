"""`data.window`: who waits for shards that don't come of themselves, and what happens where nothing can be written."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from plans import write_as
from remotes import Server, serving
from runs import TINY, composed, once

import effloop
from effloop.cli.main import main
from effloop.data.loader import Loader
from effloop.data.remote import window_fetch
from effloop.data.remote.fetch import forget
from effloop.data.remote.window import WindowState
from effloop.data.remote.window_room import disk_bytes
from effloop.data.source import Tail, sources
from effloop.data.source.root import remote_files
from effloop.data.source.storage.mapped import WindowedFiles
from effloop.data.windows import WindowOrder
from effloop.errors import ConfigError

COMES_AND_GOES = """
import os, sys
whole, shard = sys.argv[1:]
while True:
    os.unlink(shard)
    os.link(whole, shard)
"""
WORDS = ("data=tar", "data.window=2", "engine.timeout_s=5", *TINY)


@pytest.fixture
def server(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server of 40 photographs in ten tar files."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    forget()
    (tmp_path / "served").mkdir()
    write_as("tar", photos, tmp_path / "served/d", shard_bytes=9_000)
    with serving(tmp_path / "served") as found:
        yield found
    for fetching in [*window_fetch._running.values()]:
        fetching.close()
    forget()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 300 kB."""
    path = tmp_path / "disk"
    path.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(path)], capture_output=True)
    if done.returncode:
        pytest.skip("no file system can be mounted here")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


def fill(folder: Path) -> None:
    with (folder / "full").open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))


def loader_of(server: Server, *words: str) -> Loader:
    return effloop.build_loader(composed(f"data.root={server.url}/d/", *WORDS, *words))


def order_of(server: Server, loader: Loader) -> WindowOrder:
    """The order on the local files."""
    source = sources.build(composed("data=tar", f"data.root={server.root}/d").data, "train")
    _, counts = source.shard_files()
    order = loader.plan.order
    return WindowOrder(len(source), order.global_batch, order.seed, Tail.drop, shards=tuple(counts.tolist()), window=2)


def tightest(server: Server) -> float:
    """The smallest `data.download_gb`: two windows, and all other files."""
    loader_of(server).close()
    (manifest,) = remote_files(composed(f"data.root={server.url}/d/", *WORDS).data).values()
    shards = [file for file in manifest.files if manifest.name(file).startswith("train-")]
    rest = sum(disk_bytes(file) for file in manifest.files if file not in shards)
    forget()
    return (rest + sum(sorted(disk_bytes(file, fetched=False) for file in shards)[-4:])) / 1e9


def test_reading_ahead_does_not_keep_a_batch_from_being_decoded(server, here):
    """A batch of two windows, and the next one of a third, for which there is room only after it."""
    words = [f"data.download_gb={tightest(server)}", "batch_size=7", "engine.run_length=1", "num_workers=1"]
    for engine in ("threads", "processes"):
        loader = loader_of(server, *words, f"engine={engine}")
        order = order_of(server, loader)
        assert any(order.window_of(0, number + 1)[1] > order.window_of(0, number)[0] + 1 for number in range(4))
        for number, batch in enumerate(loader.epoch(0)):
            assert np.array_equal(batch.ids.numpy(), order.batch(0, number)[0])
        assert number == 4
        loader.close()


@pytest.mark.parametrize("engine", ["threads", "processes"])
def test_what_an_epoch_that_was_left_waits_for_keeps_no_worker(engine, server, here):
    """Of the first batches of two epochs, then of a third epoch all."""
    loader = loader_of(server, f"engine={engine}", "num_workers=1", "engine.prefetch=8", "epochs=9")
    order = order_of(server, loader)
    for epoch in range(3):
        began = time.monotonic()
        for number, batch in enumerate(loader.epoch(epoch)):
            assert np.array_equal(batch.ids.numpy(), order.batch(epoch, number)[0])
            if epoch < 2:
                break
    assert number == 4
    loader.close()
    assert time.monotonic() - began < 60


def test_two_loaders_of_the_same_data_take_turns(server, here):
    """Each has its own order; the process that fetches is the one that the other has started, or none any more."""
    first = loader_of(server, "num_workers=1", "engine=threads")
    second = loader_of(server, "num_workers=0", "seed=5")
    orders = [order_of(server, loader) for loader in (first, second)]
    server.pause_s = 0.02
    batches = [loader.epoch(0) for loader in (first, second)]
    for number in range(5):
        for each, order in zip(batches, orders, strict=True):
            assert np.array_equal(next(each).ids.numpy(), order.batch(0, number)[0])
        if number == 2:
            second.close()
    first.close()
    second.close()
    assert not window_fetch._running


def test_no_shard_is_here_when_a_process_begins(server, here, tmp_path):
    """What a run leaves that was killed after it had removed a window, and before it had fetched the next one."""
    loader_of(server).close()
    objects = tmp_path / "cache/effloop/remote/window/objects"
    for link in objects.parent.glob("data/*/train-*.tar"):
        (objects / os.path.basename(os.readlink(link))).unlink(missing_ok=True)
    assert main(once("train", f"data.root={server.url}/d/", *WORDS)) == 0


def test_a_full_disk_is_one_line(server, here, disk):
    """Of the rank that can't tell what it needs, and of the process that fetches."""
    loader = loader_of(server, f"data.download_dir={disk}")
    (fetching,) = window_fetch._running.values()
    batches = loader.epoch(0)
    next(batches)
    fill(disk)
    with pytest.raises(ConfigError, match=r"data\.download_dir: .*No space left .* 0 bytes are free there; make room"):
        list(batches)
    fetching.state.fail("there is no room")  # as the process says it, for which a file has kept some
    fetching.state.begin()
    fetching.state.trains_since = 1.0
    with pytest.raises(ConfigError, match=r"is not on this machine: there is no room"):
        fetching.state.wait_for(fetching.state.view / "train-none.tar")
    loader.close()


def test_what_fetches_says_why_it_can_not_begin(server, here):
    loader = loader_of(server)
    loader.close()
    place = loader.plan.source.window_state.folder / "reserve"
    place.unlink()
    place.mkdir()
    with pytest.raises(ConfigError, match=r"^data\.download_dir: .* can't be written: Is a directory; make room there"):
        loader_of(server)


def test_a_shard_that_is_removed_before_it_is_mapped_is_waited_for(tmp_path):
    """As a worker that reads ahead finds shards of an earlier epoch, until these are removed."""
    (tmp_path / "data/d").mkdir(parents=True)
    (tmp_path / "locks").mkdir()
    state = WindowState(tmp_path / "data/d")
    state.folder.mkdir()
    whole, shard = tmp_path / "whole", state.view / "shard"
    whole.write_bytes(b"1")
    os.link(whole, shard)
    state.trains_since = time.time()
    with subprocess.Popen([sys.executable, "-c", COMES_AND_GOES, str(whole), str(shard)]) as process:
        until = time.monotonic() + 1
        try:
            while time.monotonic() < until:
                assert WindowedFiles([shard], state)[0][:] == b"1"
        finally:
            process.kill()

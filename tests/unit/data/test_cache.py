from __future__ import annotations

import fcntl
import multiprocessing
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from plans import line, make_engine, make_plan, open_source, read_bytes

import effloop
from effloop.data.cache import CachedSource, Region, cached
from effloop.data.decode import Decoder, decoders
from effloop.data.source import Cache, Source
from effloop.errors import ConfigError
from effloop.hardware import available_memory

MUCH = 50e6


@pytest.fixture
def shm(tmp_path: Path) -> Path:
    """A folder of the test's own in place of /dev/shm."""
    folder = tmp_path / "shm"
    folder.mkdir()
    return folder


@pytest.fixture
def decoder() -> Decoder:
    return decoders.build(decoders["auto"].config(name="auto"))


@pytest.fixture
def source(photos: Path) -> Source:
    return open_source("folder", photos)


KINDS = pytest.mark.parametrize("kind", [Cache.bytes, Cache.pixels])


def test_none_is_the_source_itself(source: Source, decoder: Decoder, shm: Path) -> None:
    assert cached(source, Cache.none, decoder, MUCH, folder=shm) is source


@KINDS
def test_the_second_reading_is_from_memory(
    photos: Path, kind: Cache, decoder: Decoder, shm: Path, tmp_path: Path
) -> None:
    photos = shutil.copytree(photos, tmp_path / "photos")
    source = open_source("folder", photos)
    kept = cached(source, kind, decoder, MUCH, folder=shm)
    assert isinstance(kept, CachedSource)
    wanted = [decoder.decode(source.read(i)) for i in range(len(source))]
    first = [read_bytes(kept, i) for i in range(len(kept))]
    for path in photos.rglob("*.jpg"):
        path.unlink()
    assert [read_bytes(kept, i) for i in range(len(kept))] == first
    assert kept.region.kept() == len(kept)
    for index, pixels in enumerate(wanted):
        np.testing.assert_array_equal(decoder.decode(kept.read(index)), pixels)
    assert kept.fingerprint() == source.fingerprint()


@KINDS
@pytest.mark.parametrize("limit", [MUCH, 30_000])
@pytest.mark.parametrize(("engine", "num_workers"), [("inline", 0), ("threads", 2), ("processes", 2)])
def test_the_batches_are_the_same(
    source: Source, kind: Cache, decoder: Decoder, limit: float, engine: str, num_workers: int, shm: Path
) -> None:
    wanted = make_engine("inline", make_plan(source))
    kept = cached(source, kind, decoder, limit, folder=shm)
    made = make_engine(engine, make_plan(kept), num_workers)
    for epoch in (0, 1):
        for a, b in zip(wanted.stream(epoch), made.stream(epoch), strict=True):
            np.testing.assert_array_equal(a.images, b.images)
            np.testing.assert_array_equal(a.ids, b.ids)
    made.close()
    assert isinstance(kept, CachedSource)
    if limit == MUCH:
        assert kept.region.kept() == len(kept)
    else:
        assert 0 < kept.region.kept() < len(kept)


def test_room_is_what_the_data_takes(source: Source, decoder: Decoder, shm: Path) -> None:
    kept = cached(source, Cache.bytes, decoder, MUCH, folder=shm)
    assert isinstance(kept, CachedSource)
    assert kept.region.num_bytes == source.fingerprint()["bytes"]
    kept = cached(source, Cache.pixels, decoder, MUCH, folder=shm)
    assert isinstance(kept, CachedSource)
    assert kept.region.num_bytes == sum(len(read_bytes(kept, i)) for i in range(len(source)))


def test_one_copy_for_threads_and_processes(source: Source, decoder: Decoder, shm: Path) -> None:
    kept = cached(source, Cache.bytes, decoder, MUCH, folder=shm)
    assert isinstance(kept, CachedSource)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(kept.read, list(range(10)) * 8))
    assert kept.region.kept() == 10
    with multiprocessing.get_context("fork").Pool(2, initializer=_inherit, initargs=(kept,)) as pool:
        pool.map(_read_inherited, range(5, 20))
    assert kept.region.kept() == 20
    again = pickle.loads(pickle.dumps(kept))
    assert again.region.kept() == 20
    assert len(list(shm.iterdir())) == 1
    taken = int.from_bytes(next(shm.iterdir()).read_bytes()[8:16], "little")
    assert taken == sum(source.size(i) for i in range(20))  # none was kept twice


def _inherit(source: Source) -> None:
    global _inherited
    _inherited = source


def _read_inherited(index: int) -> int:
    return len(_inherited.read(index))


def test_nothing_is_left(source: Source, decoder: Decoder, shm: Path) -> None:
    first, second = (cached(source, Cache.bytes, decoder, MUCH, folder=shm) for _ in range(2))
    first.read(0)
    del first
    assert len(list(shm.iterdir())) == 1
    second.read(0)
    del second
    assert list(shm.iterdir()) == []


def test_what_a_killed_run_left_is_removed(source: Source, decoder: Decoder, shm: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from effloop.data import cache; "
        "region = cache.Region('killed', 10, 1000, Path(sys.argv[1])); print('ready', flush=True); time.sleep(60)"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(effloop.__file__).parents[1])}
    with subprocess.Popen([sys.executable, "-c", code, str(shm)], stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        other = cached(source, Cache.bytes, decoder, MUCH, folder=shm)
        assert len(list(shm.iterdir())) == 2  # it is in use
        process.send_signal(signal.SIGKILL)
    time.sleep(0.05)
    del other
    left = cached(source, Cache.bytes, decoder, MUCH, folder=shm)
    assert len(list(shm.iterdir())) == 1
    assert isinstance(left, CachedSource)


def test_somebody_elses_memory_is_not_taken(shm: Path) -> None:
    path = shm / f"effloop-cache-{os.getuid()}-name"
    path.symlink_to("/etc/passwd")
    with pytest.raises(OSError, match="symbolic links"):
        Region("name", 10, 1000, shm)


def test_too_little_for_an_index(source: Source, decoder: Decoder, shm: Path) -> None:
    with pytest.raises(ConfigError, match=r"^data\.cache_gb: 0\.000 is too little to keep an index of 40 samples, .*"):
        cached(source, Cache.bytes, decoder, 1000, folder=shm)


def test_more_than_there_is(shm: Path) -> None:
    huge = 1 << 50
    wanted = f"data.cache: {huge / 1e9:.2f} GB of memory can't be had in {shm}: "
    with pytest.raises(ConfigError) as caught:
        Region("name", 10, huge, shm)
    assert str(caught.value).startswith(wanted)
    assert list(shm.iterdir()) == []


def test_no_shared_memory(source: Source, decoder: Decoder, tmp_path: Path) -> None:
    shm = tmp_path / "none"
    wanted = f"data.cache: {tmp_path}/none is needed for it: No such file or directory; set data.cache=none"
    with pytest.raises(ConfigError, match=line(wanted)):
        cached(source, Cache.bytes, decoder, None, folder=shm)


def test_available_memory() -> None:
    assert 1 << 20 < available_memory() < 1 << 50


def test_a_split_gets_its_share(photos: Path) -> None:
    options = [f"data.root={photos}", "data=folder", "data.cache=bytes", "num_workers=0", "batch_size=4"]
    for limit, all_fits in ((0.1, True), (0.02, False)):
        loaders = [
            effloop.build_loader(effloop.compose([*options, f"data.cache_gb={limit}"]), s) for s in ("train", "val")
        ]
        rooms = [loader.plan.source.region.num_bytes for loader in loaders]  # type: ignore[attr-defined]
        wanted = [loader.plan.source.fingerprint()["bytes"] for loader in loaders]
        if all_fits:
            assert rooms == wanted
        assert "cache: bytes, room for" in loaders[0].describe()
        for loader in loaders:
            loader.close()


def test_the_lock_is_shared_while_in_use(shm: Path) -> None:
    region = Region("name", 10, 1000, shm)
    with open(region.path, "rb+") as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)

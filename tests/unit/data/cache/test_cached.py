import multiprocessing
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest
from numpy.typing import NDArray
from plans import line, make_engine, make_plan, open_source, read_bytes, write_records

import effloop
from effloop.data.cache import cached as cache
from effloop.data.cache.cached import CachedSource, Region, cached
from effloop.data.decode import Decoder, decoders
from effloop.data.image.header import pnm_header
from effloop.data.source import Cache, Source
from effloop.data.source.folder import FolderConfig, FolderSource
from effloop.errors import ConfigError, DataError
from effloop.system.files import locked

MUCH = 50e6


@pytest.fixture
def shm(tmp_path: Path) -> Path:
    """A folder of the test's own in place of /dev/shm."""
    folder = tmp_path / "shm"
    folder.mkdir()
    return folder


def regions(folder: Path, pid: int | None = None) -> list[str]:
    """Regions in a folder that a process has open."""
    links = {os.path.realpath(fd) for fd in Path(f"/proc/{pid or os.getpid()}/fd").iterdir()}
    return [link for link in links if link.startswith(f"{folder}/effloop-cache-")]


@pytest.fixture
def decoder() -> Decoder:
    return decoders.build(decoders["auto"].config(name="auto"))


@pytest.fixture
def source(photos: Path) -> Source:
    return open_source("folder", photos)


KINDS = pytest.mark.parametrize("kind", [Cache.bytes, Cache.pixels])


@KINDS
def test_a_second_read_is_from_memory(photos, kind, decoder, shm, tmp_path):
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
    assert kept.targets is source.targets


@pytest.mark.parametrize(
    ("kind", "limit", "engine", "num_workers"),
    [
        (Cache.bytes, MUCH, "processes", 2),
        (Cache.bytes, 30_000, "threads", 2),
        (Cache.pixels, MUCH, "threads", 2),
        (Cache.pixels, 30_000, "processes", 2),
        (Cache.pixels, MUCH, "inline", 0),
    ],
)
def test_the_batches_are_the_same(source, kind, decoder, limit, engine, num_workers, shm):
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


class _Heights(FolderSource):
    """A source whose targets aren't classes."""

    @property
    def targets(self) -> NDArray[np.float32]:
        return np.arange(12, dtype=np.float32)


def test_targets_that_are_no_labels(photos, decoder, shm):
    source = _Heights(FolderConfig(name="folder", root=str(photos)), "train")
    source.classes = ()
    del source.labels
    kept = cached(source, Cache.bytes, decoder, MUCH, folder=shm)
    assert kept.target_name(7) == "7"
    np.testing.assert_array_equal(kept.targets, source.targets)


def test_room_is_what_the_data_takes(source, decoder, shm):
    kept = cached(source, Cache.bytes, decoder, MUCH, folder=shm)
    assert isinstance(kept, CachedSource)
    assert kept.region.num_bytes == source.fingerprint()["bytes"]
    kept = cached(source, Cache.pixels, decoder, MUCH, folder=shm)
    assert isinstance(kept, CachedSource)
    assert kept.region.num_bytes == sum(len(read_bytes(kept, i)) for i in range(len(source)))


def test_one_copy_for_threads_and_processes(source, decoder, shm):
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
    assert len(regions(shm)) == 1
    taken = int.from_bytes(kept.region._view[8:16], "little")
    assert taken == sum(source.size(i) for i in range(20))  # none was kept twice


def _inherit(source: Source) -> None:
    global _inherited
    _inherited = source


def _read_inherited(index: int) -> int:
    return len(_inherited.read(index))


def test_nothing_is_left(source, decoder, shm):
    first, second = (cached(source, Cache.bytes, decoder, MUCH, folder=shm) for _ in range(2))
    first.read(0)
    del first
    assert len(regions(shm)) == 1
    second.read(0)
    del second
    assert regions(shm) == []


def test_no_file_can_be_made(shm):
    with pytest.raises(ConfigError, match="File name too long; set "):
        Region("n" * 300, 10, lambda: 1000, shm)


def test_a_folder_that_another_process_has_locked(shm, monkeypatch):
    monkeypatch.setattr(cache, "_LOCKED_S", 0.1)
    with (
        locked(shm),
        pytest.raises(ConfigError, match=r"/shm can't be used: another process has locked it for 0\.1 s .*; set"),
    ):
        Region("a", 10, lambda: 1000, shm)


def test_no_failure_leaves_a_file(shm):
    def room() -> int:
        raise ConfigError("no room")

    with pytest.raises(ConfigError, match=line("no room")):
        Region("name", 10, room, shm)
    assert regions(shm) == []


def test_too_little_for_an_index(source, decoder, shm):
    wanted = (
        r"^data\.cache_gb: 1\.0 kB is too little for 40 samples: their index alone takes 4\.1 kB; [\d.]+ GB of memory "
        r"are free; set data\.cache=none or data\.cache_gb higher$"
    )
    with pytest.raises(ConfigError, match=wanted):
        cached(source, Cache.bytes, decoder, 1000, folder=shm)
    assert regions(shm) == []


@KINDS
def test_joining_needs_no_memory(source, kind, decoder, shm):
    first = cached(source, kind, decoder, 30_000, folder=shm)
    second = cached(source, kind, decoder, 10, folder=shm)  # too little for a new one
    first.read(0)
    assert isinstance(second, CachedSource)
    assert second.region.kept() == 1
    assert second.describe() == f"{kind.value}, room for 25.9 kB in {shm}"  # 30,000 - 4,096, as it was made
    assert first.describe() == second.describe()  # type: ignore[attr-defined]


def test_what_cant_be_read_is_named_at_first_look(photos, decoder, tmp_path, shm):
    photos = shutil.copytree(photos, tmp_path / "photos")
    bad = sorted(photos.rglob("train/*/*.jpg"))[3]
    bad.write_bytes(b"hello")
    kept = cached(open_source("folder", photos, index_dir=str(tmp_path)), Cache.pixels, decoder, MUCH, folder=shm)
    assert isinstance(kept, CachedSource)
    assert kept.region.num_bytes == sum(len(kept.read(i)) for i in range(len(kept)) if i != 3)
    options = [f"data.root={photos}", "data=folder", "data.cache=pixels", "num_workers=0", "batch_size=4"]
    with pytest.raises(DataError) as caught:
        effloop.build_loader(effloop.compose([*options, "data.cache_gb=0.05"]), "train")
    assert str(bad.relative_to(photos)) in str(caught.value)


def test_nothing_can_be_read(tmp_path, decoder, shm):
    for name in ("a", "b"):
        (tmp_path / "data" / "train" / name).mkdir(parents=True)
        (tmp_path / "data" / "train" / name / "0.jpg").write_bytes(b"hello")
    source = open_source("folder", tmp_path / "data", index_dir=str(tmp_path))
    kept = cached(source, Cache.pixels, decoder, MUCH, folder=shm)
    assert isinstance(kept, CachedSource)
    assert kept.region.num_bytes == 0


def grey(value: int) -> list[tuple[bytes, int, bytes]]:
    """Two images of one size, whose file says nothing of their colour."""
    return [(b"%d" % i, 0, pnm_header(4, 4, 3) + bytes([value]) * 48) for i in range(2)]


@KINDS
def test_other_data_of_the_same_name_and_fingerprint(kind, decoder, tmp_path, shm, monkeypatch):
    opened = []
    for value, name in ((10, "a"), (200, "b")):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        write_records("memmap", Path("data.eff"), ["x"], train=grey(value))
        opened.append(cached(open_source("memmap", Path("data.eff")), kind, decoder, MUCH, folder=shm))
        assert decoder.decode(opened[-1].read(0)).mean() == value
    assert opened[0].fingerprint() == opened[1].fingerprint()
    assert opened[0].where == opened[1].where
    assert len(regions(shm)) == 2


@KINDS
def test_an_image_overwritten_in_place(kind, photos, decoder, tmp_path, shm, capsys):
    """The folder's times stay what they are; a run that begins while another one keeps the images gets the new one."""
    photos = shutil.copytree(photos, tmp_path / "photos")
    for path in (photos, *photos.rglob("*")):
        os.utime(path, (1e9, 1e9))  # a scan of what has just changed isn't kept
    source = open_source("folder", photos)
    first = cached(source, kind, decoder, MUCH, folder=shm)
    before = [read_bytes(first, i) for i in range(len(first))]
    (photos / "train" / source.key(3)).write_bytes((photos / "train" / source.key(5)).read_bytes())
    second = cached(open_source("folder", photos), kind, decoder, MUCH, folder=shm)
    after = [read_bytes(second, i) for i in range(len(second))]
    assert after == [*before[:3], before[5], *before[4:]]
    assert "data.cache: 1 files in" in capsys.readouterr().err


@KINDS
def test_data_that_was_written_anew(kind, decoder, tmp_path, shm):
    path = tmp_path / "data.eff"
    write_records("memmap", path, ["x"], train=grey(10))
    old = cached(open_source("memmap", path), kind, decoder, MUCH, folder=shm)
    assert decoder.decode(old.read(0)).mean() == 10
    path.unlink()
    write_records("memmap", path, ["x"], train=grey(200))
    new = cached(open_source("memmap", path), kind, decoder, MUCH, folder=shm)
    assert decoder.decode(new.read(0)).mean() == 200
    assert decoder.decode(old.read(0)).mean() == 10


def test_a_worker_joins_what_its_parent_keeps(decoder, tmp_path, shm):
    write_records("memmap", tmp_path / "data.eff", ["x"], train=grey(10))
    kept = cached(open_source("memmap", tmp_path / "data.eff"), Cache.bytes, decoder, MUCH, folder=shm)
    state = pickle.dumps(kept)
    os.utime(tmp_path / "data.eff", (0, 0))  # touched meanwhile
    again = pickle.loads(state)
    assert again.region.name == kept.region.name  # type: ignore[attr-defined]
    assert again.region.num_bytes == kept.region.num_bytes  # type: ignore[attr-defined]


def test_pixels_are_a_decoders(source, shm, monkeypatch):
    def names(kind: Cache) -> list[str]:
        made = [decoders.build(decoders[name].config(name=name)) for name in ("pillow", "turbojpeg", "auto")]
        made.append(decoders.build(decoders["pillow"].config(name="pillow", max_pixels=10**6)))
        kept = [cached(source, kind, decoder, MUCH, folder=shm) for decoder in made]
        return [part.region.name for part in kept]  # type: ignore[attr-defined]

    assert len(set(names(Cache.bytes))) == 1
    before = names(Cache.pixels)
    assert len(set(before)) == 4
    assert names(Cache.pixels) == before
    monkeypatch.setattr(cache.PIL, "__version__", "0")
    assert not set(names(Cache.pixels)) & set(before)
    monkeypatch.undo()
    monkeypatch.setattr("cv2.__version__", "0")
    assert [a == b for a, b in zip(names(Cache.pixels), before, strict=True)] == [True, True, False, True]


def test_more_than_there_is(shm):
    huge = 1 << 50
    wanted = f"data.cache: 1.1 PB of memory can't be allocated in {shm}: "
    with pytest.raises(ConfigError) as caught:
        Region("name", 10, lambda: huge, shm)
    assert str(caught.value).startswith(wanted)
    assert regions(shm) == []


def test_no_shared_memory(source, decoder, tmp_path):
    shm = tmp_path / "none"
    with pytest.raises(ConfigError, match=rf"^data\.cache: {shm} can't be used: No such file or directory; "):
        cached(source, Cache.bytes, decoder, None, folder=shm)


def test_a_split_gets_its_share(photos):
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


@pytest.mark.nightly
def test_a_fork_while_all_are_writing(shm):
    """Threads of the parent hold the lock at the fork, and several of the child want it at once."""
    made = Region("name", 500_000, lambda: 1 << 22, shm)
    done = threading.Event()
    free = iter(range(20_000, 500_000))  # next() of it is atomic

    def write() -> None:
        while not done.is_set():
            made.put(next(free), [b"parent"])

    writers = [threading.Thread(target=write) for _ in range(2)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    for writer in writers:
        writer.start()
    try:
        for trial in range(40):
            if not (pid := os.fork()):
                _write_as_child(made, range(160 * trial, 160 * (trial + 1)))
            assert _ends(pid), f"child {trial} hangs"
    finally:
        done.set()
        sys.setswitchinterval(interval)
        for writer in writers:
            writer.join()
    written = np.flatnonzero(made._ready)
    assert np.array_equal(written[written < 20_000], np.arange(6400))
    begins = np.sort(made._begin[written])
    assert np.diff(begins).min() >= 5  # no two were given one place
    assert all(bytes(made.get(i) or b"") == (b"child" if i < 20_000 else b"parent") for i in written.tolist())


def _write_as_child(made: Region, samples: range) -> NoReturn:
    try:
        start = threading.Barrier(8)

        def write(first: int) -> None:
            start.wait()
            for sample in samples[first::8]:
                made.put(sample, [b"child"])

        threads = [threading.Thread(target=write, args=(k,)) for k in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        os._exit(0)


def _ends(pid: int) -> bool:
    for _ in range(5000):
        if os.waitpid(pid, os.WNOHANG)[0]:
            return True
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return False


@pytest.mark.parametrize(("engine", "num_workers"), [("threads", 2), ("processes", 2)])
def test_the_memory_is_given_back(source, decoder, engine, num_workers, shm):
    kept = cached(source, Cache.bytes, decoder, MUCH, folder=shm)
    made = make_engine(engine, make_plan(kept), num_workers)
    batches = sum(1 for _ in made.stream(0))
    assert batches == len(made.plan.order)
    kept.read(0)
    view, wanted = kept.read(0), bytes(source.read(0))
    made.close()
    del made, kept
    assert str(shm) in Path("/proc/self/maps").read_text()  # somebody still looks at it
    assert bytes(view) == wanted
    del view
    assert regions(shm) == []
    assert str(shm) not in Path("/proc/self/maps").read_text()


def test_another_process_attaches_and_a_kill_frees(shm):
    """A process that isn't a fork finds the region; what a killed one has had is neither found nor kept."""
    code = (
        "import sys, time; from pathlib import Path; from effloop.data.cache.cached import Region; "
        "made = [Region(name, 10, lambda: 1000, Path(sys.argv[1])) for name in ('shared', 'own')]; "
        "[each.put(0, [b'x']) for each in made]; print('ready', flush=True); time.sleep(60)"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(effloop.__file__).parents[1])}
    shared = Region("shared", 10, lambda: 1000, shm)
    with subprocess.Popen([sys.executable, "-c", code, str(shm)], stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        assert len(regions(shm, process.pid)) == 2
        assert shared.get(0) == b"x"
        assert Region("own", 20, lambda: 1000, shm).get(0) is None  # of another layout
        (shm.parent / "link").symlink_to(shm)
        attached = Region("own", 10, lambda: 1000, shm.parent / "link")
        assert attached.get(0) == b"x"
        del attached
        process.send_signal(signal.SIGKILL)
    assert Region("own", 10, lambda: 1000, shm).get(0) is None
    assert len(regions(shm)) == 1

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from disks import small_disk
from plans import open_source, read_bytes
from stores import make_splits, write_npz

from effloop.data.source.storage import packed
from effloop.data.source.storage.packed import write_columns
from effloop.errors import ConfigError, DataError

SPLITS = make_splits(train=16, test=8)
COPIED = "samples were copied to"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write_npz(tmp_path / "set.npz", SPLITS)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "effloop"


def copies(cache: Path) -> list[Path]:
    return [path for path in cache.iterdir() if path.suffix != ".lock"]


def test_is_copied_once_and_again_after_a_change(root, cache, capsys):
    first = open_source("npz", root)
    assert open_source("npz", root).fingerprint() == first.fingerprint()
    [copy] = copies(cache)
    said = capsys.readouterr().err
    assert said.count(COPIED) == 1
    assert f"16 {COPIED} {copy} (" in said
    assert f"convert data.root={root} to=memmap" in said
    assert open_source("memmap", copy).fingerprint() == first.fingerprint()
    times = root.stat()
    write_npz(root, make_splits(train=17, test=8))
    os.utime(root, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert len(open_source("npz", root)) == 17
    assert copies(cache) == [copy]


def test_a_damaged_copy_is_made_again(root, cache, capsys):
    wanted = read_bytes(open_source("npz", root), 5)
    [copy] = copies(cache)
    copy.write_bytes(copy.read_bytes()[:-9])
    assert read_bytes(open_source("npz", root), 5) == wanted
    assert capsys.readouterr().err.count(COPIED) == 2


def test_a_damaged_image_says_which_file_to_remove(root, cache):
    source = open_source("npz", root)
    [copy] = copies(cache)
    with copy.open("r+b") as file:
        file.seek(copy.read_bytes().index(SPLITS["train"][0][5].tobytes()))
        file.write(b"\0\0\0")
    source.verify(4)
    with pytest.raises(DataError, match=f"don't match their checksum: remove {re.escape(str(copy))}, and it is copied"):
        source.verify(5)


def test_a_kill_leaves_nothing_that_is_read_or_stays(root, cache):
    child = os.fork()
    if not child:
        packed.write_columns = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        open_source("npz", root)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert [path.name[:5] for path in copies(cache)] == [".npz-"]
    assert len(open_source("npz", root)) == 16
    assert [path.suffix for path in copies(cache)] == [".index"]


def test_another_process_waits(root, cache, capfd):
    def write_slowly(*args: Any) -> None:
        time.sleep(0.3)
        write_columns(*args)

    children = []
    for _ in range(2):
        if not (child := os.fork()):
            packed.write_columns = write_slowly
            os._exit(len(open_source("npz", root)) != 16)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
    assert capfd.readouterr().err.count(COPIED) == 1


def test_a_full_disk(root, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    with small_disk(disk, "4k"), pytest.raises(ConfigError) as caught:
        open_source("npz", root, index_dir=str(disk))
    message = str(caught.value)
    assert message.startswith(
        f"data.index_dir: {root}:train can't be read in place, and a copy takes 4.7 kB, but {disk} "
    )
    assert message.endswith("make room, or set data.index_dir=PATH")

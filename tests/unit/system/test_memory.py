from __future__ import annotations

import gc
import mmap
import os
from pathlib import Path

import pytest

from effloop.system.memory import drop_from_cache, files_in, memory_of, share_in_cache

MIB = 1 << 20


def test_own_memory_and_a_mapped_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(16 * MIB))
    gc.collect()  # what earlier tests left
    before = memory_of()
    taken = mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # malloc may have some left over
    for _ in range(64):
        taken.write(bytes(MIB))
    own = {name: value - before[name] for name, value in memory_of().items()}
    assert all(60 * MIB < own[name] < 80 * MIB for name in ("rss", "pss", "private", "own", "held"))
    between = memory_of(os.getpid())
    with (tmp_path / "file").open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert mapped.find(b"x") == -1  # every page was read
        grown = {name: value - between[name] for name, value in memory_of().items()}
    assert grown["rss"] > 15 * MIB
    assert grown["own"] < MIB
    taken.close()


def test_page_cache(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(os.urandom(4 * MIB))
    (tmp_path / "empty").touch()
    assert share_in_cache([file, tmp_path / "empty"]) == 1
    if os.major(file.stat().st_dev) == 0:
        pytest.skip(f"{tmp_path} is on no disk, and its pages can't be dropped")
    drop_from_cache([file])
    assert share_in_cache([file]) == 0
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        mapped.find(b"no such bytes")
        drop_from_cache([file])
        assert share_in_cache([file]) > 0.9  # what is mapped stays
    assert share_in_cache([tmp_path / "empty"]) == 0


def test_files(tmp_path: Path) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/b/file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "a/b/file")
    (tmp_path / "other").touch()
    assert files_in(tmp_path) == [tmp_path / "a/b/file", tmp_path / "other"]
    assert files_in(tmp_path / "other", tmp_path / "a", tmp_path / "nowhere") == [
        tmp_path / "other",
        tmp_path / "a/b/file",
    ]

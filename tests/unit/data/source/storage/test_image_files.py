from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from effloop.data.image.encoded import EncodedImages
from effloop.data.source.storage.image_files import read_file, read_files
from effloop.errors import DataError

NAMES = [b"a", b"b/c", b"d"]


def folder_of(path: Path) -> bytes:
    (path / "b").mkdir()
    for name in NAMES:
        (path / os.fsdecode(name)).write_bytes(3 * name)
    return os.fsencode(path)


def read(folder: bytes, names: list[bytes], sizes: list[int]) -> list[bytes]:
    return [*map(bytes, read_files(folder, EncodedImages.of(names), np.array(sizes, np.int64)))]


@pytest.mark.parametrize("sizes", [[3, 9, 3], [4, 9, 3], [3, 8, 3], [3, 9, 0], [3, 9, 1 << 40], [1 << 62] * 3])
def test_files_are_read_as_they_are_whatever_their_expected_sizes(tmp_path: Path, sizes: list[int]) -> None:
    assert read(folder_of(tmp_path), NAMES, sizes) == [3 * name for name in NAMES]


def test_a_whole_path_is_no_name_in_the_folder(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    assert read(b"/nowhere", [folder + b"/a"], [3]) == [b"aaa"]


def make_fifo(path: Path) -> None:
    os.mkfifo(path)


def make_lost_link(path: Path) -> None:
    path.symlink_to("nothing")


@pytest.mark.parametrize("make", [Path.mkdir, make_fifo, make_lost_link, lambda path: None])
def test_what_is_no_file_has_the_error_of_one_by_one(tmp_path: Path, make: object) -> None:
    folder = folder_of(tmp_path)
    make(tmp_path / "odd")  # type: ignore[operator]
    with pytest.raises(DataError) as alone:
        read_file(folder + b"/odd")
    with pytest.raises(DataError) as among_others:
        read(folder, [b"a", b"odd", b"d"], [3, 3, 3])
    assert str(among_others.value) == str(alone.value)

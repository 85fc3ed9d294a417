"""The smaller pieces of storage: columns that are collected, checksums, image files, and files of a split."""

import os
from pathlib import Path

import google_crc32c
import numpy as np
import pytest
from plans import line

from effloop.data.image.encoded import EncodedImages
from effloop.data.source.storage.columns import crc32c, extended
from effloop.data.source.storage.indexed import find_shards
from effloop.data.source.storage.loose import read_file, read_files
from effloop.data.source.storage.writing import SplitColumns
from effloop.errors import DataError


@pytest.mark.parametrize(
    ("largest", "dtype"), [(0, np.uint8), (255, np.uint8), (256, np.uint16), (65535, np.uint16), (65536, np.uint32)]
)
def test_labels_in_the_smallest_type(largest, dtype):
    assert SplitColumns(largest + 1).columns()["label"].dtype == dtype


def test_a_duplicate_by_what_identifies_a_key():
    columns, stems = SplitColumns(), SplitColumns(identity=lambda key: key.partition(b".")[0])
    for key in (b"a.jpg", b"b.jpg", b"a.png"):
        columns.add(key, 0, 1)
        stems.add(key, 0, 1)
    assert columns.duplicate() is None
    assert stems.duplicate() == (b"a", 0, 2)


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 12_287, 12_288, 12_289, 100_001])
def test_crc32c(size):
    """From one byte to several of the lanes that are computed at a time."""
    data = np.random.default_rng(size).bytes(size)
    first, rest = data[: size // 3], memoryview(data)[size // 3 :]
    assert crc32c(data) == crc32c(memoryview(data)) == google_crc32c.value(data)
    assert extended(crc32c(first), rest) == google_crc32c.value(data)


def test_a_view_of_larger_values():
    values = np.arange(24, dtype=np.uint16).reshape(4, 6)
    assert crc32c(values.data) == google_crc32c.value(values.tobytes())


NAMES = [b"a", b"b/c", b"d"]


def folder_of(path: Path) -> bytes:
    (path / "b").mkdir()
    for name in NAMES:
        (path / os.fsdecode(name)).write_bytes(3 * name)
    return os.fsencode(path)


def read(folder: bytes, names: list[bytes], sizes: list[int]) -> list[bytes]:
    return [*map(bytes, read_files(folder, EncodedImages.of(names), np.array(sizes, np.int64)))]


@pytest.mark.parametrize("sizes", [[3, 9, 3], [4, 9, 3], [3, 8, 3], [3, 9, 0], [3, 9, 1 << 40], [1 << 62] * 3])
def test_files_are_read_as_they_are_whatever_their_expected_sizes(tmp_path, sizes):
    assert read(folder_of(tmp_path), NAMES, sizes) == [3 * name for name in NAMES]


def test_a_whole_path_is_no_name_in_the_folder(tmp_path):
    folder = folder_of(tmp_path)
    assert read(b"/nowhere", [folder + b"/a"], [3]) == [b"aaa"]


def make_fifo(path: Path) -> None:
    os.mkfifo(path)


def make_lost_link(path: Path) -> None:
    path.symlink_to("nothing")


@pytest.mark.parametrize("make", [Path.mkdir, make_fifo, make_lost_link, lambda path: None])
def test_what_is_no_file_has_the_error_of_one_by_one(tmp_path, make):
    folder = folder_of(tmp_path)
    make(tmp_path / "odd")  # type: ignore[operator]
    with pytest.raises(DataError) as alone:
        read_file(folder + b"/odd")
    with pytest.raises(DataError) as among_others:
        read(folder, [b"a", b"odd", b"d"], [3, 3, 3])
    assert str(among_others.value) == str(alone.value)


def found(root: Path, split: str, *names: str, splits: tuple[str, ...] = ("train", "val")) -> list[str]:
    for name in names:
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).touch()
    return [str(file.relative_to(root)) for file in find_shards(root, split, ["*.tar"], splits)]


def test_the_split_is_a_word(tmp_path):
    names = ["3val7.tar", "imagenet-val-0001.tar", "my.val.tar", "other-0.tar", "carnival-train-000.tar", "val+0.tar"]
    assert found(tmp_path, "val", *names, "validation-0.tar", "interval.tar") == names[:3]


def test_places_in_their_order(tmp_path):
    assert found(tmp_path, "val", "x-val-0.tar", "x-val-1.tar") == ["x-val-0.tar", "x-val-1.tar"]
    assert found(tmp_path, "val", "val-1.tar", "val-0.tar") == ["val-0.tar", "val-1.tar"]
    assert found(tmp_path, "val", "val/anything.tar") == ["val/anything.tar"]


@pytest.mark.parametrize(("split", "other"), [("train", "val"), ("val", "train")])
def test_a_file_of_two_splits_is_refused(tmp_path, split, other):
    wanted = (
        f"{tmp_path}/train-val-0.tar may be of the split '{split}' or '{other}', by its name; rename it, or put the "
        "files of each split into a folder of that name"
    )
    with pytest.raises(DataError, match=line(wanted)):
        found(tmp_path, split, "train-val-0.tar")


def test_a_split_whose_name_has_anothers_in_it(tmp_path):
    names, splits = ("train-0.tar", "train-small-0.tar"), ("train", "train-small")
    assert found(tmp_path, "train", *names, splits=splits) == ["train-0.tar"]
    assert found(tmp_path, "train-small", *names, splits=splits) == ["train-small-0.tar"]


def test_names_are_no_patterns(tmp_path):
    assert found(tmp_path, "v[a]l*", "val-0.tar", "v[a]l*-1.tar", splits=()) == ["v[a]l*-1.tar"]

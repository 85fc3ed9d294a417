import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from arrays import slices, verified, write
from plans import Copied, line, open_source, read_bytes, write_as, write_records

from effloop.data.source.storage.columns import Comparing, comparing
from effloop.data.source.storage.writing import Dataset, writers
from effloop.errors import ConfigError, DataError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write("hdf5", tmp_path / "set.h5")


@contextmanager
def group(path: Path) -> Iterator[Any]:
    """The group of the split `train`, to be changed."""
    with h5py.File(path, "r+") as file:
        yield file["train"]


def replace(path: Path, name: str, **options: Any) -> None:
    """Write an array again, with other options or other values."""
    with group(path) as train:
        data = options.pop("data", train[name][:])
        del train[name]
        train.create_dataset(name, data=data, **options)


def test_plain_h5py_reads_it(photos, tmp_path):
    path, folder = write_as("hdf5", photos, tmp_path / "set.h5"), open_source("folder", photos)
    with h5py.File(path, "r") as file:
        train = file["train"]
        assert list(file) == ["train", "val"]
        assert train["label"][:].tolist() == folder.labels.tolist()
        keys = slices(train["key_end"][:], train["key"][:])
        images = slices(train["end"][:], train["payload"][:])
        assert json.loads(train.attrs["effloop"])["fingerprint"] == folder.fingerprint()
    assert keys == [folder.raw_key(index) for index in range(len(folder))]
    assert images == [read_bytes(folder, index) for index in range(len(folder))]


def test_blocks(tmp_path):
    records = [(b"%d" % i, 0, bytes([i]) * 1_500_000) for i in range(9)]
    path = write_records("hdf5", tmp_path / "set.h5", ["a"], train=records)
    assert verified("hdf5", path) == records


def test_h5py_has_closed_the_file(path):
    source = open_source("hdf5", path)
    assert h5py.h5f.get_obj_count(h5py.h5f.OBJ_ALL, h5py.h5f.OBJ_FILE) == 0
    assert read_bytes(source, 0) == b"one"


def test_foreign_file(tmp_path):
    path = tmp_path / "set.h5"
    with h5py.File(path, "w") as file:
        file["train/images"] = np.zeros((3, 8, 8), np.uint8)
        file["test"] = np.zeros(3)
        file["test"].attrs["effloop"] = "{}"
        file["nowhere"] = h5py.SoftLink("/gone")
    wanted = f"{path} has no array that looks like labels; it has test, train/images: set data.label=NAME"
    with pytest.raises(DataError, match=line(wanted)):
        open_source("hdf5", path)
    wanted = f"{path} has no split 'val'; it has train: set data.train_split or data.val_split"
    with pytest.raises(DataError, match=line(wanted)):
        open_source("hdf5", path, "val")


MAPPED = "/payload is not an array in one piece; only contiguous, uncompressed datasets in the file itself"
DAMAGED = " is damaged: its array '{}' is {}, not 1-dimensional "
BROKEN: dict[str, tuple[str, dict[str, Any], str]] = {
    "labels": ("label", {"dtype": np.int64}, DAMAGED.format("label", "1-dimensional int64")),
    "matrix": ("crc32c", {"data": np.zeros((3, 1), np.uint32)}, DAMAGED.format("crc32c", "2-dimensional uint32")),
    "length": ("end", {"data": np.array([3, 3], np.uint64)}, " is damaged: 3 labels and 2 images with 10 bytes of key"),
    "chunks": ("payload", {"chunks": (16,)}, MAPPED),
    "compressed": ("payload", {"chunks": (16,), "compression": "gzip"}, MAPPED),
}


@pytest.mark.parametrize("what", BROKEN)
def test_what_can_not_be_mapped(what, path):
    name, options, message = BROKEN[what]
    replace(path, name, **options)
    with comparing(Comparing.kept), pytest.raises(DataError, match=re.escape(f"{path}:train{message}")):
        open_source("hdf5", path)


def test_values_outside_of_the_file(path, tmp_path):
    """A link to another HDF5 file, a virtual dataset: neither is in the file that is mapped."""
    linked, virtual = write("hdf5", tmp_path / "linked.h5"), write("hdf5", tmp_path / "virtual.h5")
    with group(linked) as train:
        del train["payload"]
        train["payload"] = h5py.ExternalLink(str(path), "val/payload")
    with group(virtual) as train:
        del train["payload"]
        layout = h5py.VirtualLayout((4,), np.uint8)
        layout[:] = h5py.VirtualSource(str(path), "val/payload", (4,))
        train.create_virtual_dataset("payload", layout)
    for file in (linked, virtual):
        with pytest.raises(DataError, match=re.escape(f"{file}:train{MAPPED}")):
            open_source("hdf5", file)


def test_without_h5py(path, monkeypatch):
    monkeypatch.setitem(sys.modules, "h5py", None)
    wanted = "data=hdf5 needs the package 'h5py'; pip install 'effloop[hdf5]'"
    with pytest.raises(ConfigError, match=line(wanted)):
        open_source("hdf5", path)


class Shrunk(Copied):
    """Records that are fewer than they say."""

    def __init__(self, path: Path, off: int) -> None:
        super().__init__(open_source("hdf5", path))
        self.num_bytes += off


@pytest.mark.parametrize(("off", "came"), [(1, 503), (-1, 503), (-501, 3)])
def test_records_that_are_not_what_they_say(path, tmp_path, off, came):
    with pytest.raises(ValueError, match=line(f"records should have {503 + off:,} bytes, got {came:,} or more")):
        writers["hdf5"](tmp_path / "new", Dataset(["a", "b"], {"train": Shrunk(path, off)}, {}))

"""What every format that can be written has to do with targets that aren't classes: keep them to the bit."""

from pathlib import Path

import numpy as np
import pytest
from images import encode, photo
from plans import READ_BY, Listed, make_engine, make_plan, open_source

from effloop.cli.main import main
from effloop.data.image.header import read_header
from effloop.data.source import Kind, Source
from effloop.data.source.base import target_bytes
from effloop.data.source.storage.targets import Targets
from effloop.data.source.storage.writing import Dataset, Record, writers
from effloop.errors import DataError

FORMATS = pytest.mark.parametrize("name", sorted(writers))
KINDS = pytest.mark.parametrize("kind", ["flags", "numbers"])
SCANNED = ("lmdb", "parquet", "recordio", "tar", "tfrecord")
"""Formats whose files say all, also without EffLoop's index."""

VALUES = {
    "flags": np.array([[0, 1, 1], [0, 0, 0], [1, 1, 1], [1, 0, 0]], np.uint8),
    "numbers": np.array([[0.1, -1e-30, 3], [2**24 + 1, 1 / 3, 0], [-0.0, 65504, 7e37], [1, 2, 3]], np.float32),
}
NAMES = ("cat", "dög", "0")
KEYS = [b"a.jpg", b"in/b.png", b"\xff.jpg", b"d d.jpg"]


def write(name: str, kind: str, path: Path, values: np.ndarray | None = None) -> Path:
    """Four images with targets in `train`, the last of them in `val`, too."""
    rows = VALUES[kind] if values is None else values
    images = [encode(photo(30 + i, 40, i), "PNG" if i == 1 else "JPEG") for i in range(4)]
    records = [Record(*each) for each in zip(KEYS, [0] * 4, images, map(target_bytes, rows), strict=True)]
    targets = Targets(Kind(kind), NAMES)
    splits = {"train": Listed(records), "val": Listed(records[3:])}
    writers[name](path, Dataset(targets.classes, splits, {"payload": "original"}, targets, 4000))
    return path


def opened(name: str, root: Path, split: str = "train") -> Source:
    return open_source("csv" if name == "folder" else READ_BY.get(name, name), root, split)


def check(source: Source, kind: str) -> None:
    assert source.kind is Kind(kind)
    assert source.target_names == NAMES
    assert source.classes == (NAMES if kind == "flags" else ())
    assert source.targets.dtype.newbyteorder("=") == VALUES[kind].dtype
    np.testing.assert_array_equal(source.targets, VALUES[kind])
    assert [target_bytes(row) for row in source.targets] == [target_bytes(row) for row in VALUES[kind]]  # -0.0, too
    source.verify_index()


@FORMATS
@KINDS
def test_everything_comes_back(name, kind, tmp_path):
    root = write(name, kind, tmp_path / "set")
    source = opened(name, root)
    check(source, kind)
    if name != "folder":
        assert not source.targets.flags.owndata  # a view of the file
        assert [source.raw_key(index) for index in range(4)] == KEYS
        assert source.fingerprint() == opened("memmap", write("memmap", kind, tmp_path / "same")).fingerprint()
    assert opened(name, root, "val").targets.tolist() == VALUES[kind][3:].tolist()
    check(open_source("auto", root), kind)


@pytest.mark.parametrize("name", ["memmap", "n5"])  # n5 has the bytes of a number in the other order
@KINDS
def test_batches(name, kind, tmp_path):
    source = opened(name, write(name, kind, tmp_path / "set"))
    made = make_engine("inline", make_plan(source, batch=4))
    (batch,) = made.stream(0)
    np.testing.assert_array_equal(batch.targets, VALUES[kind][batch.ids])
    assert batch.targets.numpy().dtype == VALUES[kind].dtype
    made.close()


@pytest.mark.parametrize("name", SCANNED)
@KINDS
def test_without_the_index(name, kind, tmp_path):
    root = write(name, kind, tmp_path / "set")
    for index in root.glob("*.index"):
        index.unlink()
    check(opened(name, root), kind)


@FORMATS
@pytest.mark.parametrize(("kind", "value"), [("flags", 2), ("numbers", np.nan), ("numbers", -np.inf)])
def test_what_no_sample_may_have_is_not_written(name, kind, value, tmp_path):
    rows = VALUES[kind].copy()
    rows[2, 1] = value
    with pytest.raises(DataError, match=r"^\\xff\.jpg has (2|nan|-inf) for 'dög'; allowed are "):
        write(name, kind, tmp_path / "set", rows)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(pytest.param(name, "numbers", marks=[pytest.mark.slow] * (name not in SCANNED)) for name in sorted(writers)),
        ("tfrecord", "flags"),
    ],
)
def test_convert_there_and_back(name, kind, tmp_path):
    first, there, back = write("memmap", kind, tmp_path / "first"), tmp_path / "there", tmp_path / "back"
    assert main(["convert", f"data.root={first}", f"to={name}", f"out={there}"]) == 0
    assert main(["convert", f"data.root={there}", "to=memmap", f"out={back}"]) == 0
    if name == "folder":  # where keys may be others
        check(opened("memmap", back), kind)
    else:
        assert back.read_bytes() == first.read_bytes()


def test_re_encoded(tmp_path):
    first = write("memmap", "flags", tmp_path / "first")
    assert main(["convert", f"data.root={first}", "to=lmdb", f"out={tmp_path / 'set'}", "max_side=20"]) == 0
    source = opened("lmdb", tmp_path / "set")
    check(source, "flags")
    assert max(read_header(source.read(index)).width for index in range(4)) == 20
    assert main(["verify", f"data.root={tmp_path / 'set'}"]) == 0

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
from plans import line, open_source, read_bytes, write_records

from effloop.data.decode import decoders
from effloop.data.source.formats.memmap import PATH, EmbeddedSource, MemmapSource
from effloop.errors import ConfigError, DataError

TRAIN: list[tuple[bytes, int, bytes]] = [(b"a/1", 0, b"one"), (b"b/\xff\n", 1, b""), (b"b/3", 1, b"three" * 100)]
VAL: list[tuple[bytes, int, bytes]] = [(b"a/9", 0, b"nine")]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "set.effloop"
    write_records("memmap", path, ["a", "b"], train=TRAIN, val=VAL)
    return path


def test_round_trip(path: Path) -> None:
    source = open_source("memmap", path)
    assert source.classes == ("a", "b")
    assert source.labels.tolist() == [0, 1, 1]
    assert [read_bytes(source, i) for i in range(3)] == [data for _, _, data in TRAIN]
    assert [source.key(i) for i in range(3)] == ["a/1", r"b/\xff\n", "b/3"]
    assert source.where == f"{path}:train"
    assert read_bytes(open_source("memmap", path, "val"), 0) == b"nine"


def test_many_classes_and_records(tmp_path: Path) -> None:
    records = [(b"%d" % i, i % 300, b"%d" % (7 * i)) for i in range(1000)]
    write_records("memmap", tmp_path / "file", [str(i) for i in range(300)], train=records)
    source = open_source("memmap", tmp_path / "file")
    assert source.labels.dtype == np.uint16
    assert source.labels.tolist() == [i % 300 for i in range(1000)]
    assert read_bytes(source, 999) == b"6993"


def test_reading_copies_nothing(path: Path) -> None:
    data = open_source("memmap", path, checksums=False).read(0)
    assert isinstance(data, memoryview)
    assert data.readonly


def test_verify_finds_a_flipped_byte(path: Path, tmp_path: Path) -> None:
    whole = path.read_bytes()
    at = whole.index(b"three" * 100)
    damaged = tmp_path / "damaged"
    damaged.write_bytes(whole[: at + 17] + b"!" + whole[at + 18 :])
    good, bad = open_source("memmap", path), open_source("memmap", damaged)
    assert isinstance(good, MemmapSource)
    assert isinstance(bad, MemmapSource)
    for index in range(3):
        good.verify(index)
    bad.verify(0)
    for look in (bad.verify, bad.read):
        with pytest.raises(DataError, match=line("is damaged: its bytes don't match their checksum")):
            look(2)


@pytest.mark.parametrize("label", [2, 256])
def test_label_without_a_class(tmp_path: Path, label: int) -> None:
    with pytest.raises(DataError, match=line(f"k has the label {label}; allowed are 0 to 1")):
        write_records("memmap", tmp_path / "file", ["a", "b"], train=[(b"k", label, b"data")])
    assert list(tmp_path.iterdir()) == []


def test_unknown_split(path: Path) -> None:
    wanted = f"{path} has no split 'test'; it has train, val: set data.train_split or data.val_split"
    with pytest.raises(DataError, match=line(wanted)):
        open_source("memmap", path, "test")


def test_split_without_samples(tmp_path: Path) -> None:
    write_records("memmap", tmp_path / "file", ["a"], train=[], val=VAL)
    wanted = f"{tmp_path}/file:train has no samples; set data.train_split or data.val_split to a split that has"
    with pytest.raises(DataError, match=line(wanted)):
        open_source("memmap", tmp_path / "file")


def test_folder_instead_of_a_file(tmp_path: Path) -> None:
    wanted = f"data.root: '{tmp_path}' is a folder; data=memmap reads one file: set data.root=FILE"
    with pytest.raises(ConfigError, match=line(wanted)):
        open_source("memmap", tmp_path)


def test_foreign_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"PK\3\4" + bytes(1000))
    with pytest.raises(DataError, match=line(f"{tmp_path}/file is not a file written by EffLoop")):
        open_source("memmap", tmp_path / "file")


def test_index_of_a_folder_is_no_dataset(photos: Path, tmp_path: Path) -> None:
    open_source("folder", photos, index_dir=str(tmp_path / "cache"))
    (index,) = (tmp_path / "cache").iterdir()
    with pytest.raises(DataError, match="has no split 'train'; it has none"):
        open_source("memmap", index)


def test_a_source_is_not_unpickled_over_other_data(path: Path) -> None:
    pickled = pickle.dumps(open_source("memmap", path))
    write_records("memmap", path, ["a", "b"], train=TRAIN[::-1], val=VAL)
    wanted = f"{path}:train has changed since this run opened it; start the run again"
    with pytest.raises(DataError, match=line(wanted)):
        pickle.loads(pickled)


@pytest.mark.parametrize(("split", "count"), [("train", 1515), ("val", 341)])
def test_every_photograph_is_whole(split: str, count: int) -> None:
    source = open_source("embedded", split=split)
    assert isinstance(source, EmbeddedSource)
    assert len(source) == count
    assert source.classes == (
        *("dress", "hat", "longsleeve", "outwear", "pants"),
        *("shirt", "shoes", "shorts", "skirt", "t-shirt"),
    )
    assert set(source.labels.tolist()) == set(range(10))
    decoder = decoders.build(decoders["auto"].config(name="auto"))
    for index in range(count):
        source.verify(index)
        assert min(decoder.decode(source.read(index)).shape[:2]) == 96
        assert source.key(index).startswith(source.classes[source.labels[index]] + "/")


def test_it_stays_small_enough_for_a_package() -> None:
    assert PATH.stat().st_size <= 8 * 2**20


def test_it_has_no_root(tmp_path: Path) -> None:
    wanted = f"data.root: '{tmp_path}' is not used by data=embedded; drop it, or set data=auto"
    with pytest.raises(ConfigError, match=line(wanted)):
        open_source("embedded", tmp_path)

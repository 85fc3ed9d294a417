import pickle
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from plans import Copied, open_source, write_as

from effloop.data.source import DataConfig, sources
from effloop.data.source.base import NoSplitError, classes_without_samples
from effloop.data.source.splits import USUAL, check_same_classes, open_split
from effloop.data.source.storage import kept
from effloop.data.source.storage.kept import opening_once
from effloop.data.source.storage.writing import Dataset, writers
from effloop.errors import DataError, EffLoopError

PACKED = ("hdf5", "lmdb", "memmap", "parquet", "pth", "recordio", "tar", "tfrecord", "zarr")


@pytest.fixture
def uneven(photos: Path, tmp_path: Path) -> Path:
    """Classes b, c in train and a, b, d in val."""
    root = shutil.copytree(photos, tmp_path / "uneven")
    shutil.rmtree(root / "train/a")
    (root / "val/c").rename(root / "val/d")
    return root


def test_labels_count_the_classes_of_both(uneven):
    config = sources["folder"].config(name="folder", root=str(uneven), allow_missing_classes=True)
    train, val = (open_split(config, split) for split in ("train", "val"))
    assert train.classes == val.classes == ("b", "c", "a", "d")
    check_same_classes(train, val)
    assert (classes_without_samples(train), classes_without_samples(val)) == (["a", "d"], ["c"])
    for source in (train, val, pickle.loads(pickle.dumps(val))):
        for index in range(len(source)):
            assert source.target_name(index) == source.key(index)[0] == source.classes[source.labels[index]]
    plain = open_source("folder", uneven, "val")
    assert val.fingerprint()["bytes"] == plain.fingerprint()["bytes"]
    assert val.fingerprint() != plain.fingerprint()  # other labels
    assert train.fingerprint() == open_source("folder", uneven).fingerprint()


def test_given_classes_come_first(uneven):
    config = sources["folder"].config(name="folder", root=str(uneven), allow_missing_classes=True)
    assert open_split(config, "val", ["d", "c", "b", "a"]).classes == ("d", "c", "b", "a")
    assert open_split(config, "val", ["d"]).classes == ("d", "a", "b")


@pytest.mark.parametrize("name", ["lmdb", "tar", "tfrecord"])
def test_packed(name, photos, tmp_path):
    root = write_as(name, photos, tmp_path / "written")
    wanted = open_source(name, root, "val")
    config = sources[name].config(name=name, root=str(root), allow_missing_classes=True)
    source = open_split(config, "val", [*reversed(wanted.classes), "more"])
    assert [source.target_name(i) for i in range(len(source))] == [wanted.target_name(i) for i in range(len(wanted))]


def test_refused_unless_it_is_allowed(uneven):
    with pytest.raises(DataError, match=r"only in train: c; only in val: a, d; .*data.allow_missing_classes=true"):
        check_same_classes(open_source("folder", uneven), open_source("folder", uneven, "val"))


def config_of(root: Path, name: str = "folder", **options: Any) -> DataConfig:
    config = sources[name].config(name=name, root=str(root), **options)
    assert isinstance(config, DataConfig)
    return config


@pytest.fixture
def copy(photos: Path, tmp_path: Path) -> Path:
    return shutil.copytree(photos, tmp_path / "copy")


@pytest.mark.parametrize("name", ["valid", "validation", "dev", "eval", "test"])
def test_usual_names_are_found(name, copy):
    (copy / "train").rename(copy / "training")
    (copy / "val").rename(copy / name)
    train, val = (open_split(config_of(copy), split) for split in ("train", "val"))
    assert (train.where, val.where) == (f"{copy}/training", f"{copy}/{name}")
    assert train.note == f"data.train_split: there is no 'train', so 'training' is used: {copy}/training"
    assert val.note == f"data.val_split: there is no 'val', so '{name}' is used: {copy}/{name}"
    with pytest.raises(NoSplitError, match="no folder 'other'"):
        open_split(config_of(copy, val_split="other"), "val")  # it was set


@pytest.mark.parametrize("name", PACKED)
def test_usual_names_in_packed_formats(name, photos, tmp_path):
    splits = {"training": "train", "dev": "val"}
    found = {split: Copied(open_source("folder", photos, of)) for split, of in splits.items()}
    root = tmp_path / "written"
    writers[name](root, Dataset(found["dev"].source.classes, found, {"payload": "original"}))
    for split, of in (("train", "train"), ("val", "val")):
        source = open_split(config_of(root, name), split)
        assert source.fingerprint() == open_source("folder", photos, of).fingerprint()
    assert source.note.startswith("data.val_split: there is no 'val', so 'dev' is used")


def test_test_is_the_last_choice(copy):
    shutil.copytree(copy / "val", copy / "test")
    (copy / "val").rename(copy / "dev")
    assert open_split(config_of(copy), "val").where == f"{copy}/dev"
    assert open_split(config_of(copy), "test").where == f"{copy}/test"
    shutil.copytree(copy / "test", copy / "valid")
    with pytest.raises(NoSplitError, match=r"of valid, dev, set data.val_split to one"):
        open_split(config_of(copy), "val")


@pytest.mark.parametrize(
    "name", ["folder", "hdf5", "lmdb", "memmap", "parquet", "pth", "recordio", "tar", "tfrecord", "zarr"]
)
def test_one_split_is_divided_alike_in_all_formats(name, photos, tmp_path):
    wanted = open_split(config_of(photos, val=0.2, val_split=None), "val")
    root = photos / "train"
    if name != "folder":
        root, source = tmp_path / "written", open_source("folder", photos)
        writers[name](root, Dataset(source.classes, {"train": Copied(source)}, {"payload": "original"}))
        with pytest.raises(NoSplitError, match=r"or data.val=0.2, a fifth of the training samples$"):
            open_split(config_of(root, name), "val")
    train, val = (open_split(config_of(root, name, val=0.2), split) for split in ("train", "val"))
    assert val.fingerprint() == wanted.fingerprint()
    assert train.fingerprint()["samples"] == 40 - len(val)
    assert val.read(0) == wanted.read(0)
    assert "whole data" in train.note or name != "folder"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"val": 0.2}, "data.val: 0.2 divides the training split, but there is a validation split, {root}/val; drop"),
        ({"folds": 5, "fold": 0}, "data.folds: 5 divides the training split, but there is a validation split"),
        ({"val": 0.2, "train_split": "nope", "val_split": None}, "has no folder 'nope'"),
    ],
)
def test_division_refused(options, says, photos):
    with pytest.raises(EffLoopError, match=re.escape(says.format(root=photos))):
        open_split(config_of(photos, **options), "train")


def test_of_a_table_by_its_columns(photos, tmp_path):
    names = sorted(path.relative_to(photos / "train") for path in (photos / "train").rglob("*.jpg"))
    rows = [f"{name},{name.parts[0]},p{number // 3},{number % 2}" for number, name in enumerate(names)]
    table = tmp_path / "labels.csv"
    table.write_text("\n".join(["path,label,patient,fold", *rows]))
    options: dict[str, Any] = {"images": str(photos / "train"), "allow_missing_classes": True}
    train, val = (open_split(config_of(table, "csv", val=0.3, group="patient", **options), split) for split in USUAL)
    groups = [{number // 3 for number in part.ids.tolist()} for part in (train, val)]
    assert groups[0].isdisjoint(groups[1])
    assert len(groups[0] | groups[1]) == -(-len(names) // 3)
    val = open_split(config_of(table, "csv", fold=1, **options), "val")
    assert val.ids.tolist() == [*range(1, len(names), 2)]
    assert val.where == f"fold 1 of {tmp_path}/labels.csv"


def test_a_table_is_looked_at_once(photos, tmp_path, monkeypatch):
    names = sorted(path.relative_to(photos) for path in (photos / "train").rglob("*.jpg"))
    (tmp_path / "t.csv").write_text("\n".join(["path,label", *(f"{name},{name.parts[1]}" for name in names)]))
    config = config_of(tmp_path / "t.csv", "csv", images=str(photos), val=0.3)
    looks: list[bool] = []
    unchanged = kept.folders_unchanged
    monkeypatch.setattr(kept, "folders_unchanged", lambda index: looks.append(True) or unchanged(index))
    sizes = [len(open_split(config, split)) for split in USUAL]
    looks.clear()
    assert len(open_split(config, "val")) == sizes[1]
    assert len(looks) == 1
    with opening_once():
        assert [len(open_split(config, split)) for split in USUAL] == sizes
    assert len(looks) == 2
    (tmp_path / "t.csv").write_text("\n".join(["path,label", *(f"{name},{name.parts[1]}" for name in names[:20])]))
    assert sum(len(open_split(config, split)) for split in USUAL) == 20

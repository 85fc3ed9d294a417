from __future__ import annotations

import pickle
import shutil
from pathlib import Path

import pytest
from plans import open_source, write_as

from effloop.data.source import sources
from effloop.data.source.splits import check_same_classes, classes_without_samples, open_split
from effloop.errors import DataError


@pytest.fixture
def uneven(photos: Path, tmp_path: Path) -> Path:
    """Classes b, c in train and a, b, d in val."""
    root = shutil.copytree(photos, tmp_path / "uneven")
    shutil.rmtree(root / "train/a")
    (root / "val/c").rename(root / "val/d")
    return root


def test_labels_count_the_classes_of_both(uneven: Path) -> None:
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


def test_given_classes_come_first(uneven: Path) -> None:
    config = sources["folder"].config(name="folder", root=str(uneven), allow_missing_classes=True)
    assert open_split(config, "val", ["d", "c", "b", "a"]).classes == ("d", "c", "b", "a")
    assert open_split(config, "val", ["d"]).classes == ("d", "a", "b")


@pytest.mark.parametrize("name", ["lmdb", "tar", "tfrecord"])
def test_packed(name: str, photos: Path, tmp_path: Path) -> None:
    root = write_as(name, photos, tmp_path / "written")
    wanted = open_source(name, root, "val")
    config = sources[name].config(name=name, root=str(root), allow_missing_classes=True)
    source = open_split(config, "val", [*reversed(wanted.classes), "more"])
    assert [source.target_name(i) for i in range(len(source))] == [wanted.target_name(i) for i in range(len(wanted))]


def test_refused_unless_it_is_allowed(uneven: Path) -> None:
    with pytest.raises(DataError, match=r"only in train: c; only in val: a, d; .*data.allow_missing_classes=true"):
        check_same_classes(open_source("folder", uneven), open_source("folder", uneven, "val"))

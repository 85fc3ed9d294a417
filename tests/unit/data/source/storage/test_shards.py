from __future__ import annotations

from pathlib import Path

import pytest
from plans import line

from effloop.data.source.storage.shards import find_shards
from effloop.errors import DataError


def found(root: Path, split: str, *names: str, splits: tuple[str, ...] = ("train", "val")) -> list[str]:
    for name in names:
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).touch()
    return [str(file.relative_to(root)) for file in find_shards(root, split, ["*.tar"], splits)]


@pytest.mark.parametrize(
    "name", ["val.tar", "val-000.tar", "val2012_0.tar", "val_0.tar", "imagenet-val-0001.tar", "my.val.tar", "3val7.tar"]
)
def test_the_split_is_a_word(tmp_path: Path, name: str) -> None:
    assert found(tmp_path, "val", name, "other-0.tar") == [name]


@pytest.mark.parametrize(
    "name", ["carnival-train-000.tar", "validation-0.tar", "interval.tar", "val+0.tar", "vala.tar"]
)
def test_a_part_of_a_word_is_no_split(tmp_path: Path, name: str) -> None:
    assert found(tmp_path, "val", name) == []


def test_places_in_their_order(tmp_path: Path) -> None:
    assert found(tmp_path, "val", "x-val-0.tar", "x-val-1.tar") == ["x-val-0.tar", "x-val-1.tar"]
    assert found(tmp_path, "val", "val-1.tar", "val-0.tar") == ["val-0.tar", "val-1.tar"]
    assert found(tmp_path, "val", "val/anything.tar") == ["val/anything.tar"]


@pytest.mark.parametrize(("split", "other"), [("train", "val"), ("val", "train")])
def test_a_file_of_two_splits_is_refused(tmp_path: Path, split: str, other: str) -> None:
    wanted = (
        f"{tmp_path}/train-val-0.tar may be of the split '{split}' or '{other}', by its name; rename it, or put the "
        "files of each split into a folder of that name"
    )
    with pytest.raises(DataError, match=line(wanted)):
        found(tmp_path, split, "train-val-0.tar")


def test_a_split_whose_name_has_anothers_in_it(tmp_path: Path) -> None:
    names, splits = ("train-0.tar", "train-small-0.tar"), ("train", "train-small")
    assert found(tmp_path, "train", *names, splits=splits) == ["train-0.tar"]
    assert found(tmp_path, "train-small", *names, splits=splits) == ["train-small-0.tar"]


def test_names_are_no_patterns(tmp_path: Path) -> None:
    assert found(tmp_path, "v[a]l*", "val-0.tar", "v[a]l*-1.tar", splits=()) == ["v[a]l*-1.tar"]

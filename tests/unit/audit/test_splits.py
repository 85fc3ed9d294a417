import csv
import random
from pathlib import Path

import pytest
from plans import open_source

from effloop.audit import splits
from effloop.data.source import Source

Rows = list[tuple[str, ...]]


def _open(folder: Path, header: str, **rows: Rows) -> dict[str, Source]:
    """A table for each split, of images that are empty."""
    for split, texts in rows.items():
        with (folder / f"{split}.csv").open("w", newline="") as file:
            table = csv.writer(file)
            table.writerow(["path", *header.split()])
            table.writerows([f"{split}{number}.jpg", *row] for number, row in enumerate(texts))
        for number in range(len(texts)):
            (folder / f"{split}{number}.jpg").touch()
    return {split: open_source("csv", folder, split, allow_missing_classes=True) for split in rows}


def test_classes_and_groups(tmp_path):
    train: Rows = [(name, f"p{n}", str(n % 3)) for name, count in (("Cat", 300), ("dog", 100)) for n in range(count)]
    train += [(name, "", "0") for name in ("cat", "cat", "Catt", "dgo", "elk", "elk", "A", "a")]
    val: Rows = [(name, f"p{n + 298}", "0") for name, count in (("Cat", 50), ("dog", 50)) for n in range(count)]
    sources = _open(tmp_path, "label patient_id age_group", train=train, val=val)
    found = splits.find(sources)
    assert [f"{each.kind}: {each.text}" for each in found] == [
        "group: 2 values of 'patient_id' in both splits, with 2 of 408 train and 4 of 100 val images: p298, p299",
        "few: images of 'A': 1 in train, 0 in val",
        "few: images of 'Catt': 1 in train, 0 in val",
        "few: images of 'a': 1 in train, 0 in val",
        "few: images of 'cat': 2 in train, 0 in val",
        "few: images of 'dgo': 1 in train, 0 in val",
        "few: images of 'elk': 2 in train, 0 in val",
        "spelling: 'cat' may be 'Cat': 2 and 350 images",
        "spelling: 'Catt' may be 'Cat': 1 and 350 images",
        "shares: 'dog' is 24.5% of train and 50.0% of val",
    ]
    named = {place.split: sources[place.split].key(place.sample) for place in found[0].places}
    assert named == {"train": "train298.jpg", "val": "val0.jpg"}
    assert {sources[place.split].target_name(place.sample) for place in found[4].places} == {"cat"}


@pytest.mark.parametrize(
    ("name", "other", "found"),
    [
        ("T-Shirt ", "t shirt", True),
        ("cafe\N{COMBINING ACUTE ACCENT}", "Café", True),
        ("elphant", "elephant", True),
        ("elehpant", "elephant", True),
        ("elephent", "elephant", True),
        ("car", "cat", False),
        ("type b", "type a", False),
        ("class 11", "class 1", False),
        ("B", "b", False),
    ],
)
def test_spelling(name, other, found, tmp_path):
    train: Rows = [(other,)] * 200 + [(name,)] * 10
    kinds = {each.kind for each in splits.find(_open(tmp_path, "label", train=train))}
    assert ("spelling" in kinds) is found


@pytest.mark.parametrize("header", ["label", "cat dog", "age"])
def test_nothing_is_said_of_splits_that_differ_by_chance(header, tmp_path):
    """Of 10 classes, flags and numbers."""
    rng = random.Random(0)

    def row() -> tuple[str, ...]:
        return {
            "label": (f"class {int(10 * rng.random() ** 1.5)}",),
            "cat dog": (str(rng.randrange(2)), str(rng.randrange(2))),
            "age": (str(rng.random()),),
        }[header]

    rows = {split: [row() for _ in range(count)] for split, count in (("train", 600), ("val", 150))}
    assert splits.find(_open(tmp_path, header, **rows)) == []

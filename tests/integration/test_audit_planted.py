"""Copies that are planted among photographs are found, all of them and no others, and can be left out."""

import csv
import json
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest
from copied import EDITS, plant
from runs import composed, train

from effloop.cli.main import main
from effloop.data.source.base import USUAL
from effloop.data.source.splits import open_part

SURE = ("equal bytes", "equal pixels", "re-saved", "cropped", "mirrored", "turned")  # not half of 96


def photographs(root: Path, every: int = 1) -> Path:
    """Every so many of the photographs inside the package, as ROOT/SPLIT/LABEL/FILE."""
    for split in USUAL:
        source = open_part(composed("data=embedded").data, split)
        for index in range(0, len(source), every):
            path = root / split / source.key(index)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(source.read(index))
    return root


def clusters(table: Path) -> dict[str, list[set[str]]]:
    """SPLIT/NAME of the images of each cluster of copies, by the kind of finding."""
    found: dict[tuple[str, str], set[str]] = defaultdict(set)
    with table.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["finding"] in ("leak", "contradiction", "copy"):
                found[row["finding"], row["group"]].add(f"{row['split']}/{row['name']}")
    by_kind: dict[str, list[set[str]]] = defaultdict(list)
    for (kind, _), names in found.items():
        by_kind[kind].append(names)
    return by_kind


@pytest.mark.slow
def test_planted_copies_are_found_and_left_out(here, tmp_path):
    root = tmp_path / "planted"
    copies = plant(photographs(tmp_path / "photographs", 31), root, 24, SURE)
    assert main(["audit", f"data.root={root}", "labels=false"]) == 0
    found = clusters(here / "audit.csv")
    wanted: dict[str, list[set[str]]] = defaultdict(list)
    excluded: Counter[str] = Counter()
    for copy in copies:
        (split, label), (of_split, of_label) = copy.path.parts[:2], copy.original.parts[:2]
        kinds = ["contradiction"] * (label != of_label) + ["leak"] * (split != of_split)
        for kind in kinds or ["copy"]:
            wanted[kind].append({str(copy.path), str(copy.original)})
        excluded += Counter([split, of_split] if label != of_label else [min(split, of_split)])
    assert {kind: sorted(map(sorted, each)) for kind, each in found.items()} == {
        kind: sorted(map(sorted, each)) for kind, each in wanted.items()
    }
    assert train(root, "data.exclude=audit.csv", "data.allow_missing_classes=true", "epochs=1", "run=run") == 0
    data = json.loads((here / "outputs" / "run" / "data.json").read_text())
    for split in USUAL:
        assert data[split]["samples"] == len([*(root / split).glob("*/*")]) - excluded[split]


@pytest.mark.nightly
def test_recall_of_planted_copies(here, tmp_path):
    """500 copies of 7 kinds among 1,856 photographs, of which five pairs show the same thing already."""
    root = tmp_path / "planted"
    copies = plant(photographs(tmp_path / "photographs"), root, 500, [kind for kind in EDITS if kind != "half"])
    assert main(["audit", f"data.root={root}", "labels=false"]) == 0
    found = [names for each in clusters(here / "audit.csv").values() for names in each]
    hits: dict[str, list[bool]] = defaultdict(list)
    for copy in copies:
        hits[copy.kind].append(any({str(copy.path), str(copy.original)} <= names for names in found))
    assert float(np.mean([hit for kind in SURE if kind in EDITS for hit in hits[kind]])) > 0.98  # 284 of 287
    assert min(float(np.mean(each)) for each in hits.values()) > 0.9
    original = {str(copy.path): str(copy.original) for copy in copies}
    shown = [{original.get(name, name) for name in names} for names in found]
    assert sum(len(names) > 1 for names in shown) <= 5

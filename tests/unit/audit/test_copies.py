"""Images that are there twice."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from effloop.audit import copies
from effloop.audit.findings import Finding
from effloop.audit.scan import scan
from effloop.data.source.auto import AutoConfig
from effloop.data.source.splits import open_split
from effloop.errors import DataError
from tests.copied import KINDS, Copy, plant

TEXTS = {
    **{"equal bytes": "the same bytes", "equal pixels": "the same pixels", "cropped": "cropped"},
    **{"mirrored": "mirrored", "turned": "turned by"},
}


def _picture(seed: int) -> Image.Image:
    """(96, 128) of coarse and fine detail."""
    rng = np.random.default_rng(seed)
    layers = [Image.fromarray(rng.integers(0, 255, (n, n, 3), np.uint8)).resize((128, 96), 3) for n in (4, 12, 40)]
    return Image.blend(Image.blend(layers[0], layers[1], 0.4), layers[2], 0.25)


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Copy]]:
    folder = tmp_path_factory.mktemp("copies")
    for number in range(48):
        path = folder / f"given/{('train', 'val')[number % 3 == 2]}/{'ab'[number % 2]}/{number:02d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        _picture(number).save(path)
    return folder / "data", plant(folder / "given", folder / "data", 40)


def _found(root: Path) -> tuple[list[Finding], dict[tuple[str, int], str]]:
    splits = {name: open_split(AutoConfig(root=str(root)), name) for name in ("train", "val")}
    found = copies.find(splits, scan(splits, str(root.parent / "kept"), 1), 2)
    return found, {(name, at): f"{name}/{each.key(at)}" for name, each in splits.items() for at in range(len(each))}


@pytest.mark.parametrize("cell", [2000, 8])
def test_planted_copies(planted, cell, monkeypatch):
    monkeypatch.setattr(copies, "_CELL", cell)
    root, made = planted
    found, names = _found(root)
    members = [(each, {names[place] for place in each.places}) for each in found]
    pairs = {str(copy.path): {str(copy.original), str(copy.path)} for copy in made}
    assert all(group in pairs.values() for _, group in members)  # and nothing else
    for copy in made:
        kinds = {each.kind: each for each, group in members if str(copy.path) in group}
        (split, label), (other, its) = copy.original.parts[:2], copy.path.parts[:2]
        wanted = {"leak": split != other, "contradiction": label != its}
        assert {*kinds} == ({kind for kind, there in wanted.items() if there} or {"copy"}), copy
        assert all(TEXTS.get(copy.kind, "near: 0.9") in each.text for each in kinds.values()), copy
        assert all(place.split == "train" for place in kinds["leak"].exclude) if "leak" in kinds else True
    assert {copy.kind for copy in made} == {*KINDS}


def test_groups_of_several(tmp_path):
    """The largest stays; a logo or a brighter copy of a copy is of the same group, and two blank images of none."""
    for name, side in (("a", 128), ("b", 96), ("c", 64)):
        path = tmp_path / f"data/train/x/{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        _picture(1).resize((side, side)).save(path)
        Image.new("RGB", (side, side), "white").save(path.with_name(f"blank {name}.png"))
    (tmp_path / "data/val/x").mkdir(parents=True)
    _picture(2).save(tmp_path / "data/val/x/d.png")
    (found,), names = _found(tmp_path / "data")
    assert [names[place][-5] for place in found.places] == ["a", "b", "c"]
    assert found.exclude == found.places[1:]


def test_small_images_are_not_aligned(tmp_path):
    """Of 28 x 28 pixels a digit's window looks like another digit; the same pixels are found."""
    folder = tmp_path / "data/train/x"
    folder.mkdir(parents=True)
    digit = _picture(3).resize((28, 28))
    digit.save(folder / "a.png")
    digit.save(folder / "b.bmp")
    digit.crop((2, 2, 27, 27)).resize((28, 28)).save(folder / "c.png")
    (tmp_path / "data/val/x").mkdir(parents=True)
    _picture(2).save(tmp_path / "data/val/x/d.png")
    (found,), names = _found(tmp_path / "data")
    assert (found.text, [names[place][-5] for place in found.places]) == ("the same pixels", ["a", "b"])


def test_a_file_that_goes_between_the_scan_and_the_search(tmp_path):
    folder = tmp_path / "data/train/x"
    folder.mkdir(parents=True)
    for name in "ab":
        _picture(3).save(folder / f"{name}.png")
    split = open_split(AutoConfig(root=str(tmp_path / "data")), "train")
    records = scan({"train": split}, str(tmp_path / "kept"), 1)
    (folder / "b.png").unlink()
    with pytest.raises(DataError, match=r"/b\.png [^/]*$"):
        copies.find({"train": split}, {"train": records["train"]}, 1)

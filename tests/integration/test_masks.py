"""Bad masks: a line on standard error, exit code 2, before the first step."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from images import photo
from masked import make_masks, mask_of, write_pair
from numpy.typing import NDArray
from PIL import Image
from plans import write_rows
from runs import rows

from effloop.cli.main import main

RUN = ("device=cpu", "num_workers=0", "engine=inline", "image_size=16", "batch_size=2", "epochs=1")


def _save(values: NDArray[np.uint8] | NDArray[np.uint16]) -> Callable[[Path], None]:
    return lambda root: Image.fromarray(values).save(root / "train/masks/d.png")


def _cut(root: Path, names: str = "d.png") -> None:
    for path in (root / "train/masks").rglob(names):
        path.write_bytes(path.read_bytes()[:-30])


def _colours(root: Path) -> None:
    _save(np.full((33, 40, 3), 7, np.uint8))(root)
    (root / "colors").write_text("# R G B name\n0 0 0 sky\n9 9 9 tree\n8 8 8 lawn\n")


def _empty(root: Path) -> None:
    for path in (root / "train/masks").rglob("*.png"):
        path.unlink()


BAD = {
    "16 bits": (_save(np.zeros((33, 40), np.uint16)), [], "d.jpg has a mask that is a PNG of 16 bits; allowed are"),
    "RGB": (_save(photo(33, 40, 0)), [], "d.jpg has a mask in RGB, whose colours say no class; set data=masks"),
    "colour": (_colours, ["data.colors={root}/colors"], "d.jpg has a mask with the colour 7 7 7 (row 0, column 0)"),
    "value": (_save(np.full((33, 40), 3, np.uint8)), [], "d.png has the value 3; allowed are 0 to 2, and 255"),
    "size": (_save(mask_of(40, 33, 0)), [], "d.jpg has a mask of 40 x 33 pixels (height x width), the image has 33"),
    "cut": (
        _cut,
        [],
        "bytes; copy or write it again; set on_error=skip max_errors=1 to do without it; effloop verify data.root=",
    ),
    "no masks": (_empty, [], "train/masks has no masks"),
    "no mask": (lambda root: (root / "train/masks/d.png").unlink(), [], "1 of 4 have no mask in "),
    "twice": (lambda root: Image.new("L", (40, 33)).save(root / "train/masks/d.pgm"), [], "d.pgm and d.png differ in"),
    "colours": (
        lambda root: (root / "colors").write_text("0 0 0 sky\n0 0 256 tree\n"),
        ["data.colors={root}/colors"],
        "colors, line 2: '0 0 256 tree' is not like `128 64 0 name`",
    ),
    "classes": (lambda _: None, ["data.classes=[]"], "data.classes: 0 names are not allowed"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_masks(name, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    root = make_masks(tmp_path / "set")
    spoil, options, says = BAD[name]
    spoil(root)
    monkeypatch.chdir(tmp_path)
    words = [f"data.root={root}", *(option.format(root=root) for option in options)]
    assert main([*words, *RUN]) == 2
    err = capsys.readouterr().err
    assert says in err
    assert len(err.splitlines()) == 1


@pytest.mark.nightly
def test_damaged_masks_are_skipped(tmp_path, monkeypatch, capsys):
    """As damaged images are: listed, counted and replaced, by a folder and by a table; `verify` lists each."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    root = make_masks(tmp_path / "set", {"train": 8, "val": 6})
    for name in ("train/masks/0001.png", "train/masks/0006.png", "val/masks/0002.png"):
        (root / name).write_bytes((root / name).read_bytes()[:60])
    table = write_rows(
        tmp_path / "t.csv",
        [
            {"path": str(path), "mask": str(path.parents[1] / "masks" / f"{path.stem}.png"), "split": path.parts[-3]}
            for path in sorted(root.rglob("*.jpg"))
        ],
    )
    (tmp_path / "classes.txt").write_text((root / "classes.txt").read_text())
    for data in (root, table):
        words = [f"data.root={data}", *RUN, "task.class_weights=balanced"]
        assert main([*words, "on_error=skip", "max_errors=2", f"run={data.stem}"]) == 0
        run = tmp_path / "outputs" / data.stem
        assert json.loads((run / "summary.json").read_text())["skipped"] == {"train": 2, "val": 1}
        listed = [(row["split"], Path(row["name"]).name) for row in rows(run, "skipped.jsonl")]
        assert sorted(listed) == [("train", "0001.jpg"), ("train", "0006.jpg"), ("val", "0002.jpg")]
        capsys.readouterr()
        assert main([*words, "on_error=skip", "max_errors=1", "run=few"]) == 2
        assert "2 of the 8 samples looked at" in capsys.readouterr().err
        assert main(["verify", f"data.root={data}"]) == 1
        found = [line for line in capsys.readouterr().out.splitlines() if "has a mask that is a truncated PNG" in line]
        assert len(found) == 3
    for number in range(1, 5):
        write_pair(root / "train", f"000{number}.jpg", photo(20, 20, 0), np.full((20, 20), 7, np.uint8))
    assert main(["verify", f"data.root={root}"]) == 1
    assert capsys.readouterr().out.count("has a mask with the value 7; allowed are 0 to 2, and 255") == 4


@pytest.mark.slow
def test_verify_and_skip(tmp_path, monkeypatch, capsys):
    """A mask of another size is one problem among others, and `skip_bad` leaves its sample out."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    root = make_masks(tmp_path / "set")
    write_pair(root / "train", "d.jpg", photo(33, 40, 0), mask_of(40, 33, 0))
    assert main(["verify", f"data.root={root}"]) == 1
    assert "d.jpg has a mask of 40 x 33 pixels" in capsys.readouterr().out
    words = ["convert", f"data.root={root}", "to=memmap", f"out={tmp_path / 'packed'}"]
    assert main(words) == 2
    assert "d.jpg has a mask of 40 x 33 pixels" in capsys.readouterr().err
    assert main([*words, "skip_bad=true"]) == 0
    assert main(["verify", f"data.root={tmp_path / 'packed'}"]) == 0
    damaged = bytearray((tmp_path / "packed").read_bytes())
    at = damaged.index(b"\x89PNG", damaged.index(b"IEND"))  # that of the second mask or image
    damaged[at + 50] ^= 1
    (tmp_path / "packed").write_bytes(damaged)
    assert main(["verify", f"data.root={tmp_path / 'packed'}"]) == 1
    assert "doesn't match" in capsys.readouterr().out

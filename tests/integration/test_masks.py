"""Bad masks: a line on standard error, exit code 2, before the first step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from images import photo
from masked import make_masks, mask_of, write_pair
from numpy.typing import NDArray
from PIL import Image

from effloop.cli.main import main

RUN = ("device=cpu", "num_workers=0", "engine=inline", "image_size=16", "batch_size=2", "epochs=1")


def _save(values: NDArray[np.uint8] | NDArray[np.uint16]) -> Callable[[Path], None]:
    return lambda root: Image.fromarray(values).save(root / "train/masks/d.png")


def _cut(root: Path) -> None:
    path = root / "train/masks/d.png"
    path.write_bytes(path.read_bytes()[:-30])


def _colours(root: Path) -> None:
    _save(np.full((33, 40, 3), 7, np.uint8))(root)
    (root / "colors").write_text("# R G B name\n0 0 0 sky\n9 9 9 tree\n")


def _empty(root: Path) -> None:
    for path in (root / "train/masks").rglob("*.png"):
        path.unlink()


BAD = {
    "16 bits": (_save(np.zeros((33, 40), np.uint16)), [], "d.png is a PNG of 16 bits; allowed are 1 to 8"),
    "RGB": (_save(photo(33, 40, 0)), [], "d.png is a mask in RGB, whose colours say no class; set data=masks"),
    "colour": (_colours, ["data.colors={root}/colors"], "d.png is a mask with the colour 7 7 7 (row 0, column 0)"),
    "value": (_save(np.full((33, 40), 3, np.uint8)), [], "d.png has the value 3; allowed are 0 to 2, and 255"),
    "size": (
        _save(mask_of(40, 33, 0)),
        [],
        "d.jpg has a mask of 40 x 33 pixels (height x width), the image has 33 x 4",
    ),
    "cut": (_cut, [], "d.png is a truncated PNG"),
    "no masks": (_empty, [], "train/masks has no masks"),
    "no mask": (lambda root: (root / "train/masks/d.png").unlink(), [], "1 of 4 have no mask in "),
    "no image": (lambda root: (root / "train/images/d.jpg").unlink(), [], "1 of 4 have no image in "),
    "twice": (
        lambda root: Image.new("L", (40, 33)).save(root / "train/masks/d.pgm"),
        [],
        "d.pgm and d.png differ in their extensions only",
    ),
    "names": (lambda root: (root / "classes.txt").write_text("a\n\nb\n"), [], "classes.txt has 3 lines, should be"),
    "colours": (
        lambda root: (root / "colors").write_text("0 0 0 sky\n0 0 256 tree\n"),
        ["data.colors={root}/colors"],
        "colors, line 2: '0 0 256 tree' is not like `128 64 0 name`",
    ),
    "no colours": (lambda _: None, ["data.colors={root}/none"], "data.colors: "),
    "classes": (lambda _: None, ["data.classes=[]"], "data.classes: 0 names are not allowed"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_masks(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
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


def test_verify_and_skip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
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

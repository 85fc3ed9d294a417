from __future__ import annotations

import json
from pathlib import Path

import pytest
from runs import TINY

from effloop.cli import main


def test_figures(photos: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "vs=processes,torchvision,dali,simplejpeg",
        "repeats=2",
        "out=result.json",
        f"data.root={photos}",
        *TINY,
        "num_workers=1",
    ]
    assert main(["bench", "what=loader", *words]) == 0
    result = json.loads((here / "result.json").read_text())
    assert (result["batch_size"], result["image_size"], result["num_workers"]) == (8, 16, 1)
    assert list(result["loaders"]) == ["effloop", "processes", "torchvision", "dali", "simplejpeg"]
    for figures in result["loaders"].values():
        assert len(figures["per_s"]) == 2
        assert min(figures["per_s"]) > 0
        assert all(0 <= value <= 1 for value in figures["waited"])
        assert all(value > 0 for value in figures["cores_used"])
        assert all(1e7 < value < 1e10 for value in figures["bytes"])
    out = capsys.readouterr().out
    assert all(f"│ {name}" in out for name in result["loaders"])
    assert max(map(len, out.splitlines())) <= 120


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (
            "vs=torchvison",
            "vs: no peer 'torchvison'; have none, processes, torchvision, pillow, dali, ffcv, simplejpeg; did",
        ),
        ("vs=pillow", "folder: train is no folder with a folder for each class, as pillow needs; set folder=ROOT"),
        ("vs=dali folder=nowhere", "folder: nowhere/train is no folder with a folder for each class, as dali needs"),
    ],
)
def test_refusals(words: str, wanted: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "what=loader", *words.split()]) == 2
    out, err = capsys.readouterr()
    assert wanted in err
    assert (err.count("\n"), out) == (1, "")


def test_ffcv_does_the_same_as_we(photos: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "what=loader", "vs=ffcv", f"data.root={photos}", *TINY]) == 2
    wanted = "it is compared on what was converted with quality=NUMBER or payload=raw; set data.root"
    assert capsys.readouterr().err == f"effloop: ffcv: {wanted}\n"

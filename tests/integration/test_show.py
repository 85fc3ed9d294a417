"""`effloop show`: a picture of what the model will see."""

import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from images import occurs
from numpy.typing import NDArray
from PIL import Image
from runs import call, make_photos, once

import effloop
from effloop.cli.main import main
from effloop.data.loader import Loader

MEAN, STD = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])


def show(photos: Path, *args: str) -> int:
    return main(once("show", f"data.root={photos}", "image_size=40", "batch_size=8", "num_workers=0", *args))


def picture(run: Path) -> NDArray[np.uint8]:
    with Image.open(run / "samples.png") as image:
        assert (image.format, image.mode) == ("PNG", "RGB")
        return np.asarray(image)


def loader(photos: Path, *overrides: str, split: str = "train") -> Loader:
    return effloop.build_loader(
        effloop.compose([f"data.root={photos}", "image_size=40", "batch_size=8", *overrides]), split
    )


def check_tiles(found: NDArray[np.uint8], shown: Loader, samples: list[int], epochs: int) -> None:
    """Every tile is what the model sees of that sample in that epoch."""
    for epoch in range(epochs):
        images = shown.samples(samples, epoch).images.permute(0, 2, 3, 1).numpy()
        wanted = np.rint((images * STD + MEAN) * 255)
        for row in range(len(samples)):
            assert occurs(found, wanted[row])


def test_a_run_folder_of_its_own(here, photos, capsys):
    assert show(photos, "run=a/x", "seed=5") == 0
    run = here / "outputs/a/x"
    assert sorted(path.name for path in run.iterdir() if path.suffix != ".diff") == [
        ".lock",
        "config.yaml",
        "data.json",
        "environment.json",
        "overrides.yaml",
        "samples.png",
    ]
    found = picture(run)
    check_tiles(found, loader(photos, "seed=5"), [0, 5, 11, 16, 22, 27, 33, 39], 8)
    out = capsys.readouterr().out
    assert out.startswith(f"outputs/a/x/samples.png: 8 x 8 images of 40 pixels, with names {found.shape[1]} x ")
    assert out.count("\n") == 1
    assert yaml.safe_load((run / "config.yaml").read_text())["seed"] == 5
    assert yaml.safe_load((run / "overrides.yaml").read_text())[-1] == "seed=5"
    data = json.loads((run / "data.json").read_text())
    assert (data["classes"], data["train"]["samples"]) == (["a", "b", "c"], 40)


@pytest.mark.parametrize(
    "override", ["augment.ops.flip.p=1", "augment.device=gpu", "engine=processes", "decode=pillow", "data.mean=[0,0,0]"]
)
def test_overrides(here, photos, override):
    assert show(photos, "run=x", "samples=3", "epochs=2", override) == 0
    overrides = [override] if "mean" not in override else []
    check_tiles(picture(here / "outputs/x"), loader(photos, *overrides), [0, 19, 39], 2)


def test_the_same_every_time(here, photos):
    args = ("samples=3", "epochs=3", "augment.mixup=1")
    assert show(photos, *args, "run=x") == 0
    code, out, err = call("show", f"data.root={photos}", "image_size=40", "run=z", "num_workers=2", *args, cwd=here)
    assert (code, err) == (0, "")
    assert out.startswith("outputs/z/samples.png: 3 x 3 images of 40 pixels")
    found = [(here / "outputs" / run / "samples.png").read_bytes() for run in "xz"]
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["split=tran"], "split: 'tran' is not allowed; set train or val; did you mean 'train'?"),
        (["samples"], "show: 'samples' has no value; set samples=N or drop it"),
        (["samples=65"], "samples: '65' is not allowed; set a whole number from 1 to 64"),
        (["sampels=3"], "'sampels'"),
        (["-m", "seed=1,2"], "show: a picture is of a single run; leave out -m"),
        (
            ["image_size=600", "samples=64", "epochs=64"],
            "samples: 40 x 64 epochs of image_size=600 are 921.6 million pixels; at most 60 are",
        ),
    ],
)
def test_refusals(here, photos, args, words, capsys):
    assert show(photos, *args) == 2
    out, err = capsys.readouterr()
    assert words in err
    assert err.count("\n") == 1
    assert out == ""
    assert not (here / "outputs").exists()


def test_a_sample_that_cannot_be_decoded(here, tmp_path, capsys):
    root = make_photos(tmp_path / "photos", train=9)
    bad = root / "train/c/008.jpg"
    bad.write_bytes(bad.read_bytes()[:200])
    assert show(root, "data.check=0") == 2
    err = capsys.readouterr().err
    assert str(bad) in err
    assert err.count("\n") == 1
    assert not (here / "outputs").exists()

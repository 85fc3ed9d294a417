"""Images that aren't square, or grey: the same batches by every engine, and a run, its exported file and pictures."""

import csv
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from plans import pairwise
from runs import TINY, once, train

import effloop
from effloop.cli.main import main
from effloop.config import Config

WIDE = "image_size=[24,40]"


def config_of(photos: Path, *overrides: str) -> Config:
    return effloop.compose(once(f"data.root={photos}", *TINY, *overrides))


def images(config: Config, split: str) -> torch.Tensor:
    with closing(effloop.build_loader(config, split)) as loader:
        return torch.cat([batch.images.clone() for batch in loader.epoch(1)])


COMBINED = pairwise(
    ("train", "val"), ("native_rand", "torchvision"), ("crop", "letterbox", "squash"), (1, 3), ("none", "pixels")
)


@pytest.mark.parametrize(
    ("split", "augment", "evaluation", "channels", "cache"),
    [pytest.param(*each, marks=pytest.mark.nightly if number % 3 else ()) for number, each in enumerate(COMBINED)],
)
def test_engines_agree(photos, split, augment, evaluation, channels, cache):
    words = [WIDE, f"augment={augment}", f"augment.eval={evaluation}", f"data.channels={channels}"]
    wanted = images(config_of(photos, *words, "engine=inline"), split)
    assert wanted.shape[1:] == (channels, 24, 40)
    for engine in ("threads", "processes"):
        more = [f"engine={engine}", "num_workers=2", f"data.cache={cache}", "data.cache_gb=0.001"]
        assert torch.equal(images(config_of(photos, *words, *more), split), wanted)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.nightly
def test_dali_is_near(photos, channels):
    pytest.importorskip("nvidia.dali")
    words = [WIDE, f"data.channels={channels}", "data.mean=null", "data.std=null", "augment.eval=squash"]
    for split in ("train", "val"):
        found, wanted = (images(config_of(photos, *words, f"engine={name}"), split) for name in ("dali", "inline"))
        assert found.shape == wanted.shape
        assert (found.float() - wanted.float()).abs().mean() < 2


@pytest.mark.slow  # the grey one isn't
def test_a_run_its_file_and_its_picture(photos, here, capsys):
    words = ["run=run", "epochs=3", "progressive=[16,[16,24],[24,40]]", "augment.cutmix=1", "augment.eval=letterbox"]
    assert train(photos, WIDE, *words) == 0
    assert main(["export", "outputs/run", "to=onnx"]) == 0
    scores = []
    for trained in ("outputs/run", "outputs/run/model.onnx"):
        assert main(["predict", trained, str(photos / "val"), "out=scores.csv", "scores=true"]) == 0
        with Path("scores.csv").open(newline="") as file:
            scores.append([float(row["score"]) for row in csv.DictReader(file)])
    np.testing.assert_allclose(*scores, atol=1e-5)
    assert effloop.load("outputs/run").image_size == (24, 40)
    assert main(["show", f"data.root={photos}", WIDE, "samples=2", "epochs=3", "run=show"]) == 0
    with Image.open("outputs/show/samples.png") as picture:
        assert (picture.format, picture.mode) == ("PNG", "RGB")
    capsys.readouterr()
    assert main(["eval", "outputs/run/model.onnx", "image_size=[40,24]"]) == 2
    assert "image_size: 40x24, but the exported file takes 24x40" in capsys.readouterr().err


@pytest.mark.nightly
def test_a_grey_run_its_file_and_its_picture(photos, here):
    words = ["data.channels=1", "run=run", "epochs=1", "augment.mixup=0.2", "augment.cutmix=1", "augment=native_colour"]
    assert train(photos, *words) == 0
    assert main(["export", "outputs/run", "to=pt2"]) == 0
    model, exported = effloop.load("outputs/run"), effloop.load("outputs/run/model.pt2")
    pixels = np.full((30, 40, 1), 90, np.uint8)
    given = [str(photos / "val/a/000.jpg"), Image.fromarray(pixels[:, :, 0]), pixels, pixels.repeat(3, axis=2)]
    found = model.preprocess(given)
    assert found.shape == (4, 1, 16, 16)
    torch.testing.assert_close(found[1:], torch.full((3, 1, 16, 16), (90 / 255 - 0.449) / 0.226))
    torch.testing.assert_close(model(found), exported(found), rtol=1e-4, atol=1e-5)
    assert main(["show", f"data.root={photos}", "data.channels=1", "samples=2", "epochs=1", "run=show"]) == 0
    with Image.open("outputs/show/samples.png") as picture:
        tile = np.asarray(picture.convert("RGB")).astype(int)[26:60, 192:250]
    assert tile.std() > 10
    assert (tile[:, :, 0] == tile[:, :, 2]).all()


def test_weights_of_a_run_in_colour_start_a_grey_one(photos, finished, here):
    config = config_of(photos, "data.channels=1", f"model.weights={finished}")
    trainer = effloop.build_trainer(config)
    colour = torch.load(finished / "checkpoints/best.ckpt", weights_only=True)["model"]
    (name, kernel), *_ = colour.items()
    torch.testing.assert_close(trainer.model.state_dict()[name], kernel.sum(1, keepdim=True))

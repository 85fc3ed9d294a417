"""A module and batches that are given to `build_trainer`."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from runs import composed
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import effloop
from effloop.assemble.given import GivenSource
from effloop.cli.main import main
from effloop.errors import ConfigError, DataError
from effloop.train.trainer import Trainer

IMAGES = torch.randn(20, 3, 8, 6, generator=torch.Generator().manual_seed(0))
LABELS = (IMAGES.mean((1, 2, 3)) > 0).long()
TINY = ("epochs=2", "batch_size=8", "num_workers=0", "record.tensorboard=false", "device=cpu", "run=x")


class Mine(nn.Sequential):
    """Of any number of channels and outputs."""

    def __init__(self, outputs: int = 2, channels: int = 3) -> None:
        super().__init__(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * channels, outputs))


class Squeezing(Mine):
    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images).squeeze()


def loader(images: Tensor = IMAGES, targets: Tensor = LABELS) -> DataLoader[Any]:
    return DataLoader(TensorDataset(images, targets), batch_size=8)


def built(*words: str, **given: Any) -> Trainer:
    return effloop.build_trainer(composed(*TINY, *words), **given)


def test_trains_validates_and_resumes(here, capsys):
    scores = built(model=(module := Mine()), train=loader(), val=loader()).fit()
    right = module.eval()(IMAGES).argmax(1) == LABELS
    assert scores["top1"] == pytest.approx(right.float().mean().item())
    big = torch.randn(20, 3, 32, 32)
    again = built("resume=outputs/x", "run=y", "epochs=3", model=Mine(), train=loader(), val=loader())
    assert all(torch.equal(one, two) for one, two in zip(again.model.parameters(), module.parameters(), strict=True))
    assert again.fit().keys() == scores.keys()
    with pytest.raises(ConfigError, match=r"holds model=Mine, not model=cnn; give its module to build_trainer"):
        built("resume=outputs/x", "run=z", "image_size=32", "model.num_classes=2", train=loader(big), val=loader(big))
    assert main(["eval", "outputs/x"]) == 2
    assert capsys.readouterr().err.startswith("effloop: model: the run's 'Mine' is not here; give it to build_trainer")


@pytest.mark.parametrize(
    ("task", "outputs", "images", "targets"),
    [
        ("regression", 1, IMAGES, IMAGES.mean((1, 2, 3))),
        ("multilabel", 3, IMAGES, (IMAGES.mean((2, 3)) > 0).float()),
        ("classification", 2, torch.cat([IMAGES, IMAGES[:, :1]], dim=1), LABELS),
    ],
)
def test_targets_and_channels(here, task, outputs, images, targets):
    batches = loader(images, targets)
    trainer = built(f"task={task}", model=Mine(outputs, images.shape[1]), train=batches, val=batches)
    assert all(value == value for value in trainer.fit().values())


def test_pixels_are_normalised(here):
    pixels = (IMAGES * 50 + 128).clamp(0, 255).byte()
    wanted = (pixels / 255 - torch.tensor([0.5, 0.25, 0.75])[:, None, None]) / 0.5
    normal = "data.mean=[0.5,0.25,0.75]", "data.std=[0.5,0.5,0.5]"
    trainer = built(*normal, model=Mine(), train=loader(pixels), val=loader(pixels.permute(0, 2, 3, 1)))
    for stream in (trainer.train, trainer.val):
        images = torch.cat([batch.images for batch in stream.epoch(0)])
        torch.testing.assert_close(images, wanted, atol=1e-5, rtol=1e-5)


def test_a_module_on_the_configs_data(here, photos):
    assert built(f"data.root={photos}", "image_size=16", "epochs=1", model=Squeezing(3)).fit()
    with pytest.raises(ConfigError, match=r"^model: gives 7 outputs, and .*train has 3; change its last layer$"):
        built(f"data.root={photos}", "image_size=16", model=Mine(7))


@pytest.mark.parametrize(
    ("train", "line"),
    [
        (None, "train: is missing; give train and val, or neither"),
        (iter(loader()), "has no length, or can't begin anew; give a DataLoader, or a list of batches"),
        ([], r"train \(a list\) has no batches"),
        ([{"image": IMAGES}], r"train \(a list\): batch 0 is dict \(\); give \(images, targets\)"),
        (loader(IMAGES[:, 0]), r"train \(a DataLoader\): batch 0 is Tensor \(8, 8, 6\), Tensor \(8,\); give"),
        (loader(IMAGES.int()), "batch 0 is Tensor"),
        ([(IMAGES, LABELS[:3])], "batch 0 is Tensor"),
        (loader(IMAGES, LABELS + 1), r"batch 0 has labels from 1 to 2; allowed are 0 to 1"),
        (loader(IMAGES, LABELS.float()), "train and val have different targets"),
    ],
)
def test_what_is_refused(here, train, line):
    with pytest.raises((ConfigError, DataError), match=line):
        built(model=Mine(), train=train, val=loader()).fit()


def test_a_configs_model_has_to_know_the_classes(here):
    batches = loader(torch.randn(20, 3, 16, 16))
    with pytest.raises(ConfigError, match=r"^model\.num_classes: train \(a DataLoader\) doesn't say how many"):
        built(train=batches, val=batches)
    assert built("model.num_classes=2", "model.width=4", train=batches, val=batches).fit()


@pytest.mark.parametrize(
    ("names", "classes"), [(np.array(["cat", "dog"]), ["cat", "dog"]), (2, ["0", "1"]), (None, ["0", "1"])]
)
def test_names_of_classes(here, names, classes):
    batches = loader()
    batches.dataset.classes = names  # type: ignore[attr-defined]
    trainer = built("progressive=[32,64]", model=Mine(), train=batches, val=loader())
    facts = trainer.checkpoints.facts
    assert facts["classes"] == classes
    config = facts["config"]
    assert (config["batch_size"], config["image_size"], config["progressive"]) == (8, [8, 6], [])


def test_targets_are_of_all_ranks(here):
    numbers = loader(targets=IMAGES.mean((1, 2, 3)))
    given = built("task=regression", model=Mine(1), train=numbers, val=numbers).train
    given.parallel = SimpleNamespace(gather=lambda own: [own, own + 1])  # type: ignore[attr-defined]
    assert GivenSource(given, ()).targets.shape == (40, 1)  # type: ignore[arg-type]


def test_modules_that_are_refused(here):
    numbers = loader(targets=IMAGES.mean((1, 2, 3)))
    flat = nn.Sequential(Mine(1), nn.Flatten(0))
    with pytest.raises(ConfigError, match=r"^model: gives outputs of 1 dimensions for images; let it return \(N, K\)$"):
        built("task=regression", model=flat, train=numbers, val=numbers)
    with pytest.raises(ConfigError, match=r"^model: is <class .*Mine'>; give a torch.nn.Module$"):
        built(model=Mine, train=loader(), val=loader())

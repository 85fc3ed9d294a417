"""Learning from a teacher: what is minimised, what the teacher is given, and who can't be one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from runs import TINY, train
from torch import nn

import effloop
from effloop.assemble.model import build_model
from effloop.assemble.resolve import resolved
from effloop.batch import Batch
from effloop.errors import EffLoopError
from effloop.train.step import DistillationLoss, Step
from effloop.train.trainer import Trainer

SILENT = ("record=none", "checkpoint=none")
TEACHER = ("model.width=8", "run=teacher", "data.mean=[0.5,0.5,0.5]", "data.std=[0.3,0.4,0.5]", "image_size=24")


@pytest.fixture(scope="module")
def teacher(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of another width, normalisation and image size than its students'."""
    folder = tmp_path_factory.mktemp("teacher")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert train(photos, *TEACHER) == 0
    return folder / "outputs" / "teacher"


def weights_of(run: Path) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """The teacher's network, built by hand, and its best checkpoint's weights."""
    state = torch.load(run / "checkpoints" / "best.ckpt", weights_only=True)
    config = effloop.compose(["model=cnn", "model.width=8", "image_size=24"])
    model = build_model(resolved(config), 3, torch.device("cpu"))
    model.load_state_dict(state["model"])
    return model.eval(), state["model"]


def build(photos: Path, *overrides: str) -> Trainer:
    return effloop.build_trainer(effloop.compose([f"data.root={photos}", *TINY, *SILENT, *overrides]))


def step_of(trainer: Trainer) -> tuple[Step, Batch]:
    step = trainer.train_step.train()
    assert isinstance(step, Step)
    return step, next(iter(trainer.train.epoch(0)))


@pytest.mark.parametrize("mixed", [(), ("augment.mixup=0.5",)])
@pytest.mark.slow
def test_gradients_are_those_of_the_formula(mixed: tuple[str, ...], photos: Path, teacher: Path, here: Path) -> None:
    words = ("distill.alpha=0.7", "distill.temperature=3", "task.label_smoothing=0.1", *mixed)
    step, batch = step_of(build(photos, f"distill.teacher={teacher}", *words))
    loss, _ = step(batch.images, batch.targets, batch.valid)
    loss.backward()
    ours = [each.grad.clone() for each in step.model.parameters()]

    step.zero_grad()
    mean, std = (torch.tensor(each).view(1, 3, 1, 1) for each in ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]))
    pixels = batch.images * std + mean
    theirs = (pixels - 0.5) / torch.tensor([0.3, 0.4, 0.5]).view(1, 3, 1, 1)
    with torch.no_grad():
        soft = weights_of(teacher)[0](F.interpolate(theirs, size=(24, 24), mode="bilinear", antialias=True))
    outputs = step.model(batch.images)
    p, q = (soft / 3).softmax(1), (outputs / 3).softmax(1)
    divergence = (p * (p.log() - q.log())).sum(1).mean()
    expected = 0.3 * F.cross_entropy(outputs, batch.targets, label_smoothing=0.1) + 0.7 * 9 * divergence
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    expected.backward()
    for grad, parameter in zip(ours, step.model.parameters(), strict=True):
        torch.testing.assert_close(grad, parameter.grad, rtol=1e-3, atol=1e-6)


def test_the_teacher_stays_as_it_is(photos: Path, teacher: Path, here: Path) -> None:
    trainer = build(photos, f"distill.teacher={teacher}", "optim.ema=0.9", "accumulate=2", "amp=true")
    trainer.fit()
    step, loss = trainer.train_step, trainer.train_step.loss
    assert isinstance(loss, DistillationLoss)
    step.train()
    assert not any(module.training for module in loss.teacher.model.modules())
    saved = weights_of(teacher)[1]
    assert all(torch.equal(value, saved[name]) for name, value in loss.teacher.model.state_dict().items())
    assert all(each.grad is None for each in loss.teacher.parameters())
    assert trainer.state_dict()["model"].keys() == trainer.model.state_dict().keys()


def test_a_share_of_nothing_is_training_without_one(photos: Path, teacher: Path, here: Path) -> None:
    """So the teacher draws no random number, and the loss is made of what it should be."""
    runs = {"without": (), "with": (f"distill.teacher={teacher}", "distill.alpha=0")}
    for name, words in runs.items():
        assert train(photos, f"run={name}", *words) == 0
    one, other = (torch.load(f"outputs/{name}/checkpoints/last.ckpt", weights_only=True) for name in runs)
    assert all(torch.equal(value, other["model"][name]) for name, value in one["model"].items())


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["distill.alpha=1.5"], "distill.alpha: 1.5 is not allowed; set a share from 0 to 1"),
        (["distill.teacher=nowhere"], "distill.teacher: 'nowhere' is not there; name a run folder or a .ckpt file"),
    ],
)
def test_what_is_refused(words: list[str], line: str, photos: Path, here: Path) -> None:
    with pytest.raises(EffLoopError) as caught:
        build(photos, *words)
    assert str(caught.value).startswith(line)
    assert not list(here.iterdir())

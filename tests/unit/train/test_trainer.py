"""The loop and its sums, against computations that anybody can follow."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from laws import mixing
from preloaded import Preloaded
from runs import TINY, train
from scores import naive_scores
from torch import Tensor, nn

import effloop
from effloop.batch import Batch
from effloop.checkpoint import CheckpointConfig, Checkpoints
from effloop.checkpoint.files import find
from effloop.data.random import sample_keys
from effloop.errors import ConfigError
from effloop.optim import NoEMA
from effloop.parallel import Parallel, ParallelConfig
from effloop.precision import Precision
from effloop.record import Metrics, Recorder
from effloop.task.classification import Classification, ClassificationConfig
from effloop.train.trainer import LoopConfig, Step, Trainer

CPU = torch.device("cpu")


def test_a_finished_trainer_has_nothing_left_to_do(photos, here):
    trainer = effloop.build_trainer(effloop.compose([f"data.root={photos}", *TINY, "epochs=1"]))
    trainer.fit()
    summary = (here / trainer.checkpoints.folder.parent / "summary.json").read_bytes()
    with pytest.raises(ConfigError, match="epochs: 1 are done"):
        trainer.fit()
    assert (here / trainer.checkpoints.folder.parent / "summary.json").read_bytes() == summary


def test_a_run_folder_is_known_as_soon_as_it_is_claimed(photos, here):
    config, seen = effloop.compose([f"data.root={photos}", *TINY, "epochs=1", "run=x"]), []

    def begun(run_dir: Path) -> None:
        seen.append((run_dir, (run_dir / "environment.json").exists()))

    effloop.build_trainer(config, begun=begun).fit()
    assert seen == [(Path("outputs/x"), False)]
    last, more = find(Path("outputs/x"), "last"), replace(config, epochs=2)
    effloop.build_trainer(more, run_dir=Path("outputs/x"), resume=last, begun=begun).fit()
    assert [run_dir for run_dir, _ in seen] == [Path("outputs/x")] * 2


def build(photos: Path, *overrides: str) -> Trainer:
    config = effloop.compose([f"data.root={photos}", *TINY, "record=none", "checkpoint=none", *overrides])
    return effloop.build_trainer(config)


@pytest.mark.parametrize("batch_size", [8, 40])
def test_each_validation_sample_counts_once(here, photos, batch_size):
    trainer = build(photos, f"batch_size={batch_size}")
    scores = trainer.evaluate(trainer.val.epoch(0))
    assert trainer.metrics.read()[1] == 13

    one_by_one: list[Any] = [[], [], []]
    with torch.no_grad():
        for batch in effloop.build_loader(effloop.compose([f"data.root={photos}", *TINY, "batch_size=1"]), "val").epoch(
            0
        ):
            logits = trainer.model(batch.images)
            one_by_one[0].append(float(nn.functional.cross_entropy(logits, batch.targets)))
            one_by_one[1].append(logits[0])
            one_by_one[2].append(int(batch.targets))
    expected = naive_scores(one_by_one[0], torch.stack(one_by_one[1]), torch.tensor(one_by_one[2]))
    assert scores == pytest.approx({name: expected[name] for name in scores}, rel=1e-5)


def plain_trainer(batch_size: int, accumulate: int) -> Trainer:
    """A linear model without BatchNorm, which sees the batch's size, on the same 40 random images."""
    torch.manual_seed(0)
    data = (torch.randn(40, 3, 4, 4), torch.randint(5, (40,)), torch.arange(40), torch.ones(40, dtype=torch.bool))
    batches = [Batch(*columns) for columns in zip(*(column.split(batch_size) for column in data), strict=True)]
    model = nn.Sequential(nn.Flatten(), nn.Linear(48, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    task, precision = Classification(ClassificationConfig()), Precision(CPU)
    return Trainer(
        model=model,
        train_step=Step(model, task, precision),
        average=NoEMA(model),
        optimizer=optimizer,
        schedule=torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0),
        task=task,
        metrics=Metrics(task.num_sums, CPU),
        parallel=Parallel(ParallelConfig(name="none"), CPU),
        precision=precision,
        recorder=Recorder(),
        checkpoints=Checkpoints(CheckpointConfig(name="none"), task.meters[0], Path(), {}),
        train=Preloaded(batches, batch_size),
        val=Preloaded(batches, batch_size),
        loop=LoopConfig(epochs=1, accumulate=accumulate),
    )


def test_accumulating_two_batches_is_one_of_twice_the_size():
    weights = []
    for trainer in (plain_trainer(10, accumulate=2), plain_trainer(20, accumulate=1)):
        trainer.fit()
        assert (trainer.progress.step, trainer.progress.epoch) == (2, 1)
        weights.append([parameter.detach() for parameter in trainer.model.parameters()])
    torch.testing.assert_close(*weights)


def test_ranks_share_their_statistics_after_each_epoch(monkeypatch):
    """Whether it is evaluated or not: a checkpoint has those of one rank."""
    trainer, seen = plain_trainer(20, accumulate=1), []
    monkeypatch.setattr(trainer.parallel, "average_buffers", lambda model: seen.append(trainer.progress.epoch))
    trainer.loop = LoopConfig(epochs=3, eval_every=2)
    trainer.fit()
    assert seen == [0, 1, 2]


@pytest.mark.parametrize(("mixup", "cutmix", "dtype"), [(0.4, 0.0, None), (0.4, 1.0, torch.bfloat16)])
def test_training_on_mixed_images(mixup, cutmix, dtype):
    mix, trainer = mixing(mixup, cutmix, 5), plain_trainer(10, accumulate=1)
    trainer.precision = trainer.train_step.precision = Precision(CPU, dtype)
    trainer.train = Preloaded(
        [
            Batch(*mix(batch.images, batch.targets, sample_keys(0, 0, batch.ids.numpy())), batch.ids, batch.valid)
            for batch in trainer.val.epoch(0)
        ],
        10,
    )
    seen = []
    for epoch in range(4):
        trainer.progress.samples_seen = 0
        trainer.train_epoch(trainer.train.epoch(epoch))
        seen.append(trainer.metrics.read())
    assert [samples for _, samples, *_ in seen] == [40] * 4
    scores = [trainer.task.scores(sums) for sums in seen]
    losses = [each["loss"] for each in scores]
    assert losses == sorted(losses, reverse=True)
    hits = 40 * scores[-1]["top1"]
    assert hits != pytest.approx(round(hits))  # shares, not hits
    assert 0 < hits < 40
    assert scores[-1]["top5"] == pytest.approx(1)  # of five classes all that there is
    before = losses[0]
    assert trainer.evaluate(trainer.val.epoch(0))["loss"] < before  # on whole images and hard targets


def test_a_short_group_is_dropped():
    trainer = plain_trainer(10, accumulate=3)  # four batches: one group, and one batch over
    trainer.train_epoch(trainer.train.epoch(0))
    assert trainer.progress.step == 1
    reference = plain_trainer(30, accumulate=1)
    reference.train_epoch(reference.train.epoch(0)[:1])
    torch.testing.assert_close(trainer.model[1].weight, reference.model[1].weight)


def test_a_bug_keeps_its_traceback(here, photos, monkeypatch):
    def broken(*_: object) -> Tensor:
        raise ValueError("a bug")

    monkeypatch.setattr(Classification, "loss", broken)
    assert train(photos, "run=x") == 70
    assert "failed: ValueError: a bug" in (here / "outputs/x/log.txt").read_text()

"""The loop and its sums, against computations that anybody can follow."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import TINY, train
from torch import Tensor, nn

import effloop
from effloop.batch import Batch
from effloop.bench.benchmarks import Preloaded
from effloop.checkpoint import CheckpointConfig, Checkpoints
from effloop.checkpoint.files import find
from effloop.config import to_dict
from effloop.data.augment.mix import Mix
from effloop.data.random import sample_keys
from effloop.errors import ConfigError
from effloop.optim import NoAverage, Objective
from effloop.parallel.single import NoneConfig, NoParallel
from effloop.precision import Precision
from effloop.record import Metrics, Recorder, counted
from effloop.train.step import Step
from effloop.train.trainer import LoopConfig, Trainer

CPU = torch.device("cpu")


def naive_scores(losses: list[float], logits: Tensor, targets: Tensor) -> dict[str, float]:
    """Loss, top1 and top5, sample by sample."""
    ranks = [int((row > row[target]).sum()) for row, target in zip(logits, targets.tolist(), strict=True)]
    return {
        "loss": sum(losses) / len(losses),
        "top1": sum(rank < 1 for rank in ranks) / len(ranks),
        "top5": sum(rank < 5 for rank in ranks) / len(ranks),
    }


@pytest.mark.parametrize("classes", [2, 5, 20])
def test_metrics(classes: int) -> None:
    torch.manual_seed(classes)
    logits, targets = torch.randn(50, classes), torch.randint(classes, (50,))
    losses, valid = torch.rand(50), torch.rand(50) < 0.7
    metrics = Metrics(CPU)
    for part in torch.arange(50).split(8):
        metrics.add(counted(losses[part], logits[part], targets[part], valid[part]))
    totals = metrics.read()
    assert totals.samples == int(valid.sum())
    assert totals.scores() == pytest.approx(naive_scores(losses[valid].tolist(), logits[valid], targets[valid]))


def test_padding_cannot_spoil_the_sums() -> None:
    metrics = Metrics(CPU)
    losses, valid = torch.tensor([0.5, float("nan")]), torch.tensor([True, False])
    metrics.add(counted(losses, torch.eye(2), torch.tensor([0, 1]), valid))
    assert metrics.read().scores() == {"loss": 0.5, "top1": 1.0, "top5": 1.0}


@pytest.mark.parametrize("classes", [2, 5, 20])
def test_metrics_of_mixed_samples(classes: int) -> None:
    """MixUp's authors weigh a hit of either class by its share."""
    torch.manual_seed(classes)
    logits, first, second = torch.randn(50, classes), torch.randint(classes, (50,)), torch.randint(classes, (50,))
    lam, losses, valid = torch.rand(50, 1), torch.rand(50), torch.rand(50) < 0.7
    shares = lam * nn.functional.one_hot(first, classes) + (1 - lam) * nn.functional.one_hot(second, classes)
    metrics, hard = Metrics(CPU), Metrics(CPU)
    for part in torch.arange(50).split(8):
        metrics.add(counted(losses[part], logits[part], shares[part], valid[part]))
        wanted = nn.functional.one_hot(first, classes).float()[part]
        hard.add(counted(losses[part], logits[part], wanted, valid[part]))
    rows = [(row, weight) for row in valid.nonzero()[:, 0].tolist() for weight in (lam[row, 0], 1 - lam[row, 0])]
    both = [each[row] for row in valid.nonzero()[:, 0].tolist() for each in (first, second)]
    for name, among in (("top1", 1), ("top5", 5)):
        best = logits.argsort(dim=1, descending=True)[:, :among].tolist()
        hits = sum(float(weight) for (row, weight), label in zip(rows, both, strict=True) if int(label) in best[row])
        assert metrics.read().scores()[name] == pytest.approx(hits / int(valid.sum()))
    assert metrics.read().samples == int(valid.sum())
    assert hard.read().scores() == pytest.approx(naive_scores(losses[valid].tolist(), logits[valid], first[valid]))


def test_a_finished_trainer_has_nothing_left_to_do(photos: Path, here: Path) -> None:
    trainer = effloop.build_trainer(effloop.compose([f"data.root={photos}", *TINY, "epochs=1"]))
    trainer.fit()
    summary = (here / trainer.checkpoints.folder.parent / "summary.json").read_bytes()
    with pytest.raises(ConfigError, match="epochs: 1 are done"):
        trainer.fit()
    assert (here / trainer.checkpoints.folder.parent / "summary.json").read_bytes() == summary


def test_a_run_folder_is_known_as_soon_as_it_is_claimed(photos: Path, here: Path) -> None:
    config, seen = effloop.compose([f"data.root={photos}", *TINY, "epochs=1", "run=x"]), []

    def begun(run_dir: Path) -> None:
        seen.append((run_dir, (run_dir / "config.yaml").stat().st_size))

    effloop.build_trainer(config, begun=begun).fit()
    assert seen == [(Path("outputs/x"), 0)]
    last, more = find(Path("outputs/x"), "last"), replace(config, epochs=2)
    effloop.build_trainer(more, run_dir=Path("outputs/x"), resume=last, begun=begun).fit()
    assert [run_dir for run_dir, _ in seen] == [Path("outputs/x")] * 2


def test_config_of_a_run_holds_the_data_where_it_lies(photos: Path, here: Path) -> None:
    config = effloop.compose([f"data.root={os.path.relpath(photos)}"])
    assert to_dict(config)["data"]["root"] == str(photos)


def test_metrics_of_no_samples() -> None:
    assert all(value != value for value in Metrics(CPU).read().scores().values())  # NaN


def test_label_smoothing_is_for_training_only() -> None:
    logits, targets = torch.randn(6, 4), torch.randint(4, (6,))
    smooth, plain = Objective(0.1), Objective()
    assert smooth(logits, targets) != plain(logits, targets)
    assert torch.equal(smooth.per_sample(logits, targets), plain.per_sample(logits, targets))
    assert smooth.per_sample(logits, targets).mean() == pytest.approx(float(plain(logits, targets)))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_loss_of_shares_is_the_classes_losses_by_their_shares(smoothing: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    objective, logits = Objective(smoothing), torch.randn(6, 4).to(dtype).float()
    first, second, lam = torch.randint(4, (6,)), torch.randint(4, (6,)), torch.rand(6, 1)
    shares = lam * nn.functional.one_hot(first, 4) + (1 - lam) * nn.functional.one_hot(second, 4)
    rows = zip(logits[:, None], first[:, None], second[:, None], lam[:, 0], strict=True)
    wanted = torch.stack([weight * objective(row, a) + (1 - weight) * objective(row, b) for row, a, b, weight in rows])
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
        loss = objective(logits.to(dtype), shares)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, wanted.mean())


def build(photos: Path, *overrides: str) -> Trainer:
    config = effloop.compose([f"data.root={photos}", *TINY, "record=none", "checkpoint=none", *overrides])
    return effloop.build_trainer(config)


@pytest.mark.parametrize("batch_size", [4, 8, 13, 40])
def test_each_validation_sample_counts_once(here: Path, photos: Path, batch_size: int) -> None:
    trainer = build(photos, f"batch_size={batch_size}")
    scores = trainer.evaluate(trainer.val.epoch(0))
    assert trainer.metrics.read().samples == 13

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
    assert scores == pytest.approx(expected, rel=1e-5)


def plain_trainer(batch_size: int, accumulate: int) -> Trainer:
    """A linear model without BatchNorm, which sees the batch's size, on the same 40 random images."""
    torch.manual_seed(0)
    data = (torch.randn(40, 3, 4, 4), torch.randint(5, (40,)), torch.arange(40), torch.ones(40, dtype=torch.bool))
    batches = [Batch(*columns) for columns in zip(*(column.split(batch_size) for column in data), strict=True)]
    model = nn.Sequential(nn.Flatten(), nn.Linear(48, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    objective, precision = Objective(), Precision(CPU)
    return Trainer(
        model=model,
        train_step=Step(model, objective, precision),
        average=NoAverage(model),
        optimizer=optimizer,
        schedule=torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0),
        objective=objective,
        metrics=Metrics(CPU),
        parallel=NoParallel(NoneConfig(name="none"), CPU),
        precision=precision,
        recorder=Recorder(),
        checkpoints=Checkpoints(CheckpointConfig(name="none"), Path(), {}),
        train=Preloaded(batches, batch_size),
        val=Preloaded(batches, batch_size),
        loop=LoopConfig(epochs=1, accumulate=accumulate),
    )


def test_accumulating_two_batches_is_one_of_twice_the_size() -> None:
    weights = []
    for trainer in (plain_trainer(10, accumulate=2), plain_trainer(20, accumulate=1)):
        trainer.fit()
        assert (trainer.progress.step, trainer.progress.epoch) == (2, 1)
        weights.append([parameter.detach() for parameter in trainer.model.parameters()])
    torch.testing.assert_close(*weights)


@pytest.mark.parametrize(("mixup", "cutmix"), [(0.4, 0.0), (0.0, 1.0), (0.4, 1.0)])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_training_on_mixed_images(mixup: float, cutmix: float, dtype: torch.dtype | None) -> None:
    mix, trainer = Mix(mixup, cutmix, 5), plain_trainer(10, accumulate=1)
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
    assert [each.samples for each in seen] == [40] * 4
    losses = [each.scores()["loss"] for each in seen]
    assert losses == sorted(losses, reverse=True)
    assert seen[-1].top1 != round(seen[-1].top1)  # shares, not hits
    assert 0 < seen[-1].top1 < 40
    assert seen[-1].top5 == pytest.approx(40)  # of five classes all that there is
    before = seen[0].scores()["loss"]
    assert trainer.evaluate(trainer.val.epoch(0))["loss"] < before  # on whole images and hard targets


def test_a_short_group_is_dropped() -> None:
    trainer = plain_trainer(10, accumulate=3)  # four batches: one group, and one batch over
    trainer.train_epoch(trainer.train.epoch(0))
    assert trainer.progress.step == 1
    reference = plain_trainer(30, accumulate=1)
    reference.train_epoch(reference.train.epoch(0)[:1])
    torch.testing.assert_close(trainer.model[1].weight, reference.model[1].weight)


def test_a_bug_keeps_its_traceback(here: Path, photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> Tensor:
        raise ValueError("a bug")

    monkeypatch.setattr(Objective, "__call__", broken)
    with pytest.raises(ValueError, match="a bug"):
        train(photos, "run=x")
    assert "stopped by ValueError: a bug" in (here / "outputs/x/log.txt").read_text()

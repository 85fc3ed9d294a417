"""Evaluation: outputs for all samples, their scores, test-time augmentation, and pictures of predicted masks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from effloop.batch import Batch, Preview
from effloop.data.loader import Loader
from effloop.errors import ConfigError
from effloop.precision import Precision
from effloop.record import Metrics
from effloop.task import Task
from effloop.task.details import Details

Gather = Callable[[Any], list[Any]]
"""Every rank's value, by rank, on every rank: `Parallel.gather`."""

_ON_DEVICE = 1 << 26  # numbers: 256 MiB, then they move to the host, which waits for the device


def alone(value: Any) -> list[Any]:
    """`gather` of a single process."""
    return [value]


@dataclass(frozen=True)
class Collected:
    """Outputs for the samples of a split, each once, in ascending order of their ids, for any ranks.

    Attributes:
        outputs: (N, K) float32.
        targets: (N, ...) as the task has them, e.g. (N,) int64 classes; of masks nothing, (N, 0).
        ids: (N,) int64, the samples' numbers in their source.
    """

    outputs: NDArray[np.float32]
    targets: NDArray[Any]
    ids: NDArray[np.int64]


class Collector:
    """Keeps all outputs and targets of an evaluation, without padding.

    Attributes:
        sums: of the task, once there are scores; empty of tasks that collect.
    """

    def __init__(self) -> None:
        self.sums: list[float] = []
        self._host: list[tuple[Tensor, ...]] = []
        self._device: list[tuple[Tensor, ...]] = []
        self._numbers = 0

    def add(self, outputs: Tensor, batch: Batch) -> None:
        """Add a batch.

        Args:
            outputs: (N, K), on any device.
            batch: that they are of; its images aren't kept.
        """
        kept, targets = outputs.detach().float(), batch.targets
        if targets.ndim > 2:  # masks are as large as the images
            targets = targets.flatten(1)[:, :0]
        self._device.append((kept, targets.clone(), batch.ids.clone(), batch.valid.clone()))
        self._numbers += kept.numel()
        if self._numbers >= _ON_DEVICE:
            self._move()

    def collected(self, gather: Gather = alone) -> Collected:
        """All that was added, on every rank; all ranks have to call it.

        Args:
            gather: `Parallel.gather`, where each rank has added its own batches.
        """
        self._move()
        parts = gather(tuple(torch.cat(column) for column in zip(*self._host, strict=True)))
        outputs, targets, ids = (torch.cat(column) for column in zip(*parts, strict=True))
        order = ids.argsort(stable=True)
        return Collected(*(column[order].numpy() for column in (outputs, targets, ids)))

    def _move(self) -> None:
        for columns in self._device:
            *kept, valid = (column.cpu() for column in columns)
            self._host.append(tuple(column[valid] for column in kept))
        self._device, self._numbers = [], 0


class Facts(Collector):
    """Keeps what the task needs for the details of an evaluation, `Task.facts` of each sample, as outputs."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.task = task

    def add(self, outputs: Tensor, batch: Batch) -> None:
        super().add(self.task.facts(outputs, batch.targets), batch)

    def details(self, names: Sequence[str]) -> tuple[Details | None, int]:
        """The details of what was added, once it is scored, and of how many samples; `names` are the outputs'."""
        found = self.collected()
        return self.task.details(found.outputs, found.targets, names, self.sums), len(found.ids)


class Scorer:
    """The scores of a model's outputs, which come batch by batch.

    Args:
        task: which scores.
        metrics: for the task's sums, of this evaluation alone.
        gather: as in `Collector.collected`; only tasks that collect need it.
        collector: gets all outputs, too; None is one where the task needs it.
    """

    def __init__(
        self, task: Task, metrics: Metrics, gather: Gather = alone, collector: Collector | None = None
    ) -> None:
        self.task = task
        self.metrics = metrics
        self.gather = gather
        self.collector = Collector() if collector is None and task.collects else collector

    def add(self, outputs: Tensor, batch: Batch) -> None:
        """Add a batch: (N, K) outputs, and what they are of."""
        if not self.task.collects:
            self.metrics.add(self.task.sums(outputs, batch.targets, batch.valid))
        if self.collector is not None:
            self.collector.add(outputs, batch)

    def scores(self, *, tune: bool = False) -> dict[str, float]:
        """The task's scores of all samples of all ranks.

        Args:
            tune: let the task choose what it chooses by an evaluation, before it is scored.
        """
        if not self.task.collects:
            sums = self.metrics.read()
            if self.collector is not None:
                self.collector.sums = sums
            return self.task.scores(sums)
        assert self.collector is not None
        found = self.collector.collected(self.gather)
        if tune:
            self.task.tune(found.outputs, found.targets)
        return self.task.scores_of(found.outputs, found.targets)


@torch.no_grad()
def evaluate(
    model: nn.Module, batches: Iterable[Batch], scorer: Scorer, precision: Precision, *, tune: bool = False
) -> dict[str, float]:
    """The task's scores over all valid samples of all ranks, each counted once.

    Args:
        model: (N, 3, H, W) -> (N, K) outputs.
        batches: of this rank.
        scorer: a new one.
        precision: autocast of the forward pass.
        tune: as in `Scorer.scores`.
    """
    model.eval()
    scorer.metrics.reset()
    for batch in batches:
        with precision.autocast():
            outputs = model(batch.images)
        scorer.add(outputs, batch)
    return scorer.scores(tune=tune)


View = Literal["flip"]
"""Test-time augmentation: beside an image the model sees its mirror image."""


def check_views(views: Collection[View], task: Task, name: str) -> None:
    """Refuse a task that can't make one output of several.

    Args:
        views: of an image, beside itself.
        task: which scores.
        name: its own, in the registry.

    Raises:
        ConfigError: it can't.
    """
    if views and not task.ensembles:
        raise ConfigError(f"tta: task={name} has no average of outputs for several views of an image; drop tta")


def outputs_of_views(forward: Callable[[Tensor], Tensor], images: Tensor, views: Collection[View]) -> list[Tensor]:
    """(N, C, H, W) images -> (N, K, ...) outputs for them and their views; `Task.ensemble` makes one of them."""
    found = [forward(images)]
    if "flip" in views:
        mirrored = forward(images.flip(3))
        found.append(mirrored.flip(3) if mirrored.ndim == 4 else mirrored)  # those of pixels, back in place
    return found


@torch.no_grad()
def evaluate_views(
    model: nn.Module,
    batches: Iterable[Batch],
    task: Task,
    precision: Precision,
    views: Collection[View],
    collector: Collector | None = None,
) -> list[dict[str, float]]:
    """The task's scores of a single process's batches: of the images alone, and of them with all views together.

    Args:
        model: (N, 3, S, S) images -> (N, K) outputs.
        batches: of an epoch.
        task: which scores.
        precision: autocast of the forward pass.
        views: of each image, at least one.
        collector: gets the outputs of all views together.
    """

    def forward(images: Tensor) -> Tensor:
        with precision.autocast():
            outputs: Tensor = model(images)
        return outputs

    model.eval()
    alone, together = scorers = [
        Scorer(task, Metrics(task.num_sums, precision.device), collector=each) for each in (None, collector)
    ]
    for batch in batches:
        outputs = outputs_of_views(forward, batch.images, views)
        alone.add(outputs[0], batch)
        together.add(task.ensemble(outputs), batch)
    return [each.scores() for each in scorers]


def compare_some(loader: Loader, precision: Precision, model: nn.Module, count: int) -> Preview:
    """`compare` of at most `count` samples, spread evenly over a split."""
    size = len(loader.plan.source)
    samples = np.unique(np.linspace(0, size - 1, min(count, size)).astype(np.int64)).tolist()
    return compare(model, loader, precision, samples)


@torch.no_grad()
def compare(model: nn.Module, loader: Loader, precision: Precision, samples: Sequence[int]) -> Preview:
    """Samples as a model sees them, each with its target and what is predicted: one column each.

    Args:
        model: (N, C, H, W) -> (N, K, H, W) outputs; left in eval mode.
        loader: of the samples.
        precision: autocast of the forward pass.
        samples: their numbers in the source, at least one.

    Raises:
        DataError: a sample can't be read or decoded; the message names it.
    """
    model.eval()
    images, targets, predicted = [], [], []
    step = min(loader.plan.order.batch_per_rank, len(samples))
    for start in range(0, len(samples), step):
        batch = loader.samples(samples[start : start + step])
        with precision.autocast():
            outputs = model(batch.images)
        images.append(loader.as_pictures(batch))
        targets.append(batch.targets.to(torch.uint8).cpu().numpy())
        predicted.append(outputs.argmax(dim=1).to(torch.uint8).cpu().numpy())
    source = loader.plan.source
    return Preview(
        images=np.repeat(np.concatenate(images)[:, None], 3, axis=1),
        rows=tuple(source.key(sample) for sample in samples),
        columns=("image", "target", "prediction"),
        masks=(None, np.concatenate(targets), np.concatenate(predicted)),
        classes=source.classes,
    )

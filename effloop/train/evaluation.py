"""Evaluation: outputs for all samples, their scores, test-time augmentation, and pictures of predicted masks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from effloop.batch import Batch, Preview
from effloop.data.loader import Loader
from effloop.lazy import F, Tensor, nn, no_grad, torch
from effloop.precision import Precision
from effloop.record import Metrics
from effloop.task import Task

if TYPE_CHECKING:
    from effloop.task.details import Details

Gather = Callable[[Any], list[Any]]  # every rank's value, by rank, on every rank: `Parallel.gather`

_ON_DEVICE = 1 << 26  # numbers: 256 MiB, then they move to the host, which waits for the device


def alone(value: Any) -> list[Any]:
    """`gather` of a single process."""
    return [value]


class Scorer:
    """The scores of a model's outputs, which come batch by batch; `metrics` are of this evaluation alone. With `keeps`,
    or where the task collects, it keeps `Task.facts` of all samples and their targets.
    """

    def __init__(self, task: Task, metrics: Metrics, gather: Gather = alone, *, keeps: bool = False) -> None:
        self.task, self.metrics, self.gather = task, metrics, gather
        self._keeps = keeps or task.collects
        self._sums: list[float] = []
        self._host: list[tuple[Tensor, ...]] = []
        self._device: list[tuple[Tensor, ...]] = []
        self._numbers = 0

    def add(self, outputs: Tensor, batch: Batch) -> None:
        """Add a batch: (N, K) outputs, on any device, and what they are of; its images aren't kept."""
        if not self.task.collects:
            self.metrics.add(self.task.sums(outputs, batch.targets, batch.valid))
        if not self._keeps:
            return
        kept, targets = self.task.facts(outputs, batch.targets).detach().float(), batch.targets
        if targets.ndim > 2:  # masks are as large as the images
            targets = targets.flatten(1)[:, :0]
        self._device.append((kept, targets.clone(), batch.ids.clone(), batch.valid.clone()))
        self._numbers += kept.numel()
        if self._numbers >= _ON_DEVICE:
            self._move()

    def scores(self, *, tune: bool = False) -> dict[str, float]:
        """The task's scores of all samples of all ranks; with `tune` once it has chosen what it chooses by them."""
        if not self.task.collects:
            self._sums = self.metrics.read()
            return self.task.scores(self._sums)
        outputs, targets, _ = self.collected()
        if tune:
            self.task.tune(outputs, targets)
        return self.task.scores_of(outputs, targets)

    def details(self, names: Sequence[str]) -> tuple[Details | None, int]:
        """The details of what was kept, once it is scored, and of how many samples; `names` are the outputs'."""
        facts, targets, ids = self.collected()
        details = self.task.details(facts, targets, names, self._sums)
        for row in details.worst if details else ():
            row["id"] = int(ids[row["id"]])  # samples are missing where images can't be loaded
        return details, len(ids)

    def collected(self) -> tuple[NDArray[np.float32], NDArray[Any], NDArray[np.int64]]:
        """(N, F) facts, (N, ...) targets and (N,) ids of all ranks' samples, each once, in the order of ids."""
        self._move()
        parts = self.gather(tuple(torch.cat(column) for column in zip(*self._host, strict=True)))
        facts, targets, ids = (torch.cat(column) for column in zip(*parts, strict=True))
        order = ids.argsort(stable=True)
        return facts[order].numpy(), targets[order].numpy(), ids[order].numpy()

    def _move(self) -> None:
        for columns in self._device:
            *kept, valid = (column.cpu() for column in columns)
            self._host.append(tuple(column[valid] for column in kept))
        self._device, self._numbers = [], 0


View = Literal["flip", "shift"]  # test-time augmentation: what the model sees beside an image


def outputs_of_views(forward: Callable[[Tensor], Tensor], images: Tensor, views: Collection[View]) -> list[Tensor]:
    """(N, C, H, W) images -> (N, K, ...) outputs for them and their views; `Task.ensemble` makes one of them.

    `flip` adds mirror images; `shift`, with half of the weight, all of these moved by a pixel down and right, and up
    and left, with their reflection at the edge (airbench94.py of cifar10-airbench).
    """
    found = [forward(images)]
    if "flip" in views:
        mirrored = forward(images.flip(3))
        found.append(mirrored.flip(3) if mirrored.ndim == 4 else mirrored)  # those of pixels, back in place
    if "shift" in views:
        found *= 2  # as many as those that are moved
        for at in (0, 2):
            moved = outputs_of_views(forward, _moved(images, at, "reflect"), {*views} - {"shift"})
            found += [_moved(each, 2 - at, "replicate") if each.ndim == 4 else each for each in moved]
    return found


def _moved(x: Tensor, at: int, mode: str) -> Tensor:
    """(N, C, H, W) padded by a pixel -> the same size from a place on."""
    return F.pad(x, (1, 1, 1, 1), mode=mode)[:, :, at : at + x.shape[2], at : at + x.shape[3]]


@no_grad
def evaluate(
    model: nn.Module,
    batches: Iterable[Batch],
    scorers: Sequence[Scorer],
    precision: Precision,
    views: Collection[View] = (),
    *,
    tune: bool = False,
) -> list[dict[str, float]]:
    """The task's scores of a model over all valid samples of all ranks, each counted once. The scorers are new ones: of
    the images alone and, with views, second, of them with all views together.
    """

    def forward(images: Tensor) -> Tensor:
        with precision.autocast():
            outputs: Tensor = model(images)
        return outputs

    model.eval()
    for scorer in scorers:
        scorer.metrics.reset()
    for batch in batches:
        outputs = outputs_of_views(forward, batch.images, views)
        scorers[0].add(outputs[0], batch)
        if views:
            scorers[1].add(scorers[1].task.ensemble(outputs), batch)
    return [scorer.scores(tune=tune) for scorer in scorers]


@no_grad
def compare(model: nn.Module, loader: Loader, precision: Precision, samples: Sequence[int]) -> Preview:
    """Samples of a loader's source as a model of (N, K, H, W) outputs sees them, each with its target and what is
    predicted: one column each. The model is left in eval mode.
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

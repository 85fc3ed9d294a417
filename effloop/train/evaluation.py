"""Evaluation: what a model gives for all samples, and the scores of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from effloop.batch import Batch
from effloop.precision import Precision
from effloop.record import Metrics
from effloop.task import Task
from effloop.task.details import Details

Gather = Callable[[Any], list[Any]]
"""Every rank's value, by rank, on every rank: `Parallel.gather`."""

_ON_DEVICE = 1 << 26  # numbers: 256 MiB, then they move to the host, which waits for the device


def alone(value: Any) -> list[Any]:
    """What `gather` gives to a single process."""
    return [value]


@dataclass(frozen=True)
class Collected:
    """What a model gave for the samples of a split, each once, in ascending order of their ids, for any ranks.

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

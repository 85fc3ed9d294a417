"""Test-time augmentation: several views of each image, whose outputs become one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, Self

import torch
from torch import Tensor, nn

from effloop.batch import Batch
from effloop.errors import ConfigError
from effloop.precision import Precision
from effloop.record import Metrics
from effloop.task import Task
from effloop.train.evaluation import Collector, Scorer

ViewName = Literal["flip", "fivecrop"]


@dataclass(frozen=True)
class Views:
    """Which views of an image the model sees; the first is always the image as without any.

    Attributes:
        flip: every crop and its mirror image.
        fivecrop: the centre and the four corners, from a loader that was built with these views.
    """

    flip: bool = False
    fivecrop: bool = False

    @classmethod
    def of(cls, names: Iterable[ViewName]) -> Self:
        """Those that are named."""
        return cls(**dict.fromkeys(names, True))

    def __len__(self) -> int:
        """Views of an image."""
        return (1 + self.flip) * self.num_crops

    @property
    def num_crops(self) -> int:
        """How many batches in a row are of the same samples."""
        return 5 if self.fivecrop else 1

    def check(self, task: Task, name: str) -> None:
        """Refuse a task that can't make one output of several.

        Args:
            task: which scores.
            name: its own, in the registry.

        Raises:
            ConfigError: it can't.
        """
        if self.fivecrop and task.spatial:
            raise ConfigError(
                f"tta: fivecrop shows other pixels, and task={name} scores each; drop it, flip is allowed"
            )
        if len(self) > 1 and not task.ensembles:
            raise ConfigError(f"tta: task={name} has no average of outputs for several views of an image; drop tta")

    def outputs(
        self, forward: Callable[[Tensor], Tensor], batches: Iterable[Batch]
    ) -> Iterator[tuple[Batch, list[Tensor]]]:
        """Each batch of samples, and the outputs for its views: `task.ensemble` makes one of them.

            for batch, outputs in views.outputs(model, build_loader(config, "val", views=views)):
                task.ensemble(outputs) if len(views) > 1 else outputs[0]

        Args:
            forward: (N, 3, H, W) images -> (N, K) outputs, or (N, K, H, W).
            batches: of an epoch.

        Yields:
            A sample that was left out of one of its views is in no other, either.
        """
        found: list[Tensor] = []
        valid: Tensor | None = None
        for number, batch in enumerate(batches, 1):
            valid = batch.valid = batch.valid & valid if found and valid is not None else batch.valid
            found.append(forward(batch.images))
            if self.flip:
                mirrored = forward(batch.images.flip(3))
                found.append(mirrored.flip(3) if mirrored.ndim == 4 else mirrored)  # those of pixels, back in place
            if number % self.num_crops == 0:
                yield batch, found
                found = []


ONE_VIEW = Views()
"""The image as it is."""


@torch.no_grad()
def evaluate_views(
    model: nn.Module,
    batches: Iterable[Batch],
    task: Task,
    precision: Precision,
    views: Views,
    collector: Collector | None = None,
) -> list[dict[str, float]]:
    """The task's scores of a single process's batches: of the first view alone, and of all views together.

    Args:
        model: (N, 3, S, S) images -> (N, K) outputs.
        batches: of an epoch.
        task: which scores.
        precision: autocast of the forward pass.
        views: of each image, several.
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
    for batch, outputs in views.outputs(forward, batches):
        alone.add(outputs[0], batch)
        together.add(task.ensemble(outputs), batch)
    return [each.scores() for each in scorers]

"""Parts with a fault each, for `diagnose` to find: a plugin file."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from effloop.data.augment.operation import PixelOperation, operation
from effloop.data.source import sources
from effloop.data.source.folder import FolderConfig, FolderSource
from effloop.model import ModelConfig, models
from effloop.record import recorders
from effloop.record.run import RunConfig, RunRecorder
from effloop.task import Classification, ClassificationConfig, tasks


@dataclass
class FarConfig(FolderConfig):
    """Fields of `data=far`."""


@sources.register("far", FarConfig)
class Far(FolderSource):
    """Class folders on a storage that takes 10 ms to answer."""

    @classmethod
    def claims(cls, root: Path) -> bool:
        return False

    def read(self, index: int) -> Any:
        time.sleep(0.01)
        return super().read(index)

    def read_run(self, samples: Any) -> Any:
        time.sleep(0.01 * len(samples))
        return super().read_run(samples)


@operation
class Spin(PixelOperation):
    """Computes in Python for 5 ms, and changes nothing."""

    def draw(self, keys: Any, sizes: Any) -> Any:
        return keys

    def apply_inplace(self, image: Any, drawn: Any, row: int) -> None:
        end = time.thread_time() + 0.005
        while time.thread_time() < end:
            pass

    def apply_batch(self, images: Any, drawn: Any) -> Any:
        return images


@operation
class Doze(PixelOperation):
    """Waits for 10 ms, and changes nothing."""

    def draw(self, keys: Any, sizes: Any) -> Any:
        return keys

    def apply_inplace(self, image: Any, drawn: Any, row: int) -> None:
        time.sleep(0.01)

    def apply_batch(self, images: Any, drawn: Any) -> Any:
        return images


@models.register("heavy", ModelConfig)
class Heavy(torch.nn.Sequential):
    """A network that takes some milliseconds for an image of 64 pixels."""

    def __init__(self, num_classes: int) -> None:
        layers: list[torch.nn.Module] = [torch.nn.Conv2d(3, 64, 3, padding=1)]
        for _ in range(4):
            layers += [torch.nn.Conv2d(64, 64, 3, padding=1), torch.nn.ReLU()]
        pool = [torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(64, num_classes)]
        super().__init__(*layers, *pool)


@tasks.register("reading", ClassificationConfig)
class Reading(Classification):
    """Classification that reads its loss in each step."""

    def loss(self, outputs: Any, targets: Any) -> Any:
        loss = torch.nn.functional.cross_entropy(outputs, targets)
        self.last = loss.item()
        return loss


@recorders.register("sluggish", RunConfig)
class Sluggish(RunRecorder):
    """A log that takes 50 ms for each line."""

    def step(self, position: Any, metrics: Any, lr: float) -> None:
        super().step(position, metrics, lr)
        if position.update % self.config.log_every == 0:
            time.sleep(0.05)

"""Batches in memory, as a `BatchStream`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from effloop.batch import Batch, ImageSize, Preview


@dataclass
class Preloaded:
    """The same batches in each epoch."""

    batches: list[Batch]
    global_batch: int

    def __len__(self) -> int:
        return len(self.batches)

    def describe(self) -> str:
        return f"{len(self)} batches in memory"

    def epoch(self, epoch: int, samples_seen: int = 0) -> Iterable[Batch]:
        del epoch
        return self.batches[samples_seen // self.global_batch :]

    def preview(self, num_samples: int, num_epochs: int, most: Callable[[ImageSize], int]) -> Preview:
        del num_samples, num_epochs, most
        return Preview(np.empty((0, 0, 1, 1, 3), np.uint8), rows=(), columns=())

    def close(self) -> None:
        pass

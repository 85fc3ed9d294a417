"""Batches of features that a frozen network has computed, instead of images."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from effloop.batch import Batch
from effloop.data.loader import Loader
from effloop.data.order import without_repeats
from effloop.data.plan import to_native_byteorder


class FeatureStream:
    """The samples of a loader in its order, as features.

    Args:
        loader: of the images.
        features: (N, D) float32 of all samples, which may be a memory-mapped file.
        passes: how often an epoch goes over them.
    """

    def __init__(self, loader: Loader, features: NDArray[np.float32], passes: int = 1) -> None:
        self.loader = loader
        self.features = features
        self.passes = passes

    @property
    def global_batch(self) -> int:
        """Samples in a batch."""
        return self.loader.global_batch

    def __len__(self) -> int:
        """Batches in an epoch, of all passes."""
        return self.passes * len(self.loader)

    def describe(self) -> str:
        """One line: the data, and what an epoch is."""
        several = f", {self.passes} times an epoch" if self.passes > 1 else ""
        return f"{self.loader.describe()}; {self.features.shape[1]} features of each{several}"

    def epoch(self, epoch: int, samples_seen: int = 0) -> Iterator[Batch]:
        """As `Loader.epoch`, with (N, D) features as `images`; each pass is in an order of its own."""
        plan, transfer = self.loader.plan, self.loader.transfer
        device, dtype = transfer.device, transfer.target_dtype
        for number in range(samples_seen // self.global_batch, len(self)):
            done, place = divmod(number, len(plan.order))
            numbers, valid = plan.order.batch(epoch * self.passes + done, place)
            ids = without_repeats(numbers)
            targets = torch.from_numpy(to_native_byteorder(plan.source.targets[ids])).to(device, dtype)
            yield Batch(
                images=torch.from_numpy(self.features[ids]).to(device),
                targets=targets,
                ids=torch.from_numpy(ids),
                valid=torch.from_numpy(valid).to(device),
            )

    def close(self) -> None:
        """As `Loader.close`."""
        self.loader.close()

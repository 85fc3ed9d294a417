"""Batches, as the data path hands them to the loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


@dataclass(slots=True)
class Batch:
    """One rank's part of a global batch.

    Attributes:
        images: (N, 3, S, S). RGB, channels_last unless switched off; uint8 on the host, and
            normalised float32 on the device once `transfer` has passed it on.
        targets: (N,) class indices; the smallest unsigned integer type on the host, int64 after. Where
            images are mixed, on the device: (N, K) float32, the classes' shares of each image.
        ids: (N,) int64 on the host, the samples' numbers in their source.
        valid: (N,) bool; False marks padding, which must not be counted.
    """

    images: Tensor
    targets: Tensor
    ids: Tensor
    valid: Tensor

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class Preview:
    """Some samples in some epochs, as the model sees them, to look at.

    Attributes:
        images: (R, C, S, S, 3) uint8 RGB, a row for each sample, a column for each epoch.
        rows: R names; a name may have several lines.
        columns: C names.
    """

    images: NDArray[np.uint8]
    rows: tuple[str, ...]
    columns: tuple[str, ...]


Previews = Callable[[int, int, Callable[[int], int]], Preview]
"""How many samples, how many epochs, and side of the images in pixels -> how many samples at most."""

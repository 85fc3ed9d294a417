"""The parcel that the data path hands to the loop."""

from __future__ import annotations

from dataclasses import dataclass

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

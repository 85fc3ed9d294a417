"""Batches, as the data path hands them to the loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from effloop.lazy import Tensor


class ImageSize(NamedTuple):
    """Height and width of a batch's images, in pixels."""

    height: int
    width: int

    @classmethod
    def of(cls, value: object) -> ImageSize:
        """From a whole number for both, or a list or tuple of height and width.

        Raises:
            ValueError: it is neither, or not above 0.
        """
        pair: list[Any] = list(value) if isinstance(value, list | tuple) else [value, value]
        if len(pair) != 2 or not all(type(side) is int and side > 0 for side in pair):
            raise ValueError(f"{value} is no size of images")
        return cls(*pair)

    def __str__(self) -> str:
        return f"{self.height}" if self.height == self.width else f"{self.height}x{self.width}"

    @property
    def word(self) -> str:
        """As users type it: `224`, or `[224,320]`."""
        return str(self) if self.height == self.width else f"[{self.height},{self.width}]"

    @property
    def pixels(self) -> int:
        """Height times width."""
        return self.height * self.width


@dataclass(frozen=True, slots=True)
class Skipped:
    """A sample that could not be loaded, and that `on_error=skip` did without."""

    row: int  # its place in the batch
    id: int  # its number in the request
    name: str  # what identifies it in messages
    reason: str  # why
    instead: int | None  # the number, as in the request, of the sample in its place; None where the row is left out


@dataclass(slots=True)
class Batch:
    """One rank's part of a global batch.

    Attributes:
        images: (N, C, H, W). RGB, or grey with C = 1, channels_last unless switched off; uint8 on the host, and
            normalised float32 on the device once `transfer` has passed it on.
        targets: (N,) class indices; the smallest unsigned integer type on the host, int64 after. Where
            images are mixed, on the device: (N, K) float32, the classes' shares of each image. Of images with masks:
            (N, H, W) uint8 class indices, 255 where a pixel isn't counted, on the host and on the device.
        ids: (N,) int64 on the host, the samples' numbers in their source; until `transfer`, those of the request,
            which also say how often a sample came before.
        valid: (N,) bool; False marks padding, and what an evaluation leaves out, which must not be counted.
        skipped: samples that could not be loaded; `targets` and `ids` are those of the samples in their places.
    """

    images: Tensor
    targets: Tensor
    ids: Tensor
    valid: Tensor
    skipped: tuple[Skipped, ...] = ()

    def __len__(self) -> int:
        return len(self.ids)

    def __repr__(self) -> str:
        each = {"images": self.images, "targets": self.targets}
        of = ", ".join(f"{key} {tuple(value.shape)} {value.dtype}" for key, value in each.items()).replace("torch.", "")
        return f"Batch({of}, on {self.images.device}; {int(self.valid.sum())} of {len(self)} are valid)"


@dataclass(frozen=True, slots=True)
class Preview:
    """Some samples in some epochs, as the model sees them, to look at."""

    images: NDArray[np.uint8]  # (R, C, H, W, 3) uint8 RGB, a row for each sample, a column for each epoch
    rows: tuple[str, ...]  # R names; a name may have several lines
    columns: tuple[str, ...]  # C names
    # where targets are masks, of each column (R, H, W) uint8 class indices that its images are shown with, or None for
    # the images alone
    masks: tuple[NDArray[np.uint8] | None, ...] = ()
    classes: tuple[str, ...] = ()  # names of the masks' values

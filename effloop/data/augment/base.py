"""What every augmentation is: draws for a run of samples before decoding, pixels after it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from effloop.registry import PartConfig, Registry


@dataclass
class AugmentConfig(PartConfig):
    """Fields that every augmentation has: none so far."""


@dataclass(frozen=True, slots=True)
class Draws:
    """What was drawn for a run of N samples.

    Attributes:
        keys: (N,) uint64, the samples' keys; an augmentation that needs more numbers later seeds
            its generator with them.
        boxes: (N, 4) int64: top, left, height, width of the region to decode.
        flips: (N,) bool, mirrored left to right.
    """

    keys: NDArray[np.uint64]
    boxes: NDArray[np.int64]
    flips: NDArray[np.bool_]


class Augment(ABC):
    """The sample operations between decoding and the batch. Stateless, thread-safe, picklable.

    Random numbers come from the samples' keys alone, so a sample looks the same on any engine, with
    any number of workers and in any batch.

    Attributes:
        size: height and width of what comes out, in pixels.
    """

    size: int

    @property
    def resizes_and_flips(self) -> bool:
        """Whether `apply` does this and nothing else: resize (bilinear, antialiased), mirror where `draws.flips`.

        An engine that does so itself, DALI's, can then carry out `draws` without `apply`.
        """
        return False

    @abstractmethod
    def draw(self, keys: NDArray[np.uint64], sizes: NDArray[np.int64]) -> Draws:
        """Draw for a run of samples, before any of them is decoded.

        Args:
            keys: (N,) uint64 from (seed, epoch, id).
            sizes: (N, 2) height and width of the stored images.
        """

    @abstractmethod
    def apply(self, region: NDArray[np.uint8], draws: Draws, row: int, out: NDArray[np.uint8]) -> None:
        """Turn one decoded region into one image of the batch.

        Args:
            region: (h, w, 3) uint8 RGB, what `draws.boxes[row]` asked for; never smaller than the
                size it is shrunk to.
            draws: what `draw` returned.
            row: the sample's place in `draws`.
            out: (size, size, 3) uint8, written.
        """


augments: Registry[Augment] = Registry("augment")

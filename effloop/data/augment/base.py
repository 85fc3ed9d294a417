"""What every augmentation is: draws for a run of samples before decoding, pixels after it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from effloop.errors import ConfigError
from effloop.registry import PartConfig, Registry


class Device(Enum):
    """Where a recipe's operations run."""

    cpu = "cpu"
    gpu = "gpu"


@dataclass
class AugmentConfig(PartConfig):
    """Fields that every augmentation has.

    Attributes:
        mixup: alpha of MixUp's Beta law, by which training images are mixed with others; 0 is off.
        cutmix: alpha of CutMix's, by which a box of a training image comes from another; 0 is off.
            With both on, each image takes one of them, with probability 1/2.
    """

    mixup: float = 0.0
    cutmix: float = 0.0

    def __post_init__(self) -> None:
        for key, alpha in (("mixup", self.mixup), ("cutmix", self.cutmix)):
            if not 0 <= alpha < math.inf:
                raise ConfigError(f"augment.{key}: {alpha} is not allowed; set a number above 0, or 0 for none")


@dataclass
class RecipeConfig(AugmentConfig):
    """Fields of augmentations that are recipes of named operations.

    Attributes:
        ops: label -> {op: NAME, parameter: value, ...}, in the order of the pipeline. Without `op` the label is the
            name; null leaves the operation out. A `size` that isn't given is `image_size`.
        order: labels, to reorder; those that aren't among them are left out. null takes `ops` as it stands.
        device: `cpu` does everything before the batch; `gpu` only what makes images of one size, and the rest
            on the whole batch, where the model is.
        eval_ratio: side of the centre crop for evaluation, as a share of the image's shorter side.
    """

    ops: dict[str, Any] = field(default_factory=dict)
    order: list[str] | None = None
    device: Device = Device.cpu
    eval_ratio: float = 0.875

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.eval_ratio <= 1:
            raise ConfigError(f"augment.eval_ratio: {self.eval_ratio} is not allowed; set a share above 0, at most 1")


@dataclass(frozen=True, slots=True)
class Draws:
    """What was drawn for a run of N samples.

    Attributes:
        keys: (N,) uint64, the samples' keys; what is drawn later comes from them, too.
        boxes: (N, 4) int64: top, left, height, width of the region to decode.
        flips: (N,) bool, mirrored left to right; only of augmentations that do nothing else beside resizing.
        drawn: what else was drawn, for whoever drew it.
    """

    keys: NDArray[np.uint64]
    boxes: NDArray[np.int64]
    flips: NDArray[np.bool_]
    drawn: tuple[Any, ...] = ()


class Augment(ABC):
    """What happens to a sample between decoding and the model. Stateless, thread-safe, picklable.

    Random numbers come from the samples' keys alone, so a sample looks the same on any engine, with
    any number of workers and in any batch.

    Attributes:
        size: height and width of what `apply` writes, in pixels.
    """

    size: int

    @property
    def at_least(self) -> tuple[int, int] | None:
        """Height and width that a decoder may shrink a region to, or a little more; None: it must not."""
        return self.size, self.size

    @property
    def resizes_and_flips(self) -> bool:
        """Whether `apply` does this and nothing else: resize (bilinear, antialiased), mirror where `draws.flips`.

        An engine that does so itself, DALI's, can then carry out `draws` without `apply`.
        """
        return False

    @property
    def resizes_and_flips_if_on_gpu(self) -> bool:
        """Whether `augment.device=gpu` would leave no more than that to `apply`, which does more now."""
        return False

    @property
    def has_device_part(self) -> bool:
        """Whether `on_device` does anything."""
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
            region: (h, w, 3) uint8 RGB, what `draws.boxes[row]` asked for; never smaller than `at_least`
                if it was shrunk. It may be read-only.
            draws: what `draw` returned.
            row: the sample's place in `draws`.
            out: (size, size, 3) uint8, contiguous, written.

        Raises:
            DataError: an operation can't take this image.
        """

    def on_device(self, images: Tensor, keys: NDArray[np.uint64]) -> Tensor:
        """What is left to do with a batch on its device; nothing, unless `augment.device=gpu`.

        Args:
            images: (N, 3, size, size) uint8, channels_last; may be written.
            keys: (N,) uint64 on the host, as `draw` had them.

        Returns:
            (N, 3, image_size, image_size) uint8.
        """
        del keys
        return images

    def check(self, sizes: NDArray[np.int64]) -> None:  # noqa: B027  most can take any image
        """Refuse images that can't be augmented, as far as their sizes tell.

        Args:
            sizes: (N, 2) height and width of stored images.

        Raises:
            ConfigError: a crop is larger than an image, or what comes out hasn't one size.
        """


augments: Registry[Augment] = Registry("augment")

"""Interface of augmentations: drawing for several samples before decoding, pixels after it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from effloop.batch import ImageSize
from effloop.data.image.mask import Mask
from effloop.errors import ConfigError, check_value
from effloop.lazy import Tensor
from effloop.registry import PartConfig, Registry


class Device(Enum):
    """Where a recipe's operations run."""

    cpu = "cpu"
    gpu = "gpu"


class MixMode(Enum):
    """What is mixed by one draw."""

    element = "element"  # each image, with the one before it
    pair = "pair"  # two images with each other
    batch = "batch"  # all images of a batch on one rank


class Evaluation(Enum):
    """How an image gets the size of the model's input where it isn't augmented."""

    crop = "crop"  # the largest centred box of that shape, or a share of it
    letterbox = "letterbox"  # all of it, as large as fits, and grey bars
    squash = "squash"  # all of it, in another aspect ratio


@dataclass
class AugmentConfig(PartConfig):
    """Fields that every augmentation has.

    Attributes:
        mixup: alpha of MixUp's Beta distribution; 0 is off.
        cutmix: alpha of CutMix's; 0 is off. With both, each draw is of one of them.
        mix: what has one draw of MixUp or CutMix: `element`, each image, mixed with the one before it; `pair`, two
            images, mixed with each other; `batch`, all images of a rank's batch, the first mixed with the last, the
            second with the last but one, as in timm.
        mix_prob: how probable it is that a draw mixes.
        cutmix_share: with both, how probable it is that a draw is of CutMix.
        mix_epochs: epochs after which nothing is mixed any more; null mixes to the end.
    """

    mixup: float = 0.0
    cutmix: float = 0.0
    mix: MixMode = MixMode.element
    mix_prob: float = 1.0
    cutmix_share: float = 0.5
    mix_epochs: int | None = None

    def __post_init__(self) -> None:
        for key, alpha in (("mixup", self.mixup), ("cutmix", self.cutmix)):
            check_value(f"augment.{key}", alpha, 0 <= alpha < math.inf, "a number above 0, or 0 for none")
        for key in ("mix_prob", "cutmix_share"):
            value = getattr(self, key)
            check_value(f"augment.{key}", value, 0 <= value <= 1, "a probability from 0 to 1")
        epochs = self.mix_epochs
        check_value("augment.mix_epochs", epochs, epochs is None or epochs >= 0, "a whole number of epochs, or null")


@dataclass
class RecipeConfig(AugmentConfig):
    """Fields of augmentations that are recipes of named operations.

    Attributes:
        ops: label -> {op: NAME, parameter: value, ...}, in order. Without `op` the label is the name; null leaves the
            operation out. `size` defaults to `image_size`.
        order: labels in another order; labels that it doesn't name are left out. null is the order of `ops`.
        device: `cpu` runs all operations before batching; `gpu` only those until all images have one size, and the
            rest on batches, on the model's device.
        eval: how an image gets the model's size for evaluation and prediction: `crop` takes its centre; `letterbox`
            all of it, as large as fits, between bars of grey 114, which is near 0 once normalised by ImageNet's mean;
            `squash` all of it, whatever its aspect ratio.
        eval_ratio: of `eval=crop`: the box's share of the largest of `image_size`'s shape in the image; of a square,
            its side as a share of the image's shorter side.
    """

    ops: dict[str, Any] = field(default_factory=dict)
    order: list[str] | None = None
    device: Device = Device.cpu
    eval: Evaluation = Evaluation.crop
    eval_ratio: float = 0.875

    def __post_init__(self) -> None:
        super().__post_init__()
        check_value("augment.eval_ratio", self.eval_ratio, 0 < self.eval_ratio <= 1, "a share above 0, at most 1")


@dataclass(frozen=True, slots=True)
class Draws:
    """What was drawn for N samples.

    Attributes:
        keys: (N,) uint64, the samples' keys, from which later draws come, too.
        boxes: (N, 4) int64: top, left, height, width of the region to decode.
        flips: (N,) bool: the horizontal flips of the fast path; else False.
        drawn: all other draws, private to the augmentation.
    """

    keys: NDArray[np.uint64]
    boxes: NDArray[np.int64]
    flips: NDArray[np.bool_]
    drawn: tuple[Any, ...] = ()


class Augment(ABC):
    """What happens to a sample between decoding and the model. Stateless, thread-safe, picklable.

    Random numbers come from the samples' keys only, so a sample looks the same on any engine, with any number of
    workers and in any batch. A sample has two slots, its image and maybe a mask of it: both go through the same crops,
    flips and warps, the mask by nearest neighbour, and what lies outside of the image is `IGNORED` in it.

    Attributes:
        size: height and width of `apply`'s output, in pixels.
        fast_path: whether `apply`, without a mask, resizes a region to `size` by `resize_into` and flips it where
            `Draws.flips` says so, before anything else: what decodes many images at once, C code or DALI, does both.
        has_rest: whether `apply_rest` has to do more then.
        alternates: whether the lowest bit of a sample's key has to change from each epoch to the next.
    """

    size: ImageSize
    fast_path: bool = False
    has_rest: bool = False
    alternates: bool = False

    @property
    def at_least(self) -> tuple[int, int] | None:
        """(height, width) down to which a decoder may scale a region; None: not at all."""
        return self.size

    @property
    def has_device_part(self) -> bool:
        """Whether `on_device` does anything."""
        return False

    @abstractmethod
    def draw(self, keys: NDArray[np.uint64], sizes: NDArray[np.int64]) -> Draws:
        """Draw for several samples, before any of them is decoded.

        Args:
            keys: (N,) uint64 from (seed, epoch, id).
            sizes: (N, 2) height and width of the stored images.
        """

    def choose(self, draws: Draws, row: int, mask: Mask) -> None:  # noqa: B027  most draw without looking
        """Look at a sample's whole (H, W) mask before its image is decoded, and draw another box for the row or not."""

    @abstractmethod
    def apply(
        self,
        region: NDArray[np.uint8],
        draws: Draws,
        row: int,
        out: NDArray[np.uint8],
        mask: tuple[Mask, Mask] | None = None,
    ) -> None:
        """Turn one decoded region into one image of the batch.

        Args:
            region: (h, w, C) uint8, RGB or grey: the box `draws.boxes[row]`, maybe scaled down, but not below
                `at_least`. It may be read-only.
            draws: from `draw`.
            row: the sample's index in `draws`.
            out: (*size, C) uint8, contiguous, written.
            mask: with `with_masks`: (H, W) uint8 of the whole image, and (*size) uint8, contiguous, which is written.

        Raises:
            DataError: an operation fails on this image.
        """

    def apply_rest(self, draws: Draws, row: int, out: NDArray[np.uint8]) -> None:
        """What remains of `apply` on the fast path: `out`, (*size, C) uint8, is resized and flipped; written."""
        raise NotImplementedError(f"{type(self).__name__} has_rest, and no apply_rest")

    def on_device(
        self, images: Tensor, keys: NDArray[np.uint64], masks: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Apply the remaining operations to a batch on its device; none unless `augment.device=gpu`.

        Args:
            images: (N, C, *size) uint8, channels_last; may be written. (N, C, *image_size) is returned.
            keys: (N,) uint64 on the host, as passed to `draw`.
            masks: (N, *size) uint8, if there are any; may be written.
        """
        return images, masks

    def with_masks(self) -> Augment:
        """This augmentation, for samples with masks; a ConfigError if an operation can't be applied to them."""
        raise ConfigError(
            f"augment: {type(self).__name__} can't be applied to masks; set augment=segmentation, or another of native"
        )

    def check(self, sizes: NDArray[np.int64]) -> None:  # noqa: B027  most accept any image
        """Refuse (N, 2) sizes of stored images that can't be augmented, by a ConfigError."""


augments: Registry[Augment] = Registry(
    "augment",
    {
        "albumentations": "effloop.data.augment.albumentations",
        "native": "effloop.data.augment.native.augment",
        "torchvision": "effloop.data.augment.torchvision",
    },
)

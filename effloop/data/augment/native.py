"""EffLoop's own augmentation: drawn for many samples at once, resized straight into the batch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from effloop.data.augment.base import Augment, AugmentConfig, Draws, augments
from effloop.data.keyed import uniforms
from effloop.data.resize import FastResize, mirror, resize_into
from effloop.errors import ConfigError

_ATTEMPTS = 10  # torchvision's


class Resize(Enum):
    """How crops are resized."""

    exact = "exact"
    fast = "fast"


@dataclass
class NativeConfig(AugmentConfig):
    """Fields of `augment=native`.

    Attributes:
        scale: smallest and largest area of the training crop, as a share of the image.
        ratio: smallest and largest width over height of the training crop.
        flip: probability that a training image is mirrored left to right.
        eval_ratio: side of the centre crop for evaluation, as a share of the image's shorter side.
        resize: `exact` is antialiased, within 0.1 levels of Pillow's; `fast` takes two thirds of the time and is
            not antialiased: 0.2 levels (mean) from `exact` where a crop is enlarged, 2.1 where it is shrunk.
    """

    scale: list[float] = field(default_factory=lambda: [0.08, 1.0])
    ratio: list[float] = field(default_factory=lambda: [3 / 4, 4 / 3])
    flip: float = 0.5
    eval_ratio: float = 0.875
    resize: Resize = Resize.exact

    def __post_init__(self) -> None:
        for key, values, top in (("scale", self.scale, 1.0), ("ratio", self.ratio, math.inf)):
            if len(values) != 2 or not 0 < values[0] <= values[1] <= top or math.isinf(values[1]):
                raise ConfigError(
                    f"augment.{key}: {values} is not allowed; set [smallest, largest] above 0"
                    + (" and at most 1" if top == 1 else "")
                )
        if not 0 <= self.flip <= 1:
            raise ConfigError(f"augment.flip: {self.flip} is not allowed; set a probability from 0 to 1")
        if not 0 < self.eval_ratio <= 1:
            raise ConfigError(f"augment.eval_ratio: {self.eval_ratio} is not allowed; set a share above 0, at most 1")


@augments.register("native", NativeConfig)
class NativeAugment(Augment):
    """Random-resized-crop and flip for training, centre crop for evaluation; antialiased."""

    def __init__(self, config: NativeConfig, *, size: int, train: bool) -> None:
        self.config = config
        self.size = size
        self.train = train
        self.resize = FastResize() if config.resize is Resize.fast else resize_into

    @property
    def resizes_and_flips(self) -> bool:
        return type(self).apply is NativeAugment.apply  # what is built on this one may do more

    def draw(self, keys: NDArray[np.uint64], sizes: NDArray[np.int64]) -> Draws:
        if not self.train:
            return Draws(keys, center_boxes(sizes, self.config.eval_ratio), np.zeros(len(keys), np.bool_))
        numbers = uniforms(keys, 2 * _ATTEMPTS + 3)
        boxes = random_resized_boxes(numbers[:, 1:], sizes, self.config.scale, self.config.ratio)
        return Draws(keys, boxes, numbers[:, 0] < self.config.flip)

    def apply(self, region: NDArray[np.uint8], draws: Draws, row: int, out: NDArray[np.uint8]) -> None:
        self.resize(region, out)
        if draws.flips[row]:
            mirror(out)


def random_resized_boxes(
    numbers: NDArray[np.float64], sizes: NDArray[np.int64], scale: list[float], ratio: list[float]
) -> NDArray[np.int64]:
    """Crop boxes by the law of torchvision's RandomResizedCrop, for many images at once.

    Args:
        numbers: (N, 22) in [0, 1): ten areas, ten ratios, top, left.
        sizes: (N, 2) height and width.
        scale: smallest and largest share of the area.
        ratio: smallest and largest width over height, drawn evenly in its logarithm.

    Returns:
        (N, 4) top, left, height, width. Where no attempt fits, the largest centred box of a ratio
        that is allowed.
    """
    height, width = sizes[:, 0], sizes[:, 1]
    area = (height * width)[:, None] * (scale[0] + (scale[1] - scale[0]) * numbers[:, :_ATTEMPTS])
    low, high = math.log(ratio[0]), math.log(ratio[1])
    aspect = np.exp(low + (high - low) * numbers[:, _ATTEMPTS : 2 * _ATTEMPTS])
    w = np.rint(np.sqrt(area * aspect)).astype(np.int64)
    h = np.rint(np.sqrt(area / aspect)).astype(np.int64)
    fits = (w > 0) & (w <= width[:, None]) & (h > 0) & (h <= height[:, None])
    rows, first = np.arange(len(sizes)), fits.argmax(axis=1)
    found = fits[rows, first]
    w = np.where(found, w[rows, first], np.minimum(width, np.maximum(np.rint(height * ratio[1]), 1)).astype(np.int64))
    h = np.where(found, h[rows, first], np.minimum(height, np.maximum(np.rint(width / ratio[0]), 1)).astype(np.int64))
    top = np.where(found, numbers[:, -2] * (height - h + 1), (height - h) // 2).astype(np.int64)
    left = np.where(found, numbers[:, -1] * (width - w + 1), (width - w) // 2).astype(np.int64)
    return np.stack([top, left, h, w], axis=1)


def center_boxes(sizes: NDArray[np.int64], share: float) -> NDArray[np.int64]:
    """(N, 2) sizes -> (N, 4) centred squares whose side is `share` of the shorter side.

    Cutting first and resizing after gives what resizing the shorter side to `size / share` and
    cutting the centre gives, up to rounding, and needs only that part of the image decoded.
    """
    side = np.maximum(np.rint(sizes.min(axis=1) * share), 1).astype(np.int64)
    corner = (sizes - side[:, None]) // 2
    return np.concatenate([corner, side[:, None], side[:, None]], axis=1)

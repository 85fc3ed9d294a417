"""Native random erasing, each image with its own box."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from effloop.data.augment.operation import (
    RATIOS,
    BadParameterError,
    Image,
    Keys,
    PixelOperation,
    Sizes,
    check_number,
    check_probability,
    check_range,
    operation,
    to_device,
)
from effloop.data.random import uniforms, words, words_on_device

_ATTEMPTS = 10  # torchvision's
_NUMBERS = 3 + 2 * _ATTEMPTS  # one for p, two for the position; noise begins after them
_WORD = 8  # bytes


@dataclass(frozen=True)
class ErasingDraws:
    """What `RandomErasing` drew for N images.

    Attributes:
        boxes: (N, 4) int64 top, left, height, width; zeros where nothing is erased.
        keys: (N,) uint64, for noise.
    """

    boxes: NDArray[np.int64]
    keys: Keys


@operation
class RandomErasing(PixelOperation):
    """Replaces a box of the image (Zhong et al. 2017, "Random Erasing Data Augmentation").

    Args:
        p: probability.
        scale: smallest and largest area of the box, as a share of the image.
        ratio: smallest and largest height over width of the box, log-uniform.
        value: of the box: a whole number from 0 to 255, three of them for red, green and blue, or "random": noise
            uniform in 0 to 255, as in the paper. (torchvision's is normal, for images already normalised.)
    """

    takes_masks = True

    def __init__(
        self,
        p: float = 0.5,
        scale: Sequence[float] = (0.02, 0.33),
        ratio: Sequence[float] = (0.3, 3.3),
        value: int | Sequence[int] | str = 0,
    ) -> None:
        self.p = check_probability("p", p)
        self.scale = check_range("scale", scale, 0, 1)
        self.ratio = check_range("ratio", ratio, *RATIOS)
        self.value = _colour(value)

    def draw(self, keys: Keys, sizes: Sizes) -> ErasingDraws:
        numbers = uniforms(keys, _NUMBERS)
        boxes = erasing_boxes(numbers[:, 1:], sizes, self.scale, self.ratio)
        boxes[numbers[:, 0] >= self.p] = 0
        return ErasingDraws(boxes, keys)

    def apply_inplace(self, image: Image, drawn: ErasingDraws, row: int) -> None:
        top, left, height, width = drawn.boxes[row].tolist()
        lines = image.reshape(len(image), -1)[
            top : top + height
        ]  # whole rows are written at once: pixel by pixel it takes 50 µs at 224x224
        if self.value is not None:
            lines[:, 3 * left : 3 * (left + width)] = np.tile(self.value, width)
        elif height:
            noise = _noise(drawn.keys[row : row + 1], image.shape[1], top, height)
            lines[:, 3 * left : 3 * (left + width)] = noise[:, 3 * left : 3 * (left + width)]

    def apply_batch(self, images: Tensor, drawn: ErasingDraws) -> Tensor:
        if not drawn.boxes[:, 2].any():
            return images
        top, left, height, width = to_device(drawn.boxes.T, images)[..., None]
        y, x = (torch.arange(length, device=images.device) for length in images.shape[2:])
        rows, columns = (y >= top) & (y < top + height), (x >= left) & (x < left + width)
        inside = rows[:, None, :, None] & columns[:, None, None, :]
        if self.value is None:
            return torch.where(inside, _noise_on_device(drawn.keys, images), images)
        return torch.where(inside, to_device(self.value, images).view(1, 3, 1, 1), images)


def erasing_boxes(
    numbers: NDArray[np.float64], sizes: Sizes, scale: tuple[float, float], ratio: tuple[float, float]
) -> NDArray[np.int64]:
    """Boxes with the distribution of torchvision's RandomErasing, for many images at once.

    Args:
        numbers: (N, 22) in [0, 1): ten areas, ten ratios, top, left.
        sizes: (N, 2) height and width of the images.
        scale: smallest and largest share of the area.
        ratio: smallest and largest height over width.

    Returns:
        (N, 4) top, left, height, width of the first of ten attempts that is smaller than the image; zeros if none is.
    """
    area = sizes.prod(axis=1)[:, None] * (scale[0] + (scale[1] - scale[0]) * numbers[:, :_ATTEMPTS])
    low, high = np.log(ratio)
    aspect = np.exp(low + (high - low) * numbers[:, _ATTEMPTS : 2 * _ATTEMPTS])
    observed_sizes = np.rint(np.sqrt(np.stack([area * aspect, area / aspect], axis=2))).astype(np.int64)
    fits = (observed_sizes < sizes[:, None]).all(axis=2)
    rows, first = np.arange(len(sizes)), fits.argmax(axis=1)
    found = observed_sizes[rows, first]
    corners = (numbers[:, -2:] * (sizes - found + 1)).astype(np.int64)
    return np.where(fits[rows, first][:, None], np.concatenate([corners, found], axis=1), 0)


def _colour(value: object) -> NDArray[np.uint8] | None:
    """(3,) uint8, or None for noise.

    Raises:
        BadParameterError: it is none of these.
    """
    if value == "random":
        return None
    parts = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value] * 3
    try:
        levels = [int(check_number("value", part, 0, 255)) for part in parts]
    except BadParameterError:
        levels = []
    if len(levels) != 3 or levels != parts:
        raise BadParameterError(
            f"value: {value} is not allowed; set a whole number from 0 to 255, three of them, or random"
        )
    return np.array(levels, np.uint8)


def _noise(keys: Keys, width: int, top: int, height: int) -> NDArray[np.uint8]:
    """(1,) key -> (height, 3 * width), these rows of the image's noise."""
    first, end = top * width * 3, (top + height) * width * 3
    start = first // _WORD
    numbers = words(keys, _NUMBERS + start, -(-end // _WORD) - start)
    found: NDArray[np.uint8] = numbers.astype("<u8").view(np.uint8)[0]
    return found[first - start * _WORD : end - start * _WORD].reshape(height, 3 * width)


def _noise_on_device(keys: Keys, images: Tensor) -> Tensor:
    """(N,) keys -> (N, 3, H, W) uint8, channels_last."""
    count, _, height, width = images.shape
    length = height * width * 3
    found = words_on_device(to_device(keys.view(np.int64), images), _NUMBERS, -(-length // _WORD))
    assert sys.byteorder == "little"
    return found.view(torch.uint8)[:, :length].view(count, height, width, 3).permute(0, 3, 1, 2)

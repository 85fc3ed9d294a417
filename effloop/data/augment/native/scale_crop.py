"""A random scale and a random crop in one: of the image only what the crop keeps is decoded and resized."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from effloop.data.augment.framing import ResizeInto, crop_batch, crop_mask_batch, resize_batch, to_device
from effloop.data.augment.operation import (
    MOST_SIDE,
    RATIOS,
    BadParameterError,
    CropOperation,
    Image,
    Keys,
    Sizes,
    check_number,
    check_range,
    check_size,
    check_whole,
    operation,
)
from effloop.data.image.grey import to_grey
from effloop.data.image.nearest import IGNORED, Mask, count_classes, crop_mask
from effloop.data.random import uniforms

_ATTEMPTS = 10  # mmseg's: the eleventh crop is taken as it is
_PLACED, _CORNERS = slice(6, 8), 10
"""Columns of what is drawn: height and width of the box in the output; from 10 on the other boxes' corners."""


@operation
class RandomScaleCrop(CropOperation):
    """The image resized by a random factor, then a random crop, padded at the right and the bottom where it is larger.

    What segmentation networks are usually trained with: mmsegmentation's RandomResize with `ratio_range`, keeping the
    aspect ratio, and RandomCrop with its `cat_max_ratio` (Chen et al. 2017, "Rethinking atrous convolution for semantic
    image segmentation", scale by 0.5 to 2).

    Args:
        size: height and width of the output, or one number for both.
        ratio: [smallest, largest] factor, uniform.
        base: the image's shorter side, in pixels, at a factor of 1; null is the shorter side of `size`.
        cat_max_ratio: of images with masks: the largest share that one class may have of the pixels in the crop that
            aren't ignored. Otherwise another place is drawn, up to ten times. 1 takes any.
        fill: of what is padded: a whole number from 0 to 255, or three of them for red, green and blue. The default is
            ImageNet's mean. Masks are padded with 255.
    """

    pads = True

    def __init__(
        self,
        size: object,
        ratio: object = (0.5, 2.0),
        base: int | None = None,
        cat_max_ratio: float = 1.0,
        fill: int | Sequence[int] = (124, 116, 104),
    ) -> None:
        self.target = check_size("size", size)
        self.ratio = check_range("ratio", ratio, *RATIOS)
        self.base = min(self.target) if base is None else check_whole("base", base, 1, MOST_SIDE)
        self.most = check_number("cat_max_ratio", cat_max_ratio, 0, 1)
        self.fill = _colour(fill)

    @property
    def looks(self) -> bool:
        """Whether masks decide where the crop is."""
        return self.most < 1

    def boxes(self, keys: Keys, sizes: Sizes) -> NDArray[np.int64]:
        return self.draw(keys, sizes)[:, :4]

    def draw(self, keys: Keys, sizes: Sizes) -> NDArray[np.int64]:
        """(N, 10 + 20): a box, height and width of the output, height and width of the box in it, and of the image
        when resized, then the corners of ten other boxes of the same shape, in the resized image.
        """
        numbers = uniforms(keys, 3 + 2 * _ATTEMPTS)
        factor = self.ratio[0] + (self.ratio[1] - self.ratio[0]) * numbers[:, :1]
        scale = factor * self.base / sizes.min(axis=1, keepdims=True)
        resized = np.maximum(1, np.floor(sizes * scale + 0.5)).astype(np.int64)
        placed = np.minimum(resized, self.target)
        corners = (numbers[:, 1:].reshape(len(keys), -1, 2) * (resized - placed + 1)[:, None]).astype(np.int64)
        box = _box_in_image(corners[:, 0], placed, resized, sizes)
        others = corners[:, 1:].reshape(len(keys), -1)
        return np.concatenate([box, self.out_sizes(sizes), placed, resized, others], axis=1)

    def choose(self, drawn: NDArray[np.int64], row: int, mask: Mask) -> bool:
        if not self.looks:
            return False
        found = drawn[row]
        for number, corner in enumerate(found[_CORNERS:].reshape(-1, 2)):
            counts = count_classes(mask, found[:4].tolist(), found[_PLACED].tolist())[:IGNORED]
            if np.count_nonzero(counts) > 1 and counts.max() < self.most * counts.sum():
                return number > 0
            found[:4] = _box_in_image(corner[None], found[None, 6:8], found[None, 8:10], np.array([mask.shape]))[0]
        return True

    def write(self, cut: Image, box: list[int], out: Image, resize: ResizeInto) -> None:
        height, width = box[_PLACED]
        if (height, width) == out.shape[:2]:
            target = out
        else:
            out[:] = self._filling(out.shape[2])
            target = out[:height, :width]
        if cut.shape == target.shape:
            target[:] = cut
        elif target is out:
            resize(cut, out)
        else:
            resized = np.empty(target.shape, np.uint8)
            resize(cut, resized)
            target[:] = resized

    def apply_batch(self, images: Tensor, drawn: NDArray[np.int64]) -> Tensor:
        channels = images.shape[1]
        out = images.new_empty((len(images), *self.target, channels)).permute(0, 3, 1, 2)
        out.copy_(to_device(self._filling(channels), images).view(1, channels, 1, 1))
        never = np.zeros(1, np.bool_)
        for row, numbers in enumerate(drawn):
            height, width = numbers[_PLACED].tolist()
            box, image = numbers[None, :4], images[row : row + 1]
            same = bool((box[0, 2:] == numbers[_PLACED]).all())
            cut = crop_batch(image, box, never) if same else resize_batch(image, box, (height, width))
            out[row : row + 1, :, :height, :width] = cut
        return out

    def apply_mask(self, mask: Mask, drawn: NDArray[np.int64], row: int) -> Mask:
        numbers = drawn[row].tolist()
        height, width = numbers[_PLACED]
        out = np.empty(self.target, np.uint8)
        if (height, width) != self.target:
            out.fill(IGNORED)
        crop_mask(mask, numbers, out[:height, :width])
        return out

    def apply_mask_batch(self, masks: Tensor, drawn: NDArray[np.int64]) -> Tensor:
        out = masks.new_full((len(masks), *self.target), IGNORED)
        for row, numbers in enumerate(drawn):
            height, width = numbers[_PLACED].tolist()
            out[row, :height, :width] = crop_mask_batch(masks[row : row + 1], numbers[None, :4], (height, width))[0]
        return out

    def _filling(self, channels: int) -> NDArray[np.uint8]:
        """(channels,) of a padded pixel."""
        return self.fill if channels == 3 else to_grey(self.fill[None, None])[0, 0]


def _box_in_image(
    corners: NDArray[np.int64], placed: NDArray[np.int64], resized: NDArray[np.int64], sizes: Sizes
) -> NDArray[np.int64]:
    """(N, 2) corners and shapes of boxes in resized images -> (N, 4) in the images themselves, at least one pixel."""
    begin, end = ((2 * at * sizes + resized) // (2 * resized) for at in (corners, corners + placed))
    begin = np.minimum(begin, sizes - 1)
    return np.concatenate([begin, np.maximum(end, begin + 1) - begin], axis=1)


def _colour(fill: object) -> NDArray[np.uint8]:
    """(3,) of red, green and blue.

    Raises:
        BadParameterError: it is no colour.
    """
    levels = list(fill) if isinstance(fill, Sequence) and not isinstance(fill, str) else [fill] * 3
    if len(levels) != 3 or not all(type(level) is int and 0 <= level <= 255 for level in levels):
        raise BadParameterError(f"fill: {fill} is not allowed; set a whole number from 0 to 255, or three of them")
    return np.array(levels, np.uint8)

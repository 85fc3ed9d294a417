"""Native crops, resizes and flips. Boxes of crops are known before an image is decoded."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from effloop.data.augment import operation as ops
from effloop.data.image.mask import IGNORED, Mask, count_classes, crop_mask
from effloop.data.image.pixels import flip, resize_into, to_grey
from effloop.data.random import uniforms
from effloop.lazy import Tensor
from effloop.native import address, function

_ATTEMPTS = 10  # torchvision's; of RandomScaleCrop mmseg's: the eleventh crop is taken as it is


@ops.operation
class RandomResizedCrop(ops.CropOperation):
    """A box of random area and ratio, resized, with torchvision's distribution (Szegedy et al. 2015, "Going deeper
    with convolutions").

    Args:
        size: height and width of the output, or one number for both.
        scale: smallest and largest area of the box, as a share of the image.
        ratio: smallest and largest width over height of the box, log-uniform.
    """

    def __init__(self, size: object, scale: object = (0.08, 1.0), ratio: object = (3 / 4, 4 / 3)) -> None:
        self.target = ops.check_size("size", size)
        self.scale = ops.check_range("scale", scale, 0, 1, above=True)
        self.ratio = ops.check_range("ratio", ratio, *ops.RATIOS)

    def boxes(self, keys: ops.Keys, sizes: ops.Sizes) -> NDArray[np.int64]:
        return random_resized_boxes(keys, sizes, self.scale, self.ratio)  # the first number is RandomHorizontalFlip's


@ops.operation
class Resize(ops.CropOperation):
    """The whole image, resized.

    Args:
        size: [height, width] of the output; one number is the shorter side, and keeps the aspect ratio.
    """

    def __init__(self, size: object) -> None:
        self.exact = isinstance(size, list | tuple)
        self.target = ops.check_size("size", size)

    def out_sizes(self, sizes: ops.Sizes) -> ops.Sizes:
        if self.exact:
            return super().out_sizes(sizes)
        out: ops.Sizes = self.target[0] * sizes // sizes.min(axis=1, keepdims=True)  # rounded down, as by torchvision
        return out


@ops.operation
class RandomCrop(ops.CropOperation):
    """A random crop, not resized.

    Args:
        size: height and width of the box, or one number for both.
        padding: pixels around the image, which may be part of the box.
        padding_mode: `constant`, which is black, or `reflect`, which doesn't repeat the edge, for a
            padding of less than half of size.
    """

    def __init__(self, size: object, padding: int = 0, padding_mode: str = "constant") -> None:
        self.target = ops.check_size("size", size)
        if type(padding) is not int or not 0 <= padding < min(self.target):
            raise ops.bad("padding", padding, "a number of pixels, at least 0 and less than size")
        if padding_mode not in ("constant", "reflect"):
            raise ops.bad("padding_mode", padding_mode, "constant or reflect")
        self.padding = padding
        self.pads = padding > 0
        self.reflects = self.pads and padding_mode == "reflect"
        if self.reflects:
            if 2 * padding >= min(self.target):  # only the part of the box in the image is decoded
                raise ops.bad("padding", padding, "less than half of size, or constant padding")
            self.write = ops.write_reflected

    def boxes(self, keys: ops.Keys, sizes: ops.Sizes) -> NDArray[np.int64]:
        space = self._space(sizes)
        corners = (uniforms(keys, 2) * (space + 1)).astype(np.int64) - self.padding
        return np.concatenate([corners, self.out_sizes(sizes)], axis=1)

    def apply_batch(self, images: Tensor, drawn: NDArray[np.int64]) -> Tensor:
        if self.reflects:
            return ops.crop_batch(images, drawn[:, :4], np.zeros(len(drawn), np.bool_))
        return super().apply_batch(images, drawn)

    def out_sizes(self, sizes: ops.Sizes) -> ops.Sizes:
        self._space(sizes)
        return super().out_sizes(sizes)

    def _space(self, sizes: ops.Sizes) -> ops.Sizes:
        """(N, 2) number of positions, less one."""
        if self.reflects and sizes.min() <= self.padding:
            raise ops.bad(
                "padding", self.padding, f"less than the {sizes.min()} pixels of an image, or constant padding"
            )
        space: ops.Sizes = sizes + 2 * self.padding - np.array(self.target)
        if space.min() < 0:
            height, width = sizes[space.min(axis=1).argmin()]
            raise ops.BadParameterError(
                f"size: {self.target[0]}x{self.target[1]} is more than the {height}x{width} pixels of an image; "
                "set it smaller, resize before, or set padding"
            )
        return space


@ops.operation
class CenterCrop(RandomCrop):
    """A centre crop, not resized.

    Args:
        size: height and width of the box, or one number for both.
    """

    def __init__(self, size: object) -> None:
        super().__init__(size)

    def boxes(self, keys: ops.Keys, sizes: ops.Sizes) -> NDArray[np.int64]:
        corners = np.rint(self._space(sizes) / 2).astype(np.int64)  # half to even, as torchvision does
        return np.concatenate([corners, self.out_sizes(sizes)], axis=1)


class WholeImage(ops.CropOperation):
    """The whole image; precedes a recipe that doesn't begin with a crop."""

    target = (0, 0)
    resizes = False

    def out_sizes(self, sizes: ops.Sizes) -> ops.Sizes:
        return sizes


PADDING = 114  # level of the bars beside a letterboxed image: ImageNet's mean is (124, 116, 104)


class CenterCropResize(ops.CropOperation):
    """For evaluation: a centre crop of the output's shape, resized; `share` is of the largest such box in the image."""

    def __init__(self, size: tuple[int, int], share: float) -> None:
        self.target = size
        self.share = share

    def boxes(self, keys: ops.Keys, sizes: ops.Sizes) -> NDArray[np.int64]:
        return shaped_boxes(sizes, self.target, self.share)


class PlacedCrop(ops.CropOperation):
    """A crop that becomes a part of the output; the rest is filled, and `IGNORED` in masks. On the host only.

    Attributes:
        fill: (3,) uint8, red, green and blue of a filled pixel.
    """

    pads = True
    on_host = True
    fill: NDArray[np.uint8]

    @abstractmethod
    def place(self, numbers: list[int]) -> tuple[int, int, int, int]:
        """A row of `draw` -> top, left, height and width of the part."""

    def filling(self, channels: int) -> NDArray[np.uint8]:
        """(channels,) of a filled pixel."""
        return self.fill if channels == 3 else to_grey(self.fill[None, None])[0, 0]

    def write(self, cut: ops.Image, box: list[int], out: ops.Image, flip: bool = False) -> None:
        top, left, height, width = self.place(box)
        whole = (height, width) == out.shape[:2]
        part = out if whole else np.empty((height, width, out.shape[2]), np.uint8)  # a resize needs contiguous memory
        if cut.shape == part.shape:
            part[:] = cut
        else:
            resize_into(cut, part)
        if not whole:
            out[:] = self.filling(out.shape[2])
            out[top : top + height, left : left + width] = part

    def apply_mask(self, mask: Mask, drawn: NDArray[np.int64], row: int) -> Mask:
        top, left, height, width = self.place(numbers := drawn[row].tolist())
        out = np.empty(self.target, np.uint8)
        out.fill(IGNORED)
        crop_mask(mask, numbers, out[top : top + height, left : left + width])
        return out


class Letterbox(PlacedCrop):
    """For evaluation: the whole image, as large as fits into the output, in its centre; the rest is grey."""

    fill = np.full(3, PADDING, np.uint8)

    def __init__(self, size: tuple[int, int]) -> None:
        self.target = size

    def place(self, numbers: list[int]) -> tuple[int, int, int, int]:
        (height, width), (rows, columns) = numbers[2:4], self.target
        scale = min(rows / height, columns / width)
        fit = max(1, round(height * scale)), max(1, round(width * scale))
        return (rows - fit[0]) // 2, (columns - fit[1]) // 2, *fit


def random_resized_boxes(
    keys: ops.Keys, sizes: ops.Sizes, scale: tuple[float, float], ratio: tuple[float, float]
) -> NDArray[np.int64]:
    """Crop boxes with the distribution of torchvision's RandomResizedCrop, for many images at once; 1 µs for each.

    Of a key's numbers in [0, 1) they take, from the second on, ten areas, ten ratios (log-uniform), top and left. If no
    attempt fits, it is the largest centred box of an allowed ratio. (N,) keys and (N, 2) sizes -> (N, 4).
    """
    keys, sizes = np.ascontiguousarray(keys), np.ascontiguousarray(sizes, np.int64)
    low, high = math.log(ratio[0]), math.log(ratio[1])
    ranges, ratios = np.array([scale[0], scale[1] - scale[0], low, high - low]), np.array(ratio)
    areas, aspects = np.empty((2, len(keys), _ATTEMPTS))
    boxes = np.empty((len(keys), 4), np.int64)
    images = address(keys), address(sizes), len(keys)
    numbers = address(areas), address(aspects)
    function("effloop_crop_attempts", "pplppp")(*images, address(ranges), *numbers)
    np.exp(aspects, out=aspects)
    function("effloop_crop_boxes", "pplpppp")(*images, address(ratios), *numbers, address(boxes))
    return boxes


def shaped_boxes(sizes: NDArray[np.int64], size: tuple[int, int], share: float) -> NDArray[np.int64]:
    """(N, 2) sizes of images -> (N, 4) boxes of an output's shape: a share of the largest that fits, in the centre.

    Of a square output that is a square whose side is `share` of the shorter side. Cropping, then resizing equals
    resizing the image until the largest box has `size / share`, then cropping the centre, up to rounding, and only that
    part has to be decoded.
    """
    shape = np.array(size) // math.gcd(*size)  # [1, 1] for a square, which is exact
    largest = (sizes / shape).min(axis=1)[:, None]
    sides = np.maximum(np.rint(largest * share * shape), 1).astype(np.int64)
    corner = ((sizes - sides) * 0.5).astype(np.int64)
    return np.concatenate([corner, sides], axis=1)


_PLACED, _CORNERS = slice(6, 8), 10
"""Columns of what is drawn: height and width of the box in the output; from 10 on the other boxes' corners."""


@ops.operation
class RandomScaleCrop(PlacedCrop):
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

    def __init__(
        self,
        size: object,
        ratio: object = (0.5, 2.0),
        base: int | None = None,
        cat_max_ratio: float = 1.0,
        fill: int | Sequence[int] = (124, 116, 104),
    ) -> None:
        self.target = ops.check_size("size", size)
        self.ratio = ops.check_range("ratio", ratio, *ops.RATIOS)
        self.base = min(self.target) if base is None else ops.check_whole("base", base, 1, ops.MOST_SIDE)
        self.most = ops.check_number("cat_max_ratio", cat_max_ratio, 0, 1)
        self.looks = self.most < 1  # whether masks decide where the crop is
        self.fill = np.array(ops.check_levels("fill", fill), np.uint8)

    def draw(self, keys: ops.Keys, sizes: ops.Sizes) -> NDArray[np.int64]:
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

    def place(self, numbers: list[int]) -> tuple[int, int, int, int]:
        return 0, 0, *numbers[_PLACED]  # type: ignore[return-value]


def _box_in_image(
    corners: NDArray[np.int64], placed: NDArray[np.int64], resized: NDArray[np.int64], sizes: ops.Sizes
) -> NDArray[np.int64]:
    """(N, 2) corners and shapes of boxes in resized images -> (N, 4) in the images themselves, at least one pixel."""
    begin, end = ((2 * at * sizes + resized) // (2 * resized) for at in (corners, corners + placed))
    begin = np.minimum(begin, sizes - 1)
    return np.concatenate([begin, np.maximum(end, begin + 1) - begin], axis=1)


@ops.operation
class RandomHorizontalFlip(ops.PixelOperation):
    """Horizontal flip.

    Args:
        p: its probability.
        alternate: flip half of the images, drawn once, and the other half in every second epoch: two epochs show both
            views of each image (Jordan 2024, "94% on CIFAR-10 in 3.29 seconds on a single GPU").
    """

    any_channels = True
    takes_masks = True
    _dim: ClassVar[int] = 3  # of (N, 3, H, W)

    def __init__(self, p: float = 0.5, alternate: bool = False) -> None:
        self.p, self.alternates = ops.check_number("p", p, 0, 1), alternate
        if type(alternate) is not bool:
            raise ops.bad("alternate", alternate, "true or false")
        if alternate and p != 0.5:
            raise ops.bad("p", p, "0.5, or alternate=false")

    def draw(self, keys: ops.Keys, sizes: ops.Sizes) -> NDArray[np.bool_]:
        return (keys & np.uint64(1)).astype(np.bool_) if self.alternates else ops.bernoulli(keys, self.p)

    def apply_inplace(self, image: ops.Image, drawn: NDArray[np.bool_], row: int) -> None:
        if drawn[row]:
            flip(image, self._dim - 2)

    def apply_batch(self, images: Tensor, drawn: NDArray[np.bool_]) -> Tensor:
        return images.flip(self._dim).where(ops.to_device(drawn, images).view(-1, 1, 1, 1), images)

    def apply_mask(self, mask: Mask, drawn: NDArray[np.bool_], row: int) -> Mask:
        if not drawn[row]:
            return mask
        return mask[:, ::-1] if self._dim == 3 else mask[::-1]

    def apply_mask_batch(self, masks: Tensor, drawn: NDArray[np.bool_]) -> Tensor:
        return masks.flip(self._dim - 1).where(ops.to_device(drawn, masks).view(-1, 1, 1), masks)


@ops.operation
class RandomVerticalFlip(RandomHorizontalFlip):
    """Vertical flip, with the same parameters."""

    _dim = 2

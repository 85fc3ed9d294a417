"""Native operations that crop and resize: their boxes are known before an image is decoded."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from effloop.data.augment.framing import ResizeInto
from effloop.data.augment.operation import (
    RATIOS,
    BadParameterError,
    CropOperation,
    Image,
    Keys,
    Sizes,
    check_range,
    check_size,
    operation,
)
from effloop.data.image.nearest import IGNORED, Mask, crop_mask
from effloop.data.random import uniforms
from effloop.native import address, library

_ATTEMPTS = 10  # torchvision's


@operation
class RandomResizedCrop(CropOperation):
    """A box of random area and ratio, resized, with torchvision's distribution (Szegedy et al. 2015, "Going deeper
    with convolutions").

    Args:
        size: height and width of the output, or one number for both.
        scale: smallest and largest area of the box, as a share of the image.
        ratio: smallest and largest width over height of the box, log-uniform.
    """

    def __init__(self, size: object, scale: object = (0.08, 1.0), ratio: object = (3 / 4, 4 / 3)) -> None:
        self.target = check_size("size", size)
        self.scale = check_range("scale", scale, 0, 1, above=True)
        self.ratio = check_range("ratio", ratio, *RATIOS)

    def boxes(self, keys: Keys, sizes: Sizes) -> NDArray[np.int64]:
        return random_resized_boxes(keys, sizes, self.scale, self.ratio)  # the first number is RandomHorizontalFlip's


@operation
class Resize(CropOperation):
    """The whole image, resized.

    Args:
        size: [height, width] of the output; one number is the shorter side, and keeps the aspect ratio.
    """

    def __init__(self, size: object) -> None:
        self.exact = isinstance(size, list | tuple)
        self.target = check_size("size", size)

    def boxes(self, keys: Keys, sizes: Sizes) -> NDArray[np.int64]:
        return np.concatenate([np.zeros_like(sizes), sizes], axis=1)

    def out_sizes(self, sizes: Sizes) -> Sizes:
        if self.exact:
            return super().out_sizes(sizes)
        out: Sizes = self.target[0] * sizes // sizes.min(axis=1, keepdims=True)  # rounded down, as by torchvision
        return out


@operation
class RandomCrop(CropOperation):
    """A random crop, not resized.

    Args:
        size: height and width of the box, or one number for both.
        padding: black pixels around the image, which may be part of the box.
    """

    def __init__(self, size: object, padding: int = 0) -> None:
        self.target = check_size("size", size)
        if type(padding) is not int or not 0 <= padding < min(self.target):
            raise BadParameterError(
                f"padding: {padding} is not allowed; set a number of pixels, at least 0 and less than size"
            )
        self.padding = padding
        self.pads = padding > 0

    def boxes(self, keys: Keys, sizes: Sizes) -> NDArray[np.int64]:
        space = self._space(sizes)
        corners = (uniforms(keys, 2) * (space + 1)).astype(np.int64) - self.padding
        return np.concatenate([corners, self.out_sizes(sizes)], axis=1)

    def out_sizes(self, sizes: Sizes) -> Sizes:
        self._space(sizes)
        return super().out_sizes(sizes)

    def _space(self, sizes: Sizes) -> Sizes:
        """(N, 2) number of positions, less one."""
        space: Sizes = sizes + 2 * self.padding - np.array(self.target)
        if space.min() < 0:
            height, width = sizes[space.min(axis=1).argmin()]
            raise BadParameterError(
                f"size: {self.target[0]}x{self.target[1]} is more than the {height}x{width} pixels of an image; "
                "set it smaller, resize before, or set padding"
            )
        return space


@operation
class CenterCrop(RandomCrop):
    """A centre crop, not resized.

    Args:
        size: height and width of the box, or one number for both.
    """

    def __init__(self, size: object) -> None:
        super().__init__(size)

    def boxes(self, keys: Keys, sizes: Sizes) -> NDArray[np.int64]:
        corners = np.rint(self._space(sizes) / 2).astype(np.int64)  # half to even, as torchvision does
        return np.concatenate([corners, self.out_sizes(sizes)], axis=1)


class WholeImage(CropOperation):
    """The whole image; precedes a recipe that doesn't begin with a crop."""

    target = (0, 0)
    resizes = False

    def out_sizes(self, sizes: Sizes) -> Sizes:
        return sizes

    def boxes(self, keys: Keys, sizes: Sizes) -> NDArray[np.int64]:
        return np.concatenate([np.zeros_like(sizes), sizes], axis=1)


PADDING = 114
"""Level of the bars beside a letterboxed image: ImageNet's mean is (124, 116, 104)."""

CENTER = (0.5, 0.5)
FIVE_PLACES = (CENTER, (0.0, 0.0), (0.0, 1.0), (1.0, 0.0), (1.0, 1.0))
"""Of a square in an image, down and across: the centre, the four corners."""


class CenterCropResize(CropOperation):
    """For evaluation: a centre crop of the output's shape, resized; or one elsewhere.

    Args:
        size: height and width of the output.
        share: of the largest such box in the image.
        place: of the box in the image, down and across: 0 is top or left, 1 bottom or right.
    """

    def __init__(self, size: tuple[int, int], share: float, place: tuple[float, float] = CENTER) -> None:
        self.target = size
        self.share = share
        self.place = place

    def boxes(self, keys: Keys, sizes: Sizes) -> NDArray[np.int64]:
        return shaped_boxes(sizes, self.target, self.share, self.place)


class Letterbox(CropOperation):
    """For evaluation: the whole image, as large as fits into the output, in its centre; the rest is grey.

    Args:
        size: height and width of the output.
    """

    pads = True

    def __init__(self, size: tuple[int, int]) -> None:
        self.target = size

    def boxes(self, keys: Keys, sizes: Sizes) -> NDArray[np.int64]:
        return np.concatenate([np.zeros_like(sizes), sizes], axis=1)

    def write(self, cut: Image, box: list[int], out: Image, resize: ResizeInto) -> None:
        top, left, height, width = self._placed(box)
        fit = np.empty((height, width, out.shape[2]), np.uint8)
        resize(cut, fit)
        out.fill(PADDING)
        out[top : top + height, left : left + width] = fit

    def apply_mask(self, mask: Mask, drawn: NDArray[np.int64], row: int) -> Mask:
        top, left, height, width = self._placed(drawn[row].tolist())
        out = np.full(self.target, IGNORED, np.uint8)
        crop_mask(mask, drawn[row].tolist(), out[top : top + height, left : left + width])
        return out

    def _placed(self, box: list[int]) -> tuple[int, int, int, int]:
        """Where the image is in the output: top, left, height, width."""
        (height, width), (rows, columns) = box[2:4], self.target
        scale = min(rows / height, columns / width)
        fit = max(1, round(height * scale)), max(1, round(width * scale))
        return (rows - fit[0]) // 2, (columns - fit[1]) // 2, *fit


def random_resized_boxes(
    keys: Keys, sizes: Sizes, scale: tuple[float, float], ratio: tuple[float, float]
) -> NDArray[np.int64]:
    """Crop boxes with the distribution of torchvision's RandomResizedCrop, for many images at once; 1 µs for each.

    Args:
        keys: (N,); of the numbers in [0, 1) of each, ten areas, ten ratios, top and left, from the second on.
        sizes: (N, 2) height and width.
        scale: smallest and largest share of the area.
        ratio: smallest and largest width over height, log-uniform.

    Returns:
        (N, 4) top, left, height, width. If no attempt fits, the largest centred box of an allowed ratio.
    """
    keys, sizes = np.ascontiguousarray(keys), np.ascontiguousarray(sizes, np.int64)
    low, high = math.log(ratio[0]), math.log(ratio[1])
    ranges, ratios = np.array([scale[0], scale[1] - scale[0], low, high - low]), np.array(ratio)
    areas, aspects = np.empty((2, len(keys), _ATTEMPTS))
    boxes = np.empty((len(keys), 4), np.int64)
    images = address(keys), address(sizes), len(keys)
    numbers = address(areas), address(aspects)
    draw, choose = _functions()
    draw(*images, address(ranges), *numbers)
    np.exp(aspects, out=aspects)
    choose(*images, address(ratios), *numbers, address(boxes))
    return boxes


@functools.cache
def _functions() -> tuple[Callable[..., None], Callable[..., None]]:
    """Those of native/crops.c."""
    draw, choose = library().effloop_crop_attempts, library().effloop_crop_boxes
    array, count = ctypes.c_void_p, ctypes.c_int64
    draw.restype, draw.argtypes = None, (array, array, count, array, array, array)
    choose.restype, choose.argtypes = None, (array, array, count, array, array, array, array)
    return draw, choose


def shaped_boxes(
    sizes: NDArray[np.int64], size: tuple[int, int], share: float, place: tuple[float, float] = CENTER
) -> NDArray[np.int64]:
    """Boxes of an output's shape: `share` of the largest that fits into an image, in the centre or another place.

    Of a square output that is a square whose side is `share` of the shorter side. Cropping, then resizing equals
    resizing the image until the largest box has `size / share`, then cropping the centre, up to rounding, and only that
    part has to be decoded.

    Args:
        sizes: (N, 2) of the images.
        size: height and width of the output; only their ratio counts.
        share: above 0, at most 1.
        place: down and across: 0 is top or left, 1 bottom or right.

    Returns:
        (N, 4) top, left, height, width.
    """
    shape = np.array(size) // math.gcd(*size)  # [1, 1] for a square, which is exact
    largest = (sizes / shape).min(axis=1)[:, None]
    sides = np.maximum(np.rint(largest * share * shape), 1).astype(np.int64)
    corner = ((sizes - sides) * place).astype(np.int64)
    return np.concatenate([corner, sides], axis=1)

"""Recipes of other libraries' operations, run one image at a time, each operation with its own random numbers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar

import numpy as np

from effloop.batch import ImageSize
from effloop.data.augment import recipe
from effloop.data.augment.base import Augment, Device, Draws, RecipeConfig
from effloop.data.augment.framing import Image, Sizes
from effloop.data.augment.operation import Keys
from effloop.data.augment.recipe import Step
from effloop.data.image.grey import to_grey, to_rgb
from effloop.data.image.mask import Mask
from effloop.errors import ConfigError, DataError, reason

T = TypeVar("T")

_LEAST_SIDE = 1031
"""Of the images that a recipe is tried on: larger than most crops."""

_TRIES = 8


class LibraryAugment(Augment, Generic[T]):
    """Base of augmentations by other libraries: operations run one by one, each with its own key.

    If a recipe begins with a random-resized-crop, its box is drawn before the image is decoded; else the whole image
    is decoded. A recipe is tried on a few black images when it is built: libraries check some parameters only then,
    and the sizes show from which operation on batches can be made. What is too seldom to be seen is a DataError later.

    Args:
        steps: the recipe's operations.
        config: `device` is where they run.
        image_size: height and width of the output, in pixels.
        channels: of the images. With 1, operations are given grey in three channels, as many need them, and what comes
            out becomes grey.

    Raises:
        ConfigError: the recipe gives images of several sizes, or of another than `image_size`.
    """

    def __init__(
        self, steps: Sequence[Step[T]], config: RecipeConfig, image_size: ImageSize, channels: int = 3
    ) -> None:
        self.config = config
        self.channels = channels
        self.crops_first = self.is_crop(steps[0].op)
        side = max(_LEAST_SIDE, 2 * max(image_size)) | 1
        sizes = [np.array([[side, side + 2], [side + 2, side * 5 // 4], [side * 5 // 4, side]])]  # not square, odd
        for step in steps:
            sizes.append(self._sizes_after(step, sizes[-1], first=step is steps[0]))
        recipe.check_output_sizes(sizes[-1], image_size)
        self._enough = side
        self._first_size = int(sizes[1][0, 0]), int(sizes[1][0, 1])
        # Once all images have one size, the rest can run on batches.
        alike = next(count for count, found in enumerate(sizes) if (found == found[0]).all())
        count = alike if config.device is Device.gpu else len(steps)
        self.host, self.device = list(steps[:count]), list(steps[count:])
        self.size = ImageSize(*sizes[count][0].tolist())

    @abstractmethod
    def is_crop(self, op: T) -> bool:
        """Whether it is the library's random-resized-crop, which `box` supports."""

    @abstractmethod
    def box(self, op: T, key: int, height: int, width: int) -> tuple[int, int, int, int]:
        """The box that a random-resized-crop draws for an image: top, left, height, width."""

    @abstractmethod
    def resize(self, op: T, region: Image, mask: Mask | None = None) -> tuple[Image, Mask | None]:
        """Resize a region, and the same box of a mask, as a random-resized-crop does after cropping."""

    @abstractmethod
    def run(
        self, op: T, key: int, image: Image, mask: Mask | None = None, *, always: bool = False
    ) -> tuple[Image, Mask | None]:
        """Apply an operation to an image on the host, and to its mask, with random numbers from `key` only.

        Args:
            op: the operation.
            key: from 0 to 2**64 - 1.
            image: (H, W, 3) uint8, contiguous, maybe read-only; must not be written.
            mask: (H, W) uint8, which must not be written; the image's pixels are the same with and without.
            always: do it however small its probability is.
        """

    @abstractmethod
    def probability(self, op: T) -> float:
        """How probable it is that an operation does anything."""

    @property
    def at_least(self) -> tuple[int, int] | None:
        return self._first_size if self.crops_first else None

    @property
    def has_device_part(self) -> bool:
        return bool(self.device)

    def draw(self, keys: Keys, sizes: Sizes) -> Draws:
        boxes = np.concatenate([np.zeros_like(sizes), sizes], axis=1)
        drawn = tuple(step.keys(keys).tolist() for step in self.host)
        if self.crops_first:
            crop, found = self.host[0].op, zip(drawn[0], sizes.tolist(), strict=True)
            boxes = np.array([self._box(crop, key, *size) for key, size in found], np.int64)
        return Draws(keys, boxes, np.zeros(len(keys), np.bool_), drawn)

    def apply(self, region: Image, draws: Draws, row: int, out: Image, mask: tuple[Mask, Mask] | None = None) -> None:
        image = region if self.channels == 3 else to_rgb(region)
        found = None if mask is None else mask[0]
        for number, (step, keys) in enumerate(zip(self.host, draws.drawn, strict=True)):
            try:
                if number or not self.crops_first:
                    image, found = self.run(step.op, keys[row], image, found)
                elif found is None:
                    image, _ = self.resize(step.op, image)
                else:
                    top, left, height, width = draws.boxes[row].tolist()
                    image, found = self.resize(step.op, image, found[top : top + height, left : left + width])
            except recipe.FAILURES as error:
                raise DataError(f"can't be augmented: {_line(step, error)}") from error
        if image.shape[:2] != out.shape[:2]:
            height, width = image.shape[:2]
            raise DataError(
                f"is {height}x{width} pixels after augment.ops, and not {'x'.join(map(str, self.size))} as all in a "
                "batch; end the recipe with a crop"
            )
        np.copyto(out, image if self.channels == 3 else to_grey(image))
        if mask is not None and found is not None:
            np.copyto(mask[1], found)

    def check(self, sizes: Sizes) -> None:
        some = _extreme(sizes)
        # Crops too large for these were found when the recipe was built: 12 megapixels needn't be rotated.
        some = np.ceil(some * np.minimum(1, self._enough / some.min(1, keepdims=True))).astype(np.int64)
        for step in self.host:
            some = self._sizes_after(step, some, first=step is self.host[0])
        recipe.check_output_sizes(some, self.size)

    def _box(self, op: T, key: int, height: int, width: int) -> tuple[int, int, int, int]:
        """As `box`, at least one pixel: for an image of one row or column a library may draw none, and fail."""
        top, left, rows, columns = self.box(op, key, height, width)
        rows, columns = max(1, rows), max(1, columns)
        return min(top, height - rows), min(left, width - columns), rows, columns

    def _sizes_after(self, step: Step[T], sizes: Sizes, *, first: bool) -> Sizes:
        """(N, 2) sizes of images -> (M, 2), the extreme ones that a few black ones have after an operation."""
        probability = self.probability(step.op)
        found = [] if probability == 1 else sizes.tolist()
        tried = np.resize(sizes, (max(_TRIES, len(sizes)), 2)).tolist() if probability else []
        try:
            for key, size in enumerate(tried):
                image = np.zeros((*size, 3), np.uint8)
                if first and self.crops_first:
                    _, _, height, width = self._box(step.op, key, *size)
                    image, _ = self.resize(step.op, image[:height, :width])
                else:
                    image, _ = self.run(step.op, key, image, always=True)
                if image.dtype != np.uint8 or image.shape[2:] != (3,):
                    raise ValueError(
                        f"it gives {image.dtype} of shape {image.shape}, and a recipe's images are uint8 RGB"
                    )
                found.append(image.shape[:2])
        except recipe.FAILURES as error:
            raise ConfigError(f"{_line(step, error)}; images of {size[0]}x{size[1]} are to be augmented") from error
        return _extreme(np.array(found, np.int64))


def _line(step: Step[T], error: Exception) -> str:
    return f"{step.where}: {step.name} fails: {reason(error)[:300]}"


def _extreme(sizes: Sizes) -> Sizes:
    """(N, 2) sizes -> (M, 2), those of extreme height, width and ratio, at most 6."""
    height, width = sizes.T
    rows = [row for value in (height, width, height / width) for row in (value.argmin(), value.argmax())]
    return np.unique(sizes[rows], axis=0)

"""Recipes of other libraries' operations, run one image at a time, each operation with its own random numbers."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from effloop.batch import ImageSize
from effloop.data.augment import recipe
from effloop.data.augment.base import Augment, Device, Draws, RecipeConfig
from effloop.data.augment.native.augment import for_evaluation
from effloop.data.augment.operation import Image, Keys, Sizes
from effloop.data.image.mask import Mask
from effloop.data.image.pixels import to_grey, to_rgb
from effloop.errors import ConfigError, DataError, reason
from effloop.system.cached import cached_property

_LEAST_SIDE = 1031  # of the images that a recipe is tried on: larger than most crops

_TRIES = 8

Masked = tuple[Image, Mask | None]  # an image and its mask, if it has one. Neither is written, both may be read-only


class LibraryOperation(ABC):
    """A library's operation, with random numbers from a key alone: 0 to 2**64 - 1. Picklable.

    Attributes:
        is_crop: whether it is the library's random-resized-crop, done in two steps: `box`, and after decoding `resize`.
    """

    is_crop: bool

    @property
    @abstractmethod
    def probability(self) -> float:
        """How probable it is that it does anything."""

    @abstractmethod
    def __call__(self, key: int, image: Image, mask: Mask | None = None, *, always: bool = False) -> Masked:
        """Apply it to an (H, W, 3) uint8 image, or even `always`; the pixels are the same with and without a mask."""

    @abstractmethod
    def box(self, key: int, height: int, width: int) -> tuple[int, int, int, int]:
        """The box that it draws for an image: top, left, height, width."""

    @abstractmethod
    def resize(self, region: Image, mask: Mask | None = None) -> Masked:
        """Resize a region, and the same box of a mask, as after cropping."""

    @property
    @abstractmethod
    def without_masks(self) -> str:
        """The name of what can't be applied to a mask: itself, or an operation in it; empty if all can."""

    def with_masks(self) -> LibraryOperation:
        """The same, for images with masks."""
        return self


class LibraryAugment(Augment):
    """A recipe of another library's operations, on the host.

    If a recipe begins with a random-resized-crop, its box is drawn before the image is decoded; else the whole image
    is decoded. A recipe is tried on a few black images when it is built: libraries check some parameters only then.
    What is too seldom to be seen is a DataError later.

    Args:
        config: the recipe.
        operations: of the library, by name.
        image_size: height and width of the output, in pixels.
        channels: of the images. With 1, operations are given grey in three channels, as many need them, and what comes
            out becomes grey.

    Raises:
        ConfigError: the recipe gives images of several sizes, or of another than `image_size`.
    """

    def __init__(
        self,
        config: RecipeConfig,
        operations: Mapping[str, Callable[..., LibraryOperation]],
        image_size: ImageSize,
        channels: int = 3,
    ) -> None:
        self.channels = channels
        self.steps = recipe.build_steps(config, operations, image_size)
        self.size = image_size
        first = self.steps[0].op
        self.crops_first = first.is_crop and first.probability == 1
        side = max(_LEAST_SIDE, 2 * max(image_size)) | 1
        sizes = ((side, side + 2), (side + 2, side * 5 // 4), (side * 5 // 4, side))  # not square, odd
        found = []
        for number in range(_TRIES):
            height, width = sizes[number % 3]
            try:
                draws = self.draw(np.array([number], np.uint64), np.array([[height, width]]))
                black = np.zeros((*draws.boxes[0, 2:], 3), np.uint8)
                image, _ = self._run(black, draws, 0, always=number % 2 == 0)
            except DataError as error:
                line = str(error).removeprefix(_FAILS)
                raise ConfigError(f"{line}; images of {height}x{width} are to be augmented") from error
            found.append(image.shape[:2])
        recipe.check_output_sizes(np.array(found), image_size)

    @cached_property  # a library takes 0.1 to 0.2 ms, and it is asked for with each image
    def at_least(self) -> tuple[int, int] | None:
        """The size of the first crop."""
        if not self.crops_first:
            return None
        height, width, _ = self.steps[0].op.resize(np.zeros((8, 8, 3), np.uint8))[0].shape
        return height, width

    def draw(self, keys: Keys, sizes: Sizes) -> Draws:
        boxes = np.concatenate([np.zeros_like(sizes), sizes], axis=1)
        drawn = tuple(step.keys(keys).tolist() for step in self.steps)
        if self.crops_first:
            found = zip(drawn[0], sizes.tolist(), strict=True)
            try:
                boxes = np.array([_box(self.steps[0].op, key, *size) for key, size in found], np.int64)
            except recipe.FAILURES as error:
                raise _failure(self.steps[0], error) from error
        return Draws(keys, boxes, np.zeros(len(keys), np.bool_), drawn)

    def apply(self, region: Image, draws: Draws, row: int, out: Image, mask: tuple[Mask, Mask] | None = None) -> None:
        image = region if self.channels == 3 else to_rgb(region)
        image, found = self._run(image, draws, row, None if mask is None else mask[0])
        if image.shape[:2] != out.shape[:2]:
            height, width = image.shape[:2]
            raise DataError(
                f"is {height}x{width} pixels after augment.ops, and not {'x'.join(map(str, self.size))} as all in a "
                "batch; end the recipe with a crop"
            )
        np.copyto(out, image if self.channels == 3 else to_grey(image))
        if mask is not None and found is not None:
            np.copyto(mask[1], found)

    def _run(self, image: Image, draws: Draws, row: int, mask: Mask | None = None, *, always: bool = False) -> Masked:
        for number, (step, keys) in enumerate(zip(self.steps, draws.drawn, strict=True)):
            try:
                if number or not self.crops_first:
                    image, mask = step.op(keys[row], image, mask, always=always and step.op.probability > 0)
                elif mask is None:
                    image, _ = step.op.resize(image)
                else:
                    top, left, height, width = draws.boxes[row].tolist()
                    image, mask = step.op.resize(image, mask[top : top + height, left : left + width])
                if image.dtype != np.uint8 or image.shape[2:] != (3,):
                    raise ValueError(
                        f"it gives {image.dtype} of shape {image.shape}, and a recipe's images are uint8 RGB"
                    )
            except recipe.FAILURES as error:
                raise _failure(step, error) from error
        return image, mask

    def with_masks(self) -> Augment:
        for step in self.steps:
            if name := step.op.without_masks:
                raise ConfigError(
                    f"{step.where}: {name} can't be applied to masks; leave it out, or set augment=native_rand"
                )
        made = copy.copy(self)
        made.steps = [replace(step, op=step.op.with_masks()) for step in self.steps]
        return made


_FAILS = "can't be augmented: "


def _failure(step: recipe.Step[LibraryOperation], error: Exception) -> DataError:
    return DataError(f"{_FAILS}{step.where}: {step.name} fails: {reason(error)[:300]}")


def _box(op: LibraryOperation, key: int, height: int, width: int) -> tuple[int, int, int, int]:
    """As `op.box`, at least one pixel: for an image of one row or column a library may draw none, and fail."""
    top, left, rows, columns = op.box(key, height, width)
    rows, columns = max(1, rows), max(1, columns)
    return min(top, height - rows), min(left, width - columns), rows, columns


def build(
    config: RecipeConfig,
    operations: Callable[[], Mapping[str, Callable[..., LibraryOperation]]],
    size: ImageSize,
    channels: int,
    *,
    train: bool,
) -> Augment:
    """What a library's part builds; `operations` imports the library, and isn't called for evaluation."""
    if train and config.device is Device.gpu:  # a run of an earlier version can still be evaluated
        raise ConfigError(
            f"augment.device: gpu is not allowed, {config.name} runs on the host only; set augment.device=cpu, or "
            "augment=native"
        )
    return LibraryAugment(config, operations(), size, channels) if train else for_evaluation(config, size, channels)

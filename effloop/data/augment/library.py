"""Recipes of another library's operations: one sample at a time, each operation with random numbers of its own."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Generic, TypeVar

import numpy as np

from effloop.data.augment import recipe
from effloop.data.augment.base import Augment, Device, Draws, RecipeConfig
from effloop.data.augment.framing import Image, Sizes
from effloop.data.augment.operation import Keys
from effloop.data.augment.outcomes import After, extremes, probes, tried
from effloop.data.augment.recipe import Step
from effloop.errors import ConfigError, DataError

T = TypeVar("T")

_LARGE = 1031
"""Hardly a crop is larger than this and `image_size`; images of this size are tried only where smaller ones fail."""


class LibraryAugment(Augment, Generic[T]):
    """What augmentations by other libraries share: operations are run one by one, each with a key of its own.

    Where a recipe begins with a random-resized-crop, its box is drawn before the image is decoded; else the
    whole image is decoded.

    Args:
        steps: the recipe's operations.
        config: says where they run.
        image_size: height and width of what comes out, in pixels.

    Raises:
        ConfigError: the recipe gives images of several sizes, or of another than `image_size`.
    """

    def __init__(self, steps: Sequence[Step[T]], config: RecipeConfig, image_size: int) -> None:
        self.config = config
        self.crops_first = self.is_crop(steps[0].made)
        sizes = self._sizes(steps, image_size)
        recipe.check_end(sizes[-1], image_size)
        self._enough = int(sizes[0].min())
        self._first_size = int(sizes[1][0, 0]), int(sizes[1][0, 1])
        # From the first on that gives all images one size, the rest can be done to a batch.
        alike = next(count for count, found in enumerate(sizes) if (found == found[0, 0]).all())
        count = alike if config.device is Device.gpu else len(steps)
        self.host, self.device = list(steps[:count]), list(steps[count:])
        self.size = int(sizes[count][0, 0])

    @abstractmethod
    def is_crop(self, made: T) -> bool:
        """Whether it is the library's random-resized-crop, whose `box` can be asked for."""

    @abstractmethod
    def box(self, made: T, key: int, height: int, width: int) -> tuple[int, int, int, int]:
        """What the library's random-resized-crop draws for an image: top, left, height, width."""

    @abstractmethod
    def resize(self, made: T, region: Image) -> Image:
        """What the library's random-resized-crop makes of the box, once that is cut out: (h, w, 3) of its size."""

    @abstractmethod
    def run(self, made: T, key: int, image: Image) -> Image:
        """Do an operation to an image on the host, by the random numbers of `key` and no others.

        Args:
            made: the operation.
            key: from 0 to 2**64 - 1.
            image: (H, W, 3) uint8, contiguous; may be read-only, and may not be written.

        Returns:
            (h, w, 3) uint8.
        """

    @abstractmethod
    def sizes_after(self, made: T, sizes: Sizes) -> Sizes:
        """(N, 2) sizes of images -> (M, 2), what an operation may make of them, by trying it on black ones.

        It is done to each, however seldom it is done in training, and so is each operation inside of it, unless its
        probability is 0; what one raises is a recipe's error.
        """

    def inside(self, label: str, made: T) -> After:
        """`sizes_after` of an operation inside of another, whose errors name it."""

        def after(sizes: Sizes) -> Sizes:
            try:
                return self.sizes_after(made, sizes)
            except recipe.FAILURES as error:
                raise ValueError(f"{label}: {error}") from error

        return after

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
            crop, found = self.host[0].made, zip(drawn[0], sizes.tolist(), strict=True)
            boxes = np.array([self._box(crop, key, *size) for key, size in found], np.int64)
        return Draws(keys, boxes, np.zeros(len(keys), np.bool_), drawn)

    def apply(self, region: Image, draws: Draws, row: int, out: Image) -> None:
        image = region
        for number, (step, keys) in enumerate(zip(self.host, draws.drawn, strict=True)):
            try:
                if number == 0 and self.crops_first:
                    image = self.resize(step.made, image)
                else:
                    image = self.run(step.made, keys[row], image)
            except recipe.FAILURES as error:
                raise DataError(f"can't be augmented: {_line(step, error)}") from error
        if image.shape != out.shape:
            height, width = image.shape[:2]
            raise DataError(
                f"is {height}x{width} pixels after augment.ops, and not {self.size}x{self.size} as all in a batch; "
                "end the recipe with a crop"
            )
        np.copyto(out, image)

    def check(self, sizes: Sizes) -> None:
        height, width = sizes.T
        some = sizes[[height.argmin(), width.argmin(), (height / width).argmin(), (height / width).argmax()]]
        # Whatever is too large for these was found when the recipe was read: 12 megapixels needn't be turned.
        some = np.unique(np.ceil(some * np.minimum(1, self._enough / some.min(1, keepdims=True))), axis=0)
        some = some.astype(np.int64)
        for number, step in enumerate(self.host):
            some = self._sizes_after(step, some, framed=number == 0 and self.crops_first)
        recipe.check_end(some, self.size)

    def _box(self, made: T, key: int, height: int, width: int) -> tuple[int, int, int, int]:
        """As `box`, of at least one pixel: of a line of them, a library may ask for none, and then fails."""
        top, left, rows, columns = self.box(made, key, height, width)
        rows, columns = max(1, rows), max(1, columns)
        return min(top, height - rows), min(left, width - columns), rows, columns

    def _framed(self, made: T, key: int, image: Image) -> Image:
        """A leading crop, as training does it."""
        top, left, rows, columns = self._box(made, key, *image.shape[:2])
        return self.resize(made, image[top : top + rows, left : left + columns])

    def _sizes(self, steps: Sequence[Step[T]], image_size: int) -> list[Sizes]:
        """Sizes that it is tried on, and what may come out of each operation."""
        side = max(256, min(2 * image_size, image_size + 256))
        try:
            return self._ends(steps, probes(side))
        except ConfigError:
            if side >= _LARGE:
                raise
            return self._ends(steps, probes(_LARGE))

    def _ends(self, steps: Sequence[Step[T]], sizes: Sizes) -> list[Sizes]:
        ends = [sizes]
        for step in steps:
            ends.append(self._sizes_after(step, ends[-1]))
        return ends

    def _sizes_after(self, step: Step[T], sizes: Sizes, *, framed: bool = False) -> Sizes:
        """As `sizes_after`, the extreme ones.

        Raises:
            ConfigError: it fails.
        """
        try:
            if framed:
                return extremes(tried(partial(self._framed, step.made), sizes))
            return extremes(self.sizes_after(step.made, sizes))
        except recipe.FAILURES as error:
            raise ConfigError(f"{_line(step, error)}; {_dimensions(sizes)} are to be augmented") from error


def _line(step: Step[T], error: Exception) -> str:
    return f"{step.where}: {step.name} fails: {' '.join(str(error).split())[:300]}"


def _dimensions(sizes: Sizes) -> str:
    some = [f"{height}x{width}" for height, width in sizes[:4].tolist()]
    return "images of " + ", ".join(some) + (", …" if len(sizes) > len(some) else "")

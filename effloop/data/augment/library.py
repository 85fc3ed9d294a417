"""Recipes of other libraries' operations, run one image at a time, each operation with its own random numbers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
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

_LARGE = 1031
"""Crops are hardly larger than this; recipes are tried on images of this size only where smaller ones fail."""


class LibraryAugment(Augment, Generic[T]):
    """Base of augmentations by other libraries: operations run one by one, each with its own key.

    If a recipe begins with a random-resized-crop, its box is drawn before the image is decoded; else the whole image
    is decoded.

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
        sizes = self._sizes(steps, image_size)
        recipe.check_output_sizes(sizes[-1], image_size)
        self._enough = int(sizes[0].min())
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
        """Resize a region, and the same box of a mask, as a random-resized-crop does after cropping.

        Returns:
            (h, w, 3) of the operation's output size, and (h, w).
        """

    @abstractmethod
    def run(self, op: T, key: int, image: Image, mask: Mask | None = None) -> tuple[Image, Mask | None]:
        """Apply an operation to an image on the host, and to its mask, with random numbers from `key` only.

        Args:
            op: the operation.
            key: from 0 to 2**64 - 1.
            image: (H, W, 3) uint8, contiguous, maybe read-only; must not be written.
            mask: (H, W) uint8, which must not be written; the image's pixels are the same with and without.

        Returns:
            (h, w, 3) uint8 and (h, w) uint8.
        """

    @abstractmethod
    def sizes_after(self, op: T, sizes: Sizes) -> Sizes:
        """(N, 2) sizes of images -> (M, 2) sizes of an operation's outputs, found by trying it on black images.

        It is applied however small its probability is, unless that is 0, and so is each operation in a container;
        exceptions become errors of the recipe.
        """

    def inside(self, label: str, op: T) -> SizeMap:
        """`sizes_after` of an operation in a container; errors name it."""

        def after(sizes: Sizes) -> Sizes:
            try:
                return self.sizes_after(op, sizes)
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
        height, width = sizes.T
        some = sizes[[height.argmin(), width.argmin(), (height / width).argmin(), (height / width).argmax()]]
        # Crops too large for these were found when the recipe was built: 12 megapixels needn't be rotated.
        some = np.unique(np.ceil(some * np.minimum(1, self._enough / some.min(1, keepdims=True))), axis=0)
        some = some.astype(np.int64)
        for number, step in enumerate(self.host):
            some = self._sizes_after(step, some, framed=number == 0 and self.crops_first)
        recipe.check_output_sizes(some, self.size)

    def _box(self, op: T, key: int, height: int, width: int) -> tuple[int, int, int, int]:
        """As `box`, at least one pixel: for an image of one row or column a library may draw none, and fail."""
        top, left, rows, columns = self.box(op, key, height, width)
        rows, columns = max(1, rows), max(1, columns)
        return min(top, height - rows), min(left, width - columns), rows, columns

    def _framed(self, op: T, key: int, image: Image) -> Image:
        """A leading crop, as in training."""
        top, left, rows, columns = self._box(op, key, *image.shape[:2])
        return self.resize(op, image[top : top + rows, left : left + columns])[0]

    def _sizes(self, steps: Sequence[Step[T]], image_size: ImageSize) -> list[Sizes]:
        """The sizes that the recipe is tried on, and the possible sizes after each operation."""
        longer = max(image_size)
        side = max(256, min(2 * longer, longer + 256))
        try:
            return self._ends(steps, probe_sizes(side))
        except ConfigError:
            if side >= _LARGE:
                raise
            return self._ends(steps, probe_sizes(_LARGE))

    def _ends(self, steps: Sequence[Step[T]], sizes: Sizes) -> list[Sizes]:
        ends = [sizes]
        for step in steps:
            ends.append(self._sizes_after(step, ends[-1]))
        return ends

    def _sizes_after(self, step: Step[T], sizes: Sizes, *, framed: bool = False) -> Sizes:
        """The extreme ones of `sizes_after`.

        Raises:
            ConfigError: the operation fails.
        """
        try:
            if framed:
                return extreme_sizes(observed_sizes(partial(self._framed, step.op), sizes))
            return extreme_sizes(self.sizes_after(step.op, sizes))
        except recipe.FAILURES as error:
            some = ", ".join(f"{height}x{width}" for height, width in sizes[:4].tolist())
            raise ConfigError(f"{_line(step, error)}; images of {some} are to be augmented") from error


def _line(step: Step[T], error: Exception) -> str:
    return f"{step.where}: {step.name} fails: {reason(error)[:300]}"


# Possible output sizes of an operation are found by trying it on a few black images.

SizeMap = Callable[[Sizes], Sizes]
"""(N, 2) sizes of inputs -> (M, 2) possible sizes of outputs."""

_TRIES = 8
"""Runs per size for an operation that changes sizes; in total for one that doesn't seem to."""

_PIXELS = 4_000_000
"""Limit for the images of each size together, at least two of which are tried. Rotating as many takes 0.4 s."""

_ORDERS, _ROUNDS = 4, 4
"""Longer containers aren't tried in every order, nor more of their transforms in a row."""


def probe_sizes(side: int) -> Sizes:
    """(3, 2): several odd, non-square sizes of at least `side`."""
    short, long = side | 1, side * 5 // 4 | 1
    return np.array([[short, short + 2], [short + 2, long], [long, short]])


def extreme_sizes(sizes: Sizes) -> Sizes:
    """(N, 2) sizes -> (M, 2), those of extreme height, width and ratio, at most 6."""
    height, width = sizes.T
    rows = [row for value in (height, width, height / width) for row in (value.argmin(), value.argmax())]
    return np.unique(sizes[rows], axis=0)


def observed_sizes(run: Callable[[int, Image], Image], sizes: Sizes) -> Sizes:
    """The sizes of an operation's outputs for images of these sizes.

    Args:
        run: the operation: a key and (H, W, 3) uint8 -> (h, w, 3) uint8.
        sizes: (N, 2).
    """
    some = np.repeat(sizes, max(1, _TRIES // len(sizes)), axis=0)
    found = _shapes(run, some, 0)
    if (found != some).any():
        each = int(np.clip(_PIXELS // sizes.prod(1).sum(), 2, _TRIES))
        found = np.concatenate([found, _shapes(run, np.repeat(sizes, each, axis=0), len(some))])
    return np.unique(found, axis=0)


def sequential_sizes(parts: Sequence[SizeMap], sizes: Sizes) -> Sizes:
    """Possible sizes after all parts, in order."""
    for part in parts:
        sizes = extreme_sizes(part(sizes))
    return sizes


def choice_sizes(parts: Sequence[SizeMap], sizes: Sizes) -> Sizes:
    """Possible sizes after any one part."""
    return np.unique(np.concatenate([part(sizes) for part in parts]), axis=0)


def shuffled_sizes(parts: Sequence[SizeMap], sizes: Sizes) -> Sizes:
    """Possible sizes after all parts, in any order."""
    orders = [[*parts[turn:], *parts[:turn]] for turn in range(len(parts))]
    if len(parts) > _ORDERS:
        orders = [list(parts), list(parts)[::-1]]
    return np.unique(np.concatenate([sequential_sizes(order, sizes) for order in orders]), axis=0)


def some_of_sizes(parts: Sequence[SizeMap], count: int, sizes: Sizes) -> Sizes:
    """Possible sizes after any `count` parts."""
    for _ in range(min(count, _ROUNDS)):
        before, sizes = sizes, extreme_sizes(choice_sizes(parts, sizes))
        if np.array_equal(before, sizes):
            break
    return sizes


def _shapes(run: Callable[[int, Image], Image], sizes: Sizes, first: int) -> Sizes:
    found = []
    for key, size in enumerate(sizes.tolist(), first):
        image = run(key, np.zeros((*size, 3), np.uint8))
        if image.dtype != np.uint8 or image.shape[2:] != (3,):
            raise ValueError(f"it gives {image.dtype} of shape {image.shape}, and a recipe's images are uint8 RGB")
        found.append(image.shape[:2])
    return np.array(found, np.int64)

"""What a native recipe is made of: operations that draw for many samples at once, before any is decoded."""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from effloop.data.augment.framing import Image, ResizeInto, Sizes, inside, place, reframed, to_device
from effloop.data.random import uniforms

Keys = NDArray[np.uint64]

MOST_FACTOR = 1e4
"""The largest factor of colours or sharpness. 1e39 isn't a number in float32, and made images black."""

MOST_SIDE = 16_384
"""The largest height or width of what an operation makes, in pixels: 800 MB an image."""

RATIOS = (1e-3, 1e3)
"""The smallest and largest ratio of two lengths. Beyond, nothing is left to see; by 1e-320, numbers overflow."""


class BadParameterError(ValueError):
    """A parameter of an operation that can't be taken: `NAME: got is not allowed; set ...`."""


class Operation(ABC):
    """One named operation; its constructor's arguments are its parameters. Stateless and picklable.

    Random numbers come from the keys alone, which are the operation's own: no other has the same.
    """

    @abstractmethod
    def draw(self, keys: Keys, sizes: Sizes) -> Any:
        """Draw for N samples at once.

        Args:
            keys: (N,) uint64.
            sizes: (N, 2) height and width of the images that come in.

        Returns:
            What the other methods take as `drawn`; row i of it depends on keys[i] and sizes[i] alone.
        """

    @abstractmethod
    def out_sizes(self, sizes: Sizes) -> Sizes:
        """(N, 2) sizes that come in -> (N, 2) that go out.

        Raises:
            BadParameterError: an image is too small.
        """

    @abstractmethod
    def host(self, image: Image, drawn: Any, row: int, out: Image | None, resize: ResizeInto) -> Image:
        """Do it to one image on the host.

        Args:
            image: (H, W, 3) uint8 RGB, contiguous; may be written.
            drawn: what `draw` returned.
            row: the image's place in it.
            out: where the image goes if this is the last to change its size.
            resize: how.

        Returns:
            The image, in `out` if there is one.
        """

    @abstractmethod
    def batch(self, images: Tensor, drawn: Any) -> Tensor:
        """Do it to a batch on its device, each image by its own row of `drawn`.

        Within 1 level of `host`, which an operation behind it may stretch.

        Nothing in it waits for the device.

        Args:
            images: (N, 3, H, W) uint8, channels_last; may be written.
            drawn: what `draw` returned for these N.

        Returns:
            (N, 3, h, w) uint8.
        """


class Reframe(Operation):
    """Cuts a box out of an image and resizes it; the box is known before the image is decoded.

    A box may reach beyond the image, and is black there; then it has the size that comes out.

    Attributes:
        target: height and width of what comes out, or of the smallest.
        resizes: whether a decoder may shrink the box, as long as it isn't smaller than `target`.
    """

    target: tuple[int, int]
    resizes: ClassVar[bool] = True

    @abstractmethod
    def boxes(self, keys: Keys, sizes: Sizes) -> NDArray[np.int64]:
        """(N, 4) top, left, height, width."""

    def draw(self, keys: Keys, sizes: Sizes) -> NDArray[np.int64]:
        """(N, 6): top, left, height, width, and the height and width it comes out with."""
        return np.concatenate([self.boxes(keys, sizes), self.out_sizes(sizes)], axis=1)

    def out_sizes(self, sizes: Sizes) -> Sizes:
        return np.tile(self.target, (len(sizes), 1))

    def host(self, image: Image, drawn: NDArray[np.int64], row: int, out: Image | None, resize: ResizeInto) -> Image:
        box = drawn[row].tolist()
        top, left, height, width = inside(drawn[row : row + 1, :4], np.array([image.shape[:2]]))[0].tolist()
        target = np.empty((*box[4:], 3), np.uint8) if out is None else out
        place(image[top : top + height, left : left + width], box, target, resize)
        return target

    def batch(self, images: Tensor, drawn: NDArray[np.int64]) -> Tensor:
        return reframed(images, drawn, np.zeros(len(drawn), np.bool_))


class Touch(Operation):
    """Changes an image's pixels and leaves its size."""

    @abstractmethod
    def one(self, image: Image, drawn: Any, row: int) -> None:
        """Change one image in place, on the host.

        Args:
            image: (H, W, 3) uint8 RGB, contiguous.
            drawn: what `draw` returned.
            row: the image's place in it.
        """

    def out_sizes(self, sizes: Sizes) -> Sizes:
        return sizes

    def host(self, image: Image, drawn: Any, row: int, out: Image | None, resize: ResizeInto) -> Image:
        del out, resize
        self.one(image, drawn, row)
        return image


operations: dict[str, type[Operation]] = {}
"""The native operations, by the names that recipes call them."""

__all__ = ["Image", "Keys", "Operation", "Reframe", "Sizes", "Touch", "operation", "operations", "to_device"]

Kind = TypeVar("Kind", bound=type[Operation])


def operation(kind: Kind) -> Kind:
    """Decorator: recipes may name this class."""
    operations[kind.__name__] = kind
    return kind


def chosen(keys: Keys, p: float) -> NDArray[np.bool_]:
    """(N,) bool, True with probability p. Takes the first random number of each key."""
    return uniforms(keys, 1)[:, 0] < p


def rows_by(choice: NDArray[np.int64]) -> Mapping[int, NDArray[np.int64]]:
    """(N,) what each row chose -> {choice: its rows}."""
    return {int(value): np.flatnonzero(choice == value) for value in np.unique(choice)}


def check_probability(name: str, value: object) -> float:
    """The same number.

    Raises:
        BadParameterError: it is none from 0 to 1.
    """
    if not _is_number(value) or not 0 <= value <= 1:  # type: ignore[operator]
        raise BadParameterError(f"{name}: {value} is not allowed; set a probability from 0 to 1")
    return float(value)  # type: ignore[arg-type]


def check_range(name: str, value: object, low: float, high: float, *, above: bool = False) -> tuple[float, float]:
    """[smallest, largest], both from `low` to `high`, or `above` it.

    Raises:
        BadParameterError: it isn't.
    """
    pair = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else []
    fits = len(pair) == 2 and all(map(_is_number, pair)) and low <= pair[0] <= pair[1] <= high
    if not fits or (above and pair[0] == low):
        bounds = f"{'above' if above else 'at least'} {low:g}" + (f" and at most {high:g}" if high < math.inf else "")
        raise BadParameterError(f"{name}: {value} is not allowed; set [smallest, largest], {bounds}")
    return float(pair[0]), float(pair[1])


def check_number(name: str, value: object, low: float, high: float) -> float:
    """The same number.

    Raises:
        BadParameterError: it is none from `low` to `high`.
    """
    if not _is_number(value) or not low <= value <= high:  # type: ignore[operator]
        bound = f"from {low:g} to {high:g}" if high < math.inf else f"of at least {low:g}"
        raise BadParameterError(f"{name}: {value} is not allowed; set a number {bound}")
    return float(value)  # type: ignore[arg-type]


def _is_number(value: object) -> bool:
    # No isfinite: it can't take a whole number beyond a float.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max

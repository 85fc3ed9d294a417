"""What a native recipe is made of: operations that draw for many samples at once, before any is decoded."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from effloop.data.keyed import uniforms

Keys = NDArray[np.uint64]
Sizes = NDArray[np.int64]
Image = NDArray[np.uint8]


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


class Reframe(Operation):
    """Cuts a box out of an image and resizes it; the box is known before the image is decoded."""

    @abstractmethod
    def draw(self, keys: Keys, sizes: Sizes) -> NDArray[np.int64]:
        """(N, 4) top, left, height, width of the boxes."""

    @abstractmethod
    def out_sizes(self, sizes: Sizes) -> Sizes:
        """(N, 2) sizes that come in -> (N, 2) that go out.

        Raises:
            BadParameterError: an image is too small.
        """


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

    @abstractmethod
    def batch(self, images: Tensor, drawn: Any) -> Tensor:
        """Change a batch on its device, each image by its own row of `drawn`; within 1 level of `one`.

        Nothing in it waits for the device.

        Args:
            images: (N, 3, H, W) uint8, channels_last; may be written.
            drawn: what `draw` returned for these N.

        Returns:
            (N, 3, H, W) uint8.
        """


operations: dict[str, type[Operation]] = {}
"""The native operations, by the names that recipes call them."""

Kind = TypeVar("Kind", bound=type[Operation])


def operation(kind: Kind) -> Kind:
    """Decorator: recipes may name this class."""
    operations[kind.__name__] = kind
    return kind


def chosen(keys: Keys, p: float) -> NDArray[np.bool_]:
    """(N,) bool, True with probability p. Takes the first random number of each key."""
    return uniforms(keys, 1)[:, 0] < p


def to_device(array: NDArray[Any], images: Tensor) -> Tensor:
    """What was drawn, where the images are; the host doesn't wait for the copy."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.pin_memory().to(images.device, non_blocking=True) if images.is_cuda else tensor


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


def check_range(name: str, value: object, low: float, high: float) -> tuple[float, float]:
    """[smallest, largest], both from `low` to `high`.

    Raises:
        BadParameterError: it isn't.
    """
    pair = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else []
    if len(pair) != 2 or not all(map(_is_number, pair)) or not low <= pair[0] <= pair[1] <= high:
        bound = f"from {low:g} to {high:g}" if high < math.inf else f"of at least {low:g}"
        raise BadParameterError(f"{name}: {value} is not allowed; set [smallest, largest], {bound}")
    return float(pair[0]), float(pair[1])


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)

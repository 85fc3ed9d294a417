"""Native operations on colours: torchvision's names, parameters, laws and pixels."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from effloop.data.augment.native import host, kernels
from effloop.data.augment.operation import (
    MOST_FACTOR,
    BadParameterError,
    Image,
    Keys,
    PixelOperation,
    Sizes,
    bernoulli,
    check_number,
    check_probability,
    check_range,
    operation,
    to_device,
)
from effloop.data.random import uniforms

Range = float | list[float]

_HOST = (host.brightness, host.contrast, host.saturation, host.hue)
_BATCH: tuple[Callable[..., Tensor], ...] = (kernels.brightness, kernels.contrast, kernels.saturation, kernels.hue)
_NONE = len(_HOST)


@dataclass(frozen=True)
class JitterDraws:
    """What `ColorJitter` drew for N images.

    Attributes:
        turns: (N, k) int64, which of brightness, contrast, saturation, hue (0 to 3) comes first, second, ...; 4 where
            nothing is done.
        amounts: (N, 4) float32, the factor of each, and the shift of hue.
    """

    turns: NDArray[np.int64]
    amounts: NDArray[np.float32]


@operation
class ColorJitter(PixelOperation):
    """Brightness, contrast, saturation and hue changed at random, in a random order.

    Args:
        brightness: the factor is drawn evenly from [max(0, 1 - brightness), 1 + brightness], or from the
            [smallest, largest] that is given, at most 10,000. 0 leaves it as it is.
        contrast: likewise.
        saturation: likewise.
        hue: hues are turned by [-hue, hue] of the circle, at most 0.5, or by the [smallest, largest] that is given.
        p: how probable it is that any of this is done.
    """

    def __init__(
        self, brightness: Range = 0, contrast: Range = 0, saturation: Range = 0, hue: Range = 0, p: float = 1
    ) -> None:
        factors = {"brightness": brightness, "contrast": contrast, "saturation": saturation}
        ranges = [_range(name, value, 1, 0, MOST_FACTOR) for name, value in factors.items()]
        self.ranges = np.array([*ranges, _range("hue", hue, 0, -0.5, 0.5)])
        self.given = np.flatnonzero((self.ranges != [[1], [1], [1], [0]]).any(1))
        self.p = check_probability("p", p)

    def draw(self, keys: Keys, sizes: Sizes) -> JitterDraws:
        del sizes
        numbers = uniforms(keys, 9)
        turns = self.given[numbers[:, 1 + self.given].argsort(axis=1)]
        turns[numbers[:, 0] >= self.p] = _NONE
        low, high = self.ranges.T
        return JitterDraws(turns, (low + (high - low) * numbers[:, 5:]).astype(np.float32))

    def apply_inplace(self, image: Image, drawn: JitterDraws, row: int) -> None:
        for turn in drawn.turns[row].tolist():
            if turn != _NONE:
                _HOST[turn](image, drawn.amounts[row, turn])

    def apply_batch(self, images: Tensor, drawn: JitterDraws) -> Tensor:
        # At each turn, the images that take the same operation are taken together.
        rows = drawn.turns.argsort(axis=0, kind="stable")
        turns = np.take_along_axis(drawn.turns, rows, axis=0)
        amounts = drawn.amounts[rows, np.minimum(turns, _NONE - 1)]
        sent, sent_amounts = to_device(rows.T, images), to_device(amounts.T, images)
        for turn in range(turns.shape[1]):
            bounds = np.searchsorted(turns[:, turn], np.arange(_NONE + 1)).tolist()
            for kernel, start, end in zip(_BATCH, bounds[:-1], bounds[1:], strict=True):
                if start < end:
                    images = kernels.on_rows(images, sent[turn, start:end], kernel, sent_amounts[turn, start:end])
        return images


def _range(name: str, value: object, center: float, low: float, high: float) -> tuple[float, float]:
    """[smallest, largest] of what is drawn, from a number or from the two themselves.

    Raises:
        BadParameterError: it is neither, or not from `low` to `high`.
    """
    try:
        if isinstance(value, int | float):
            spread = check_number(name, value, 0, high)
            return max(low, center - spread), center + spread
        return check_range(name, value, low, high)
    except BadParameterError:
        raise BadParameterError(
            f"{name}: {value} is not allowed; set a number from 0 to {high:g}, "
            f"or [smallest, largest] from {low:g} to {high:g}"
        ) from None


class Sometimes(PixelOperation):
    """One and the same change to every image that is changed.

    Args:
        p: how probable that is.
    """

    def __init__(self, p: float = 0.5) -> None:
        self.p = check_probability("p", p)

    @abstractmethod
    def change(self, image: Image) -> None:
        """Change an image on the host, in place."""

    @abstractmethod
    def changed(self, images: Tensor) -> Tensor:
        """(M, 3, H, W) uint8 -> the same, changed, on its device."""

    def draw(self, keys: Keys, sizes: Sizes) -> NDArray[np.bool_]:
        del sizes
        return bernoulli(keys, self.p)

    def apply_inplace(self, image: Image, drawn: NDArray[np.bool_], row: int) -> None:
        if drawn[row]:
            self.change(image)

    def apply_batch(self, images: Tensor, drawn: NDArray[np.bool_]) -> Tensor:
        return (
            kernels.on_rows(images, to_device(np.flatnonzero(drawn), images), self.changed) if drawn.any() else images
        )


@operation
class RandomGrayscale(Sometimes):
    """Grey.

    Args:
        p: how probable that is.
    """

    def __init__(self, p: float = 0.1) -> None:
        super().__init__(p)

    def change(self, image: Image) -> None:
        host.grayscale(image)

    def changed(self, images: Tensor) -> Tensor:
        return kernels.grayscale(images)


@operation
class RandomSolarize(Sometimes):
    """Values from a threshold on inverted.

    Args:
        threshold: 0 to 255.
        p: how probable that is.
    """

    def __init__(self, threshold: float, p: float = 0.5) -> None:
        super().__init__(p)
        self.threshold = check_number("threshold", threshold, 0, 255)

    def change(self, image: Image) -> None:
        host.solarize(image, self.threshold)

    def changed(self, images: Tensor) -> Tensor:
        return kernels.solarize(images, _filled(images, self.threshold))


@operation
class RandomPosterize(Sometimes):
    """Only the highest bits of each value kept.

    Args:
        bits: how many, 0 to 8.
        p: how probable that is.
    """

    def __init__(self, bits: int, p: float = 0.5) -> None:
        super().__init__(p)
        if int(check_number("bits", bits, 0, 8)) != bits:
            raise BadParameterError(f"bits: {bits} is not allowed; set a whole number from 0 to 8")
        self.bits = int(bits)

    def change(self, image: Image) -> None:
        host.posterize(image, self.bits)

    def changed(self, images: Tensor) -> Tensor:
        return kernels.posterize(images, _filled(images, self.bits))


@operation
class RandomAutocontrast(Sometimes):
    """Each channel stretched to 0..255.

    Args:
        p: how probable that is.
    """

    def change(self, image: Image) -> None:
        host.autocontrast(image)

    def changed(self, images: Tensor) -> Tensor:
        return kernels.autocontrast(images)


@operation
class RandomEqualize(Sometimes):
    """Each channel's histogram flattened.

    Args:
        p: how probable that is.
    """

    def change(self, image: Image) -> None:
        host.equalize(image)

    def changed(self, images: Tensor) -> Tensor:
        return kernels.equalize(images)


@operation
class RandomAdjustSharpness(Sometimes):
    """Sharper or smoother.

    Args:
        sharpness_factor: 0, which is smooth, to 10,000; 1 leaves the image as it is.
        p: how probable that is.
    """

    def __init__(self, sharpness_factor: float, p: float = 0.5) -> None:
        super().__init__(p)
        self.factor = check_number("sharpness_factor", sharpness_factor, 0, MOST_FACTOR)

    def change(self, image: Image) -> None:
        host.sharpness(image, self.factor)

    def changed(self, images: Tensor) -> Tensor:
        return kernels.sharpness(images, _filled(images, self.factor))


@operation
class RandomInvert(Sometimes):
    """Each value inverted.

    Args:
        p: how probable that is.
    """

    def change(self, image: Image) -> None:
        host.invert(image)

    def changed(self, images: Tensor) -> Tensor:
        return kernels.invert(images)


def _filled(images: Tensor, value: float) -> Tensor:
    """(M,) the same value for each image: int64 from an int, float32 from a float."""
    return torch.full((len(images),), value, device=images.device)

"""Native colour operations: torchvision's names, parameters, distributions and pixels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

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
    check_whole,
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

    takes_masks = True

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


class _RandomlyApplied(PixelOperation):
    """The same change to each image, with probability `p`."""

    takes_masks = True

    _change: ClassVar[Callable[..., None]]
    """(image, *self._values) on the host, in place."""

    _kernel: ClassVar[Callable[..., Tensor]]
    """(images, (M,) each of self._values) -> images, on a device."""

    _values: tuple[Any, ...] = ()

    def __init__(self, p: float = 0.5) -> None:
        self.p = check_probability("p", p)

    def draw(self, keys: Keys, sizes: Sizes) -> NDArray[np.bool_]:
        del sizes
        return bernoulli(keys, self.p)

    def apply_inplace(self, image: Image, drawn: NDArray[np.bool_], row: int) -> None:
        if drawn[row]:
            type(self)._change(image, *self._values)

    def apply_batch(self, images: Tensor, drawn: NDArray[np.bool_]) -> Tensor:
        if not drawn.any():
            return images
        rows = np.flatnonzero(drawn)
        values = [torch.full((len(rows),), value, device=images.device) for value in self._values]  # int64 or float32
        return kernels.on_rows(images, to_device(rows, images), type(self)._kernel, *values)


@operation
class RandomGrayscale(_RandomlyApplied):
    """Grey; `p` is the probability."""

    _change, _kernel = staticmethod(host.grayscale), staticmethod(kernels.grayscale)

    def __init__(self, p: float = 0.1) -> None:
        super().__init__(p)


@operation
class RandomSolarize(_RandomlyApplied):
    """Values from a threshold on inverted.

    Args:
        threshold: 0 to 255.
        p: probability.
    """

    _change, _kernel = staticmethod(host.solarize), staticmethod(kernels.solarize)

    def __init__(self, threshold: float, p: float = 0.5) -> None:
        super().__init__(p)
        self._values = (check_number("threshold", threshold, 0, 255),)


@operation
class RandomPosterize(_RandomlyApplied):
    """Only the highest bits of each value kept.

    Args:
        bits: how many, 0 to 8.
        p: probability.
    """

    _change, _kernel = staticmethod(host.posterize), staticmethod(kernels.posterize)

    def __init__(self, bits: int, p: float = 0.5) -> None:
        super().__init__(p)
        number = check_number("bits", bits, 0, 8)
        self._values = (check_whole("bits", int(number) if number.is_integer() else bits, 0, 8),)


@operation
class RandomAutocontrast(_RandomlyApplied):
    """Each channel stretched to 0..255; `p` is the probability."""

    _change, _kernel = staticmethod(host.autocontrast), staticmethod(kernels.autocontrast)


@operation
class RandomEqualize(_RandomlyApplied):
    """Each channel's histogram equalised; `p` is the probability."""

    _change, _kernel = staticmethod(host.equalize), staticmethod(kernels.equalize)


@operation
class RandomAdjustSharpness(_RandomlyApplied):
    """Sharper or smoother.

    Args:
        sharpness_factor: 0, which is smooth, to 10,000; 1 leaves the image as it is.
        p: probability.
    """

    _change, _kernel = staticmethod(host.sharpness), staticmethod(kernels.sharpness)

    def __init__(self, sharpness_factor: float, p: float = 0.5) -> None:
        super().__init__(p)
        self._values = (check_number("sharpness_factor", sharpness_factor, 0, MOST_FACTOR),)


@operation
class RandomInvert(_RandomlyApplied):
    """Each value inverted; `p` is the probability."""

    _change, _kernel = staticmethod(host.invert), staticmethod(kernels.invert)

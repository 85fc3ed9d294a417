"""Native operations on colours, blur and erasing: torchvision's names, parameters, distributions and pixels."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from effloop.data.augment import operation as ops
from effloop.data.augment.native import host, kernels
from effloop.data.augment.native.policy import NAMES, Policy, PolicyDraws, draws
from effloop.data.image.pixels import opencv
from effloop.data.random import stream, uniforms, words, words_on_device
from effloop.lazy import Tensor, torch

Range = float | list[float]

_COLOURS = np.array([NAMES.index(name) for name in ("Brightness", "Contrast", "Color", "Hue")])


@ops.operation
class ColorJitter(Policy):
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
        ranges = [_range(name, value, 1, 0, ops.MOST_FACTOR) for name, value in factors.items()]
        self.ranges = np.array([*ranges, _range("hue", hue, 0, -0.5, 0.5)])
        self.given = np.flatnonzero((self.ranges != [[1], [1], [1], [0]]).any(1))
        self.p = ops.check_number("p", p, 0, 1)

    def draw(self, keys: ops.Keys, sizes: ops.Sizes) -> PolicyDraws:
        numbers = uniforms(keys, 9)
        turns = self.given[numbers[:, 1 + self.given].argsort(axis=1)]
        low, high = self.ranges.T
        amounts = (low + (high - low) * numbers[:, 5:]).astype(np.float32)
        choice = np.where(numbers[:, :1] < self.p, _COLOURS[turns], 0)
        return draws(choice, np.take_along_axis(amounts, turns, axis=1).astype(np.float64), sizes)


def _range(name: str, value: object, center: float, low: float, high: float) -> tuple[float, float]:
    """[smallest, largest] of what is drawn, from a number or from the two themselves, from `low` to `high`."""
    try:
        if isinstance(value, int | float):
            spread = ops.check_number(name, value, 0, high)
            return max(low, center - spread), center + spread
        return ops.check_range(name, value, low, high)
    except ops.BadParameterError:
        allowed = f"a number from 0 to {high:g}, or [smallest, largest] from {low:g} to {high:g}"
        raise ops.bad(name, value, allowed) from None


class _RandomlyApplied(Policy):
    """The same operation on each image, with probability `p`."""

    _name: ClassVar[str]  # in `policy`

    _level: float = 0.0

    def __init__(self, p: float = 0.5) -> None:
        self.p = ops.check_number("p", p, 0, 1)

    def draw(self, keys: ops.Keys, sizes: ops.Sizes) -> PolicyDraws:
        choice = np.where(ops.bernoulli(keys, self.p), NAMES.index(self._name), 0)[:, None]
        return draws(choice, np.full(choice.shape, self._level), sizes)


@ops.operation
class RandomGrayscale(_RandomlyApplied):
    """Grey; `p` is the probability."""

    _name = "Grayscale"

    def __init__(self, p: float = 0.1) -> None:
        super().__init__(p)


@ops.operation
class RandomSolarize(_RandomlyApplied):
    """Values from a threshold on inverted.

    Args:
        threshold: 0 to 255.
        p: probability.
    """

    _name = "Solarize"

    def __init__(self, threshold: float, p: float = 0.5) -> None:
        super().__init__(p)
        self._level = ops.check_number("threshold", threshold, 0, 255)


@ops.operation
class RandomPosterize(_RandomlyApplied):
    """Only the highest bits of each value kept.

    Args:
        bits: how many, 0 to 8.
        p: probability.
    """

    _name = "Posterize"

    def __init__(self, bits: int, p: float = 0.5) -> None:
        super().__init__(p)
        number = ops.check_number("bits", bits, 0, 8)
        self._level = ops.check_whole("bits", int(number) if number.is_integer() else bits, 0, 8)


@ops.operation
class RandomAutocontrast(_RandomlyApplied):
    """Each channel stretched to 0..255; `p` is the probability."""

    _name = "AutoContrast"


@ops.operation
class RandomEqualize(_RandomlyApplied):
    """Each channel's histogram equalised; `p` is the probability."""

    _name = "Equalize"


@ops.operation
class RandomAdjustSharpness(_RandomlyApplied):
    """Sharper or smoother.

    Args:
        sharpness_factor: 0, which is smooth, to 10,000; 1 leaves the image as it is.
        p: probability.
    """

    _name = "Sharpness"

    def __init__(self, sharpness_factor: float, p: float = 0.5) -> None:
        super().__init__(p)
        self._level = ops.check_number("sharpness_factor", sharpness_factor, 0, ops.MOST_FACTOR)


@ops.operation
class RandomInvert(_RandomlyApplied):
    """Each value inverted; `p` is the probability."""

    _name = "Invert"


_SIGMAS = (1e-3, 1e4)  # in pixels; 0.001 changes nothing, and below 1e-45, 0 in float32, images would be black


class BlurDraws(NamedTuple):
    """(N,) float32 sigmas in pixels; (N, k) and (N, l) float32, the horizontal and vertical weights, which sum to 1."""

    sigma: NDArray[np.float32]
    across: NDArray[np.float32]
    down: NDArray[np.float32]


@ops.operation
class GaussianBlur(ops.PixelOperation):
    """Gaussian blur, with reflected borders.

    Within 1 level of torchvision's, which takes one pass of k * l weights; this takes two, of k and of l.

    Args:
        kernel_size: odd number of weights, or [horizontal, vertical].
        sigma: in pixels, 0.001 to 10,000, or [smallest, largest] of a uniform distribution.
        p: probability.
    """

    takes_masks = True

    def __init__(
        self, kernel_size: int | Sequence[int], sigma: float | Sequence[float] = (0.1, 2.0), p: float = 1
    ) -> None:
        self.across, self.down = _kernel_size(kernel_size)
        pair = [sigma, sigma] if isinstance(sigma, int | float) else sigma
        self.sigma, self.p = ops.check_range("sigma", pair, *_SIGMAS), ops.check_number("p", p, 0, 1)

    def out_sizes(self, sizes: ops.Sizes) -> ops.Sizes:
        height, width = sizes.min(axis=0).tolist()
        if self.across // 2 >= width or self.down // 2 >= height:
            fits = f"at most {2 * min(height, width) - 1} where images are {height}x{width}"
            raise ops.bad("kernel_size", [self.across, self.down], fits)
        return sizes

    def draw(self, keys: ops.Keys, sizes: ops.Sizes) -> BlurDraws:
        low, high = self.sigma
        place, done = uniforms(keys, 2).T
        sigma = np.where(done < self.p, low + (high - low) * place, _SIGMAS[0]).astype(np.float32)
        return BlurDraws(sigma, _weights(self.across, sigma), _weights(self.down, sigma))

    def apply_inplace(self, image: ops.Image, drawn: BlurDraws, row: int) -> None:
        if drawn.sigma[row] > _SIGMAS[0]:
            host.convolve(image, drawn.across[row], drawn.down[row], opencv().BORDER_REFLECT_101)

    def apply_batch(self, images: Tensor, drawn: BlurDraws) -> Tensor:
        return kernels.convolve(
            images, ops.to_device(drawn.across, images), ops.to_device(drawn.down, images), "reflect"
        )


def _kernel_size(value: object) -> list[int]:
    """[horizontal, vertical], from an odd number or two."""
    sizes = ops.as_list(value) or [value, value]
    odd = all(isinstance(size, int | float) and size % 2 == 1 and 1 <= size <= ops.MOST_SIDE for size in sizes)
    if len(sizes) != 2 or not odd:
        raise ops.bad("kernel_size", value, f"an odd number from 1 to {ops.MOST_SIDE - 1}, or two: [across, down]")
    return [int(size) for size in sizes]


def _weights(size: int, sigma: NDArray[np.float32]) -> NDArray[np.float32]:
    """(N,) sigmas -> (N, size) weights, computed as in torchvision."""
    end = (size - 1) / (2 * math.sqrt(2))
    places = torch.linspace(-end, end, size)
    exponents = places.div(torch.from_numpy(sigma)[:, None]).pow(2).neg()
    return exponents.softmax(1).numpy()


_ATTEMPTS = 10  # torchvision's
_NUMBERS = 3 + 2 * _ATTEMPTS  # one for p, two for the position; noise begins after them
_WORD = 8  # bytes


class ErasingDraws(NamedTuple):
    """(N, B, 4) int64 top, left, height, width, zeros where nothing is erased; and (N,) keys, for noise."""

    boxes: NDArray[np.int64]
    keys: ops.Keys


@ops.operation
class RandomErasing(ops.PixelOperation):
    """Replaces a box of the image, or several (Zhong et al. 2017, "Random Erasing Data Augmentation").

    Args:
        p: probability.
        scale: smallest and largest area of the box, as a share of the image.
        ratio: smallest and largest height over width of the box, log-uniform.
        value: of the box: a whole number from 0 to 255, three of them for red, green and blue, or noise: "random",
            uniform in 0 to 255, as in the paper, or "normal", that of torchvision's value="random" and timm's
            mode="pixel", which erase what is normalised already. Here it becomes N(0, 1) once normalised, but rounded
            to levels and clipped to 0..255, with ImageNet's mean and deviation at -2.1 to 2.2 or more deviations.
        count: the largest number of boxes, drawn evenly from 1 on; their areas are divided by it. timm's `max_count`.
        mean: of normal noise, for each channel, in units of 0-1; a recipe writes `${data.mean}`.
        std: its deviation, likewise; `${data.std}`.
    """

    takes_masks = True

    def __init__(
        self,
        p: float = 0.5,
        scale: Sequence[float] = (0.02, 0.33),
        ratio: Sequence[float] = (0.3, 3.3),
        value: int | Sequence[int] | str = 0,
        count: int = 1,
        mean: Sequence[float] = (0.485, 0.456, 0.406),
        std: Sequence[float] = (0.229, 0.224, 0.225),
    ) -> None:
        self.p = ops.check_number("p", p, 0, 1)
        self.scale = ops.check_range("scale", scale, 0, 1)
        self.ratio = ops.check_range("ratio", ratio, *ops.RATIOS)
        self.count = ops.check_whole("count", count, 1, 100)
        noise = value in ("random", "normal")
        self.value = None if noise else np.array(ops.check_levels("value", value, other=", random or normal"), np.uint8)
        self.table = _normal_levels(mean=mean, std=std) if value == "normal" else None

    def draw(self, keys: ops.Keys, sizes: ops.Sizes) -> ErasingDraws:
        numbers = uniforms(keys, _NUMBERS)
        parts = np.ones((len(keys), 1), np.int64)
        if self.count > 1:
            parts += (uniforms(stream(keys, 0), 1) * self.count).astype(np.int64)
        scale = [share / parts for share in self.scale]
        each = [numbers[:, 1:], *(uniforms(stream(keys, box), _NUMBERS - 1) for box in range(1, self.count))]
        boxes = np.stack([erasing_boxes(some, sizes, scale, self.ratio) for some in each], axis=1)
        boxes[(numbers[:, :1] >= self.p) | (np.arange(self.count) >= parts)] = 0
        return ErasingDraws(boxes, keys)

    def apply_inplace(self, image: ops.Image, drawn: ErasingDraws, row: int) -> None:
        for top, left, height, width in drawn.boxes[row].tolist():
            # whole rows are written at once: pixel by pixel it takes 50 µs at 224x224
            box = image.reshape(len(image), -1)[top : top + height, 3 * left : 3 * (left + width)]
            if self.value is not None:
                box[:] = np.tile(self.value, width)
            elif height:
                kind = np.dtype("u1" if self.table is None else "<u2")
                noise = _noise(drawn.keys[row : row + 1], image.shape[1], top, height, kind)
                noise = noise[:, 3 * left : 3 * (left + width)]
                box[:] = noise if self.table is None else self.table[noise + np.tile(_CHANNELS, width)]

    def apply_batch(self, images: Tensor, drawn: ErasingDraws) -> Tensor:
        rows = np.flatnonzero(drawn.boxes.any(axis=(1, 2)))
        if not len(rows):
            return images
        sent = (ops.to_device(each[rows], images) for each in (drawn.boxes, drawn.keys.view(np.int64)))
        return kernels.on_rows(images, ops.to_device(rows, images), self._erased, *sent)

    def _erased(self, images: Tensor, boxes: Tensor, keys: Tensor) -> Tensor:
        top, left, height, width = boxes[..., None].unbind(2)
        y, x = (torch.arange(length, device=images.device) for length in images.shape[2:])
        rows, columns = (y >= top) & (y < top + height), (x >= left) & (x < left + width)
        inside = (rows[..., None] & columns[:, :, None]).any(1, keepdim=True)
        if self.value is not None:
            return torch.where(inside, ops.to_device(self.value, images).view(1, 3, 1, 1), images)
        noise = _noise_on_device(keys, images, torch.uint8 if self.table is None else torch.int16)
        if self.table is not None:
            index = (noise.int() & 0xFFFF) + ops.to_device(_CHANNELS, images).view(1, 3, 1, 1)
            noise = ops.to_device(self.table, images)[index]
        return torch.where(inside, noise, images)


_CHANNELS = np.arange(3, dtype=np.int32) << 16  # where each channel's levels begin in a table of normal noise


def _normal_levels(**of_channels: Sequence[float]) -> NDArray[np.uint8]:
    """(3 * 65,536,): for each channel the levels that uniform 16-bit numbers become, by the quantiles of N(mean, std).

    A table gives the same levels on any device, where logarithms and cosines don't.
    """
    for name, value in of_channels.items():
        if len(ops.as_list(value)) not in (1, 3) or not all(ops.check_number(name, each, 0, 1) >= 0 for each in value):
            raise ops.bad(name, value, "a list of a number from 0 to 1 for each channel")
    mean, std = (np.resize(value, (3, 1)) for value in of_channels.values())
    quantiles = torch.special.ndtri((torch.arange(1 << 16, dtype=torch.float64) + 0.5) / (1 << 16)).numpy()
    levels: NDArray[np.float64] = 255 * (mean + std * quantiles)
    return np.rint(levels).clip(0, 255).astype(np.uint8).ravel()


def erasing_boxes(
    numbers: NDArray[np.float64], sizes: ops.Sizes, scale: Sequence[NDArray[np.float64]], ratio: tuple[float, float]
) -> NDArray[np.int64]:
    """Boxes with the distribution of torchvision's RandomErasing, for many images at once.

    Args:
        numbers: (N, 22) in [0, 1): ten areas, ten ratios, top, left.
        sizes: (N, 2) height and width of the images.
        scale: (N, 1) each, smallest and largest share of the area.
        ratio: smallest and largest height over width.

    Returns:
        (N, 4) top, left, height, width of the first of ten attempts that is smaller than the image; zeros if none is.
    """
    area = sizes.prod(axis=1)[:, None] * (scale[0] + (scale[1] - scale[0]) * numbers[:, :_ATTEMPTS])
    low, high = np.log(ratio)
    aspect = np.exp(low + (high - low) * numbers[:, _ATTEMPTS : 2 * _ATTEMPTS])
    sides = np.rint(np.sqrt(np.stack([area * aspect, area / aspect], axis=2))).astype(np.int64)
    fits = (sides < sizes[:, None]).all(axis=2)
    rows, first = np.arange(len(sizes)), fits.argmax(axis=1)
    found = sides[rows, first]
    corners = (numbers[:, -2:] * (sizes - found + 1)).astype(np.int64)
    return np.where(fits[rows, first][:, None], np.concatenate([corners, found], axis=1), 0)


def _noise(keys: ops.Keys, width: int, top: int, height: int, kind: np.dtype[Any]) -> NDArray[Any]:
    """(1,) key -> (height, 3 * width) uniform whole numbers, these rows of the image's noise."""
    first, end, each = top * width * 3, (top + height) * width * 3, _WORD // kind.itemsize
    start = first // each
    numbers: NDArray[Any] = words(keys, _NUMBERS + start, -(-end // each) - start).astype("<u8").view(kind)[0]
    return numbers[first - start * each : end - start * each].reshape(height, 3 * width)


def _noise_on_device(keys: Tensor, images: Tensor, kind: torch.dtype) -> Tensor:
    """(N,) keys -> (N, 3, H, W) uniform whole numbers, channels_last."""
    count, _, height, width = images.shape
    length = height * width * 3
    found = words_on_device(keys, _NUMBERS, -(-length * kind.itemsize // _WORD))
    assert sys.byteorder == "little"
    return found.view(kind)[:, :length].view(count, height, width, 3).permute(0, 3, 1, 2)

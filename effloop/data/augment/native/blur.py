"""Native Gaussian blur, each image with its own sigma."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from effloop.data.augment.native.kernels import on_all
from effloop.data.augment.operation import (
    MOST_SIDE,
    BadParameterError,
    Image,
    Keys,
    PixelOperation,
    Sizes,
    check_number,
    check_range,
    operation,
    to_device,
)
from effloop.data.image.resize import opencv
from effloop.data.random import uniforms

_SIGMAS = (1e-3, 1e4)  # in pixels; 0.001 changes nothing, and below 1e-45, 0 in float32, images would be black


@dataclass(frozen=True)
class BlurDraws:
    """What `GaussianBlur` drew for N images.

    Attributes:
        sigma: (N,) float32, in pixels.
        across: (N, k) float32, the horizontal weights; they add up to 1.
        down: (N, l) float32, the vertical weights.
    """

    sigma: NDArray[np.float32]
    across: NDArray[np.float32]
    down: NDArray[np.float32]


@operation
class GaussianBlur(PixelOperation):
    """Gaussian blur, with reflected borders.

    Within 1 level of torchvision's, which takes one pass of k * l weights; this takes two, of k and of l.

    Args:
        kernel_size: odd number of weights, or [horizontal, vertical].
        sigma: in pixels, 0.001 to 10,000, or [smallest, largest] of a uniform distribution.
    """

    takes_masks = True

    def __init__(self, kernel_size: int | Sequence[int], sigma: float | Sequence[float] = (0.1, 2.0)) -> None:
        self.across, self.down = _kernel_size(kernel_size)
        pair = [sigma, sigma] if isinstance(sigma, int | float) else sigma
        self.sigma = check_range("sigma", pair, *_SIGMAS)

    def out_sizes(self, sizes: Sizes) -> Sizes:
        height, width = sizes.min(axis=0).tolist()
        if self.across // 2 >= width or self.down // 2 >= height:
            raise BadParameterError(
                f"kernel_size: {[self.across, self.down]} is not allowed where images are {height}x{width}; "
                f"set at most {2 * min(height, width) - 1}"
            )
        return sizes

    def draw(self, keys: Keys, sizes: Sizes) -> BlurDraws:
        del sizes
        low, high = self.sigma
        sigma = (low + (high - low) * uniforms(keys, 1)[:, 0]).astype(np.float32)
        return BlurDraws(sigma, _weights(self.across, sigma), _weights(self.down, sigma))

    def apply_inplace(self, image: Image, drawn: BlurDraws, row: int) -> None:
        cv2 = opencv()
        if cv2 is None:
            pixels = torch.from_numpy(image.transpose(2, 0, 1)[None])
            pixels.copy_(_blurred(pixels, *(torch.from_numpy(w[row : row + 1]) for w in (drawn.across, drawn.down))))
            return
        # By float32: from uint8 to uint8 OpenCV rounds the weights to 8 bits.
        values = cv2.sepFilter2D(
            image, cv2.CV_32F, drawn.across[row], drawn.down[row], borderType=cv2.BORDER_REFLECT_101
        )
        cv2.convertScaleAbs(values, image)  # rounds

    def apply_batch(self, images: Tensor, drawn: BlurDraws) -> Tensor:
        return on_all(images, _blurred, to_device(drawn.across, images), to_device(drawn.down, images))


def _kernel_size(value: object) -> list[int]:
    """[horizontal, vertical].

    Raises:
        BadParameterError: it is neither an odd number nor two.
    """
    pair = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value, value]
    try:
        sizes = [int(check_number("kernel_size", size, 1, MOST_SIDE)) for size in pair]
    except BadParameterError:
        sizes = []
    if len(sizes) != 2 or sizes != pair or not all(size % 2 for size in sizes):
        raise BadParameterError(
            f"kernel_size: {value} is not allowed; set an odd number from 1 to {MOST_SIDE - 1}, or two: [across, down]"
        )
    return sizes


def _weights(size: int, sigma: NDArray[np.float32]) -> NDArray[np.float32]:
    """(N,) sigmas -> (N, size) weights, computed as in torchvision."""
    end = (size - 1) / (2 * math.sqrt(2))
    places = torch.linspace(-end, end, size)
    exponents = places.div(torch.from_numpy(sigma)[:, None]).pow(2).neg()
    return exponents.softmax(1).numpy()


def _blurred(images: Tensor, across: Tensor, down: Tensor) -> Tensor:
    """(N, 3, H, W) uint8, (N, k), (N, l) float32 -> (N, 3, H, W) uint8."""
    values = _weighted(images.to(torch.float32), across, 3)
    return _weighted(values, down, 2).round_().to(torch.uint8)


def _weighted(values: Tensor, weights: Tensor, dim: int) -> Tensor:
    """(N, 3, H, W) -> the same, convolved along a dimension."""
    length, reach = values.shape[dim], weights.shape[1] // 2
    padding = (reach, reach, 0, 0) if dim == 3 else (0, 0, reach, reach)
    padded = F.pad(values, padding, mode="reflect").contiguous(memory_format=torch.channels_last)
    total = torch.zeros_like(values)
    for place in range(weights.shape[1]):
        # Not conv2d, which uses TensorFloat-32 on a GPU unless that is turned off for the whole process.
        total.addcmul_(padded.narrow(dim, place, length), weights[:, place].view(-1, 1, 1, 1))
    return total

"""The operations of `kernels`, for one image on the host, in place.

An image is (H, W, 3) uint8 RGB, contiguous; it is written. The pixels are those of `kernels`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from effloop.data.augment import kernels

Image = NDArray[np.uint8]


def brightness(image: Image, factor: float) -> None:
    """As `kernels.brightness`."""
    _by_kernel(image, kernels.brightness, np.float32(factor))


def contrast(image: Image, factor: float) -> None:
    """As `kernels.contrast`."""
    _by_kernel(image, kernels.contrast, np.float32(factor))


def saturation(image: Image, factor: float) -> None:
    """As `kernels.saturation`."""
    _by_kernel(image, kernels.saturation, np.float32(factor))


def sharpness(image: Image, factor: float) -> None:
    """As `kernels.sharpness`."""
    _by_kernel(image, kernels.sharpness, np.float32(factor))


def hue(image: Image, shift: float) -> None:
    """As `kernels.hue`."""
    _by_kernel(image, kernels.hue, np.float32(shift))


def posterize(image: Image, bits: int) -> None:
    """As `kernels.posterize`."""
    _by_kernel(image, kernels.posterize, np.int64(bits))


def solarize(image: Image, threshold: float) -> None:
    """As `kernels.solarize`."""
    _by_kernel(image, kernels.solarize, np.float32(threshold))


def autocontrast(image: Image) -> None:
    """As `kernels.autocontrast`."""
    _by_kernel(image, kernels.autocontrast)


def equalize(image: Image) -> None:
    """As `kernels.equalize`."""
    _by_kernel(image, kernels.equalize)


def grayscale(image: Image) -> None:
    """As `kernels.grayscale`."""
    _by_kernel(image, kernels.grayscale)


def invert(image: Image) -> None:
    """As `kernels.invert`."""
    _by_kernel(image, kernels.invert)


def _by_kernel(image: Image, kernel: Callable[..., Tensor], *parameters: np.generic[Any]) -> None:
    pixels = torch.from_numpy(image.transpose(2, 0, 1)[None])
    pixels.copy_(kernel(pixels, *(torch.from_numpy(np.array([value])) for value in parameters)))

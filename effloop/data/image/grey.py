"""Grey in one channel and in three."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

_WEIGHTS = (19_595, 38_470, 7_471)
"""Of red, green and blue in 65,536ths, as Pillow has them: 0.299, 0.587, 0.114. Equal colours stay as they are."""


def to_grey(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """(H, W, 3) uint8 RGB -> (H, W, 1) by Pillow's formula."""
    return np.asarray(Image.fromarray(np.ascontiguousarray(pixels)).convert("L"))[:, :, None]


def to_rgb(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """(H, W, 1) -> (H, W, 3), contiguous, three times the same."""
    return np.repeat(pixels, 3, axis=2)


def batch_to_grey(images: Tensor) -> Tensor:
    """(N, 3, H, W) uint8 on any device -> (N, 1, H, W), as `to_grey`."""
    red, green, blue = images.to(torch.int32).unbind(1)
    summed = red * _WEIGHTS[0] + green * _WEIGHTS[1] + blue * _WEIGHTS[2] + 0x8000
    return (summed >> 16).to(torch.uint8).unsqueeze(1)


def batch_to_rgb(images: Tensor) -> Tensor:
    """(N, 1, H, W) -> (N, 3, H, W), channels_last, three times the same."""
    return images.expand(-1, 3, -1, -1).contiguous(memory_format=torch.channels_last)

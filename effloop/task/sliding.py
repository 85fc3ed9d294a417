"""Evaluation of large images in overlapping windows."""

from __future__ import annotations

import math
from itertools import product

import torch
from torch import Tensor, nn

from effloop.batch import ImageSize


class SlidingWindow(nn.Module):
    """A model of pixels that sees an image through windows of one size; where they overlap, logits are averaged.

    All images of a batch are seen through the same windows. They begin at multiples of the stride; the last one of a
    row or column ends with the image.

    Args:
        model: (N, C, h, w) images -> (N, K, h, w) logits.
        window: its h and w; smaller images are seen as a whole.
        stride: from one window to the next, as a share of the window, at most 1.
    """

    def __init__(self, model: nn.Module, window: ImageSize, stride: float) -> None:
        super().__init__()
        self.model = model
        self.window = window
        self.strides = tuple(max(1, math.ceil(stride * side)) for side in window)

    def forward(self, images: Tensor) -> Tensor:
        """(N, C, H, W) -> (N, K, H, W) logits."""
        size = images.shape[2:]
        rows, columns = (starts(*each) for each in zip(size, self.window, self.strides, strict=True))
        total = torch.empty(0)
        counts = torch.zeros(size, device=images.device)
        for top, left in product(rows, columns):
            place = (..., slice(top, top + self.window.height), slice(left, left + self.window.width))
            logits = self.model(images[place])
            if not total.numel():
                total = torch.zeros(*logits.shape[:2], *size, device=images.device)
            total[place] += logits
            counts[place] += 1
        return total / counts


def starts(length: int, window: int, stride: int) -> list[int]:
    """Where windows begin that cover a length, the last one at its end."""
    last = max(length - window, 0)
    return [*range(0, last, stride), last]

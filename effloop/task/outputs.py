"""Models with other outputs than the one that is trained, which they hold: these import torch, and tasks don't."""

from __future__ import annotations

import math
from itertools import product
from typing import Any, Self

import torch
from torch import Tensor, nn

from effloop.batch import ImageSize


class OutputTransform(nn.Module):
    """A model with other outputs than the one that is trained, which is `model`."""

    model: nn.Module

    def input_size(self, size: ImageSize) -> ImageSize:
        """Height and width of the inputs of `model`, for images of a size."""
        return size


def unwrap(model: nn.Module) -> nn.Module:
    """The model that is trained, without its `OutputTransform`."""
    return model.model if isinstance(model, OutputTransform) else model


class InUnits(OutputTransform):
    """A model of standardised numbers with outputs in the targets' units; its weights have the model's own names."""

    mean: Tensor
    deviation: Tensor

    def __init__(self, model: nn.Module, mean: Tensor, deviation: Tensor) -> None:
        super().__init__()
        self.model = model
        device = next((each.device for each in model.parameters()), mean.device)
        self.register_buffer("mean", mean.to(device), persistent=False)
        self.register_buffer("deviation", deviation.to(device), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """(N, 3, H, W) -> (N, K) float32 in the targets' units."""
        return torch.addcmul(self.mean, self.model(images).float(), self.deviation)

    def half(self) -> Self:
        """The model in float16; the scale stays as it is, as a mean far from 0 would lose its digits."""
        self.model.half()
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.model.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.model.load_state_dict(*args, **kwargs)


class SlidingWindow(OutputTransform):
    """A model of pixels that sees images through windows of one size; where they overlap, logits are averaged. The last
    window of a row or column ends with the image. Images smaller than the window are seen as a whole.
    """

    def __init__(self, model: nn.Module, window: ImageSize, stride: float) -> None:
        super().__init__()
        self.model, self.window = model, window
        self.strides = tuple(max(1, math.ceil(stride * side)) for side in window)

    def input_size(self, size: ImageSize) -> ImageSize:
        return ImageSize(*map(min, size, self.window))

    def forward(self, images: Tensor) -> Tensor:
        size = images.shape[2:]
        rows, columns = (starts(*each) for each in zip(size, self.window, self.strides, strict=True))
        total, counts = torch.empty(0), torch.zeros(size, device=images.device)
        for top, left in product(rows, columns):
            place = (..., slice(top, top + self.window.height), slice(left, left + self.window.width))
            logits = self.model(images[place])
            if not total.numel():
                total = torch.zeros(*logits.shape[:2], *size, device=images.device)
            total[place] += logits
            counts[place] += 1
        return total / counts


def starts(length: int, window: int, stride: int) -> list[int]:
    """Starts of windows that cover a length, the last one at its end."""
    last = max(length - window, 0)
    return [*range(0, last, stride), last]

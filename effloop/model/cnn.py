"""A small residual network for small images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from effloop.batch import ImageSize
from effloop.errors import ConfigError
from effloop.model.base import ModelConfig, models

_SMALLEST = 16  # pixels; it halves the image four times


@dataclass
class CnnConfig(ModelConfig):
    """Fields of `model=cnn`.

    Attributes:
        width: channels of the first layer; the last has eight times as many.
    """

    width: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.width < 1:
            raise ConfigError(f"model.width: {self.width} is not allowed; set a number of channels above 0")


@models.register("cnn", CnnConfig)
class Cnn(nn.Module):
    """A small residual network for images from 16 pixels on; 0.3 million parameters."""

    def __init__(self, config: CnnConfig, *, num_classes: int, image_size: Any) -> None:
        super().__init__()
        size = ImageSize.of(image_size)
        if min(size) < _SMALLEST:
            raise ConfigError(f"image_size: {size} is too small for model=cnn; set {_SMALLEST} or more")
        width = config.width
        self.features = nn.Sequential(
            conv_bn_relu(3, width, stride=2),
            Stage(width, 2 * width),
            Stage(2 * width, 4 * width),
            Stage(4 * width, 8 * width),
        )
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(8 * width, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """(N, 3, H, W) float -> (N, K) logits."""
        logits: Tensor = self.head(self.pool(self.features(images)).flatten(1))
        return logits


class Stage(nn.Module):
    """Widen, halve the resolution, then refine with one residual convolution."""

    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__()
        self.down = nn.Sequential(conv_bn_relu(channels_in, channels_out), nn.MaxPool2d(2))
        self.refine = conv_bn_relu(channels_out, channels_out)

    def forward(self, x: Tensor) -> Tensor:
        """(N, channels_in, H, W) -> (N, channels_out, H / 2, W / 2)."""
        x = self.down(x)
        refined: Tensor = self.refine(x)
        return x + refined


def conv_bn_relu(channels_in: int, channels_out: int, stride: int = 1) -> nn.Sequential:
    """A 3x3 convolution, BatchNorm, ReLU; no bias, BatchNorm has one."""
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, 3, stride=stride, padding=1, bias=False),
        nn.BatchNorm2d(channels_out),
        nn.ReLU(inplace=True),
    )

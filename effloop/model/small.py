"""Small networks for small images: a CNN and ResNets of images, a U-Net of pixels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from effloop.batch import ImageSize
from effloop.errors import ConfigError, check_value
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
        check_value("model.width", self.width, self.width >= 1, "a number of channels above 0")


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


@dataclass
class SmallResnetConfig(ModelConfig):
    """Fields of `model=small_resnet`.

    Attributes:
        depth: 18, 34, 50, 101 or 152 layers.
    """

    depth: int = 18

    def __post_init__(self) -> None:
        super().__post_init__()
        check_value("model.depth", self.depth, self.depth in (18, 34, 50, 101, 152), "18, 34, 50, 101 or 152")


@models.register("small_resnet", SmallResnetConfig)
def small_resnet(config: SmallResnetConfig, *, num_classes: int, image_size: Any) -> nn.Module:
    """ResNet-18 to -152 for small images: a 3x3 stem, no max-pooling."""
    del image_size
    import torchvision.models as zoo

    model: nn.Module = zoo.get_model(f"resnet{config.depth}", weights=None, num_classes=num_classes)
    # He et al. 2016 halve a 224-pixel image twice before the first block; at 32 to 96 pixels that
    # discards most of it.
    model.conv1 = nn.Conv2d(3, 64, kernel_size=3, padding=1, bias=False)
    model.maxpool = nn.Identity()
    return model


@dataclass
class UnetConfig(ModelConfig):
    """Fields of `model=unet`.

    Attributes:
        width: channels at the full resolution; each halving doubles them, up to 16 times as many.
        depth: how often the resolution is halved.
    """

    width: int = 16
    depth: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        check_value("model.width", self.width, self.width >= 1, "a number of channels above 0")
        check_value("model.depth", self.depth, 1 <= self.depth <= 8, "a whole number from 1 to 8")


@models.register("unet", UnetConfig)
class Unet(nn.Module):
    """U-Net (Ronneberger et al. 2015) with BatchNorm, padding and bilinear upsampling; 1.9 million parameters."""

    def __init__(self, config: UnetConfig, *, num_classes: int, channels: int) -> None:
        super().__init__()
        widths = [config.width * min(2**level, 16) for level in range(config.depth + 1)]
        self.encoder = nn.ModuleList(
            Block(before, width) for before, width in zip([channels, *widths], widths, strict=False)
        )
        pairs = list(zip(widths[1:], widths, strict=False))
        self.decoder = nn.ModuleList(Block(below + width, width) for below, width in reversed(pairs))
        self.head = nn.Conv2d(config.width, num_classes, 1)
        self.multiple = 2**config.depth

    def forward(self, images: Tensor) -> Tensor:
        """(N, C, H, W) float -> (N, K, H, W) logits. Inside, an image is padded at the right and the bottom to a
        multiple of 2**depth, with 0, the mean colour.
        """
        height, width = images.shape[2:]
        x = F.pad(images, (0, -width % self.multiple, 0, -height % self.multiple))
        skipped = []
        for level, block in enumerate(self.encoder):
            x = block(F.max_pool2d(x, 2) if level else x)
            skipped.append(x)
        skipped.pop()
        for block in self.decoder:
            x = F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)
            x = block(torch.cat([skipped.pop(), x], dim=1))
        logits: Tensor = self.head(x)
        return logits[:, :, :height, :width]


class Block(nn.Sequential):
    """Two convolutions."""

    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__(conv_bn_relu(channels_in, channels_out), conv_bn_relu(channels_out, channels_out))

"""A small U-Net: one class for each pixel, from images of any size."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from effloop.errors import ConfigError
from effloop.model.base import ModelConfig, models
from effloop.model.cnn import conv_bn_relu


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
        if self.width < 1:
            raise ConfigError(f"model.width: {self.width} is not allowed; set a number of channels above 0")
        if not 1 <= self.depth <= 8:
            raise ConfigError(f"model.depth: {self.depth} is not allowed; set a whole number from 1 to 8")


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

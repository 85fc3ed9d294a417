"""The layers of `model=cnn` and `model=unet`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Cnn(nn.Module):
    """`model=cnn`: (N, 3, H, W) -> (N, num_classes); `width` channels in the first layer."""

    def __init__(self, width: int, num_classes: int) -> None:
        super().__init__()
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


class Unet(nn.Module):
    """`model=unet`; `width` channels at the full resolution, which is halved `depth` times."""

    def __init__(self, width: int, depth: int, num_classes: int, channels: int) -> None:
        super().__init__()
        widths = [width * min(2**level, 16) for level in range(depth + 1)]
        self.encoder = nn.ModuleList(
            Block(before, width) for before, width in zip([channels, *widths], widths, strict=False)
        )
        pairs = list(zip(widths[1:], widths, strict=False))
        self.decoder = nn.ModuleList(Block(below + width, width) for below, width in reversed(pairs))
        self.head = nn.Conv2d(width, num_classes, 1)
        self.multiple = 2**depth

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

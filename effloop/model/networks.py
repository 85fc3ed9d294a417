"""The layers of `model=cnn`, `model=unet` and `model=airbench`."""

from __future__ import annotations

from itertools import pairwise

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


class Airbench(nn.Module):
    """`model=airbench`: (N, C, H, W) -> (N, num_classes); `width` channels in the first group of convolutions.

    The network of airbench94.py in github.com/KellerJordan/cifar10-airbench (Jordan 2024, "94% on CIFAR-10 in 3.29
    seconds on a single GPU").
    """

    def __init__(self, width: int, num_classes: int, channels: int) -> None:
        super().__init__()
        widths = [2 * 4 * channels, width, 4 * width, 4 * width]
        self.whiten = nn.Conv2d(channels, widths[0], 2)
        self.whiten.weight.requires_grad_(False)
        nn.init.zeros_(self.whiten.bias)  # type: ignore[arg-type]
        self.groups = nn.Sequential(*(ConvGroup(*pair) for pair in pairwise(widths)))
        self.head = nn.Linear(4 * width, num_classes, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        x = self.groups(F.gelu(self.whiten(images)))
        features = F.max_pool2d(x, x.shape[2:]).flatten(1)  # not AdaptiveMaxPool2d, whose gradients may vary on a GPU
        logits: Tensor = self.head(features / 9)
        return logits

    @torch.no_grad()
    def fit_images(self, images: Tensor) -> None:
        """Let the first layer whiten 2x2 patches of images like these, (N, C, H, W) normalised: its filters are the
        patches' eigenvectors, scaled to a variance of 1, and their negatives.
        """
        patches = images.unfold(2, 2, 1).unfold(3, 2, 1).permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(0, 2)
        variances, vectors = torch.linalg.eigh(patches.T @ patches / len(patches))
        filters = (vectors / (variances + 5e-4).sqrt()).T.flip(0).unflatten(1, self.whiten.weight.shape[1:])
        self.whiten.weight.copy_(torch.cat([filters, -filters]))


class ConvGroup(nn.Module):
    """Two convolutions, (N, channels_in, H, W) -> (N, channels_out, H / 2, W / 2), the identity of their inputs'
    channels at first; BatchNorms without a scale.
    """

    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = _layers(channels_in, channels_out)
        self.pool = nn.MaxPool2d(2)
        self.conv2, self.norm2 = _layers(channels_out, channels_out)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.norm1(self.pool(self.conv1(x))))
        return F.gelu(self.norm2(self.conv2(x)))


def _layers(channels_in: int, channels_out: int) -> tuple[nn.Conv2d, nn.BatchNorm2d]:
    conv = nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False)
    nn.init.dirac_(conv.weight.data[:channels_in])
    norm = nn.BatchNorm2d(channels_out, eps=1e-12, momentum=0.4)
    norm.weight.requires_grad_(False)
    return conv, norm

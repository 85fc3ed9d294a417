"""The layers of `model=airbench`: the network of airbench94.py in github.com/KellerJordan/cifar10-airbench.

Jordan 2024, "94% on CIFAR-10 in 3.29 seconds on a single GPU".
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Airbench(nn.Module):
    """(N, C, H, W) -> (N, num_classes); `width` channels in the first group of convolutions."""

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

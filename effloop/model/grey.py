"""Models of grey images, made of models of RGB."""

from __future__ import annotations

import torch
from torch import nn

from effloop.errors import ConfigError


def take_grey(model: nn.Module) -> None:
    """Let a model that was built for RGB take (N, 1, H, W) images: its first convolution sums its weights over R, G, B.

    For the same weights, its outputs are those for grey in three channels.

    Args:
        model: changed in place.

    Raises:
        ConfigError: no convolution of it has three input channels.
    """
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d) and layer.in_channels == 3 and layer.groups == 1:
            with torch.no_grad():
                layer.weight = nn.Parameter(layer.weight.sum(1, keepdim=True))
            layer.in_channels = 1
            break
    else:
        raise ConfigError(
            "data.channels: 1, but the model has no convolution of three input channels; choose another model, or set "
            "data.channels=3"
        )
    if getattr(model, "transform_input", False):  # torchvision's GoogLeNet and Inception v3 read R, G and B by number
        model.transform_input = False  # type: ignore[assignment]

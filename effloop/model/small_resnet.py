"""ResNets for small images, whose stem keeps the resolution."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from effloop.errors import ConfigError
from effloop.model.base import ModelConfig, models


@dataclass
class SmallResnetConfig(ModelConfig):
    """Fields of `model=small_resnet`.

    Attributes:
        depth: 18, 34, 50, 101 or 152 layers.
    """

    depth: int = 18

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.depth not in (18, 34, 50, 101, 152):
            raise ConfigError(f"model.depth: {self.depth} is not allowed; set 18, 34, 50, 101 or 152")


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

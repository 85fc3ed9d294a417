"""Small networks for small images: CNNs and ResNets of images, a U-Net of pixels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from effloop.batch import ImageSize
from effloop.errors import ConfigError, check_value
from effloop.lazy import nn
from effloop.model.base import ModelConfig, models

_SMALLEST = 16  # pixels; it halves the image four times


@dataclass
class CnnConfig(ModelConfig):
    """Fields of `model=cnn` and `model=airbench`.

    Attributes:
        width: channels of the first convolutions; the last have eight times as many, of airbench four times.
    """

    width: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        check_value("model.width", self.width, self.width >= 1, "a number of channels above 0")


@models.register("cnn", CnnConfig)
def cnn(config: CnnConfig, *, num_classes: int, image_size: Any) -> nn.Module:
    """A small residual network for images from 16 pixels on; 0.3 million parameters."""
    from effloop.model.networks import Cnn

    size = ImageSize.of(image_size)
    if min(size) < _SMALLEST:
        raise ConfigError(f"image_size: {size} is too small for model=cnn; set {_SMALLEST} or more")
    return Cnn(config.width, num_classes)


@models.register("airbench", CnnConfig)
def airbench(config: CnnConfig, *, num_classes: int, channels: int) -> nn.Module:
    """The network of cifar10-airbench (Jordan 2024), whose first layer whitens; 2.0 million parameters."""
    from effloop.model.networks import Airbench

    return Airbench(config.width, num_classes, channels)


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
    import torchvision.models as zoo

    model: nn.Module = zoo.get_model(f"resnet{config.depth}", weights=None, num_classes=num_classes)
    # He et al. 2016 halve a 224-pixel image twice before the first block; at 32 to 96 pixels that discards most of it.
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
def unet(config: UnetConfig, *, num_classes: int, channels: int) -> nn.Module:
    """U-Net (Ronneberger et al. 2015) with BatchNorm, padding and bilinear upsampling; 1.9 million parameters."""
    from effloop.model.networks import Unet

    return Unet(config.width, config.depth, num_classes, channels)

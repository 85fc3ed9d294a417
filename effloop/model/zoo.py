"""Models of torchvision and timm, by their names there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from omegaconf import MISSING
from torch import nn

from effloop.errors import ConfigError, optional_package
from effloop.model.base import ModelConfig, models
from effloop.registry import PartConfig, choices


@dataclass
class ArchConfig(ModelConfig):
    """Fields of models that another package has by name.

    Attributes:
        arch: the model's name there.
    """

    arch: str = MISSING


@dataclass
class TorchvisionConfig(ArchConfig):
    """Fields of `model=torchvision`; `model=resnet50` is short for it with `arch` set."""

    @property
    def torchvision_arch(self) -> str | None:
        return self.arch


@dataclass
class TimmConfig(ArchConfig):
    """Fields of `model=timm`."""


@models.lazy_names
def torchvision_names() -> Mapping[str, PartConfig]:
    """{name: config} of every classification model of torchvision."""
    import torchvision.models as zoo

    return {arch: TorchvisionConfig(name="torchvision", arch=arch) for arch in zoo.list_models(module=zoo)}


@models.register("torchvision", TorchvisionConfig)
def torchvision_model(config: TorchvisionConfig, *, num_classes: int, image_size: int) -> nn.Module:
    """Any classification model of torchvision, by model.arch or as model=NAME; untrained."""
    import torchvision.models as zoo

    names = zoo.list_models(module=zoo)
    if config.arch not in names:
        raise ConfigError(f"model.arch: no model '{config.arch}' in torchvision; {choices(config.arch, names)}")
    options: dict[str, Any] = {"image_size": image_size} if config.arch.startswith("vit_") else {}
    if config.arch in ("googlenet", "inception_v3"):
        options |= {"aux_logits": False, "init_weights": True}  # one output, like every other model
        options["transform_input"] = True  # to -1..1, which torchvision's weights of these two expect
    model: nn.Module = zoo.get_model(config.arch, weights=None, num_classes=num_classes, **options)
    return model


@models.register("timm", TimmConfig)
def timm_model(config: TimmConfig, *, num_classes: int, image_size: int) -> nn.Module:
    """Any model of timm, by model.arch; untrained."""
    timm = optional_package("timm", "model=timm", "effloop[timm]")
    if config.arch not in timm.list_models():
        raise ConfigError(f"model.arch: no model '{config.arch}' in timm; {choices(config.arch, timm.list_models())}")
    fixed_size = getattr(timm.get_pretrained_cfg(config.arch), "fixed_input_size", False)
    options = {"img_size": image_size} if fixed_size else {}
    model: nn.Module = timm.create_model(config.arch, pretrained=False, num_classes=num_classes, **options)
    return model

"""What every model is: (N, 3, S, S) float images in, (N, K) logits out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from effloop.errors import ConfigError
from effloop.registry import PartConfig, Registry


@dataclass
class ModelConfig(PartConfig):
    """Fields that every model has.

    Attributes:
        num_classes: number of logits; null takes it from the data.
    """

    num_classes: int | None = None

    def __post_init__(self) -> None:
        if self.num_classes is not None and self.num_classes < 1:
            raise ConfigError(f"model.num_classes: {self.num_classes} is not allowed; set a number above 0, or null")


def _torchvision_models() -> Mapping[str, PartConfig]:
    from effloop.model.zoo import torchvision_shelf  # torchvision.models takes 1.3 s to import

    return torchvision_shelf()


models: Registry[nn.Module] = Registry("model", shelf=_torchvision_models)

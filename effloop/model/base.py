"""Interface of models: (N, 3, S, S) float images in, (N, K) logits out."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from effloop.errors import ConfigError
from effloop.registry import PartConfig, Registry


@dataclass
class ModelConfig(PartConfig):
    """Fields that every model has.

    Attributes:
        num_classes: number of logits; null takes it from the data.
        checkpointing: store only the inputs of blocks for the backward pass and recompute the rest: less memory
            for about a third more computing.
        freeze: names or glob patterns of modules and parameters to freeze, e.g. [features] or
            ["layer[12]", "*.bn1"].
        weights: initial weights: a run folder or .ckpt of EffLoop, a state dict by torch.save or safetensors, or, for
            a torchvision model, the name of its weights there, e.g. DEFAULT.
    """

    num_classes: int | None = None
    checkpointing: bool = False
    freeze: list[str] = field(default_factory=list)
    weights: str | None = None

    @property
    def torchvision_arch(self) -> str | None:
        """The model's name in torchvision, if that is where it comes from."""
        return None

    def __post_init__(self) -> None:
        if self.num_classes is not None and self.num_classes < 1:
            raise ConfigError(f"model.num_classes: {self.num_classes} is not allowed; set a number above 0, or null")
        if not all(self.freeze):
            raise ConfigError(f"model.freeze: {self.freeze} has an empty pattern; set names, e.g. [features]")
        if self.weights is not None and not self.weights.strip():
            raise ConfigError("model.weights: '' is not allowed; set a file, a run folder, a name, or null")


CHANNEL_NORMS = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)
"""Normalisations that subtract each channel's mean, and so cancel a bias before them."""

NORMS = (*CHANNEL_NORMS, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)
"""All normalisations."""


models: Registry[nn.Module] = Registry("model")

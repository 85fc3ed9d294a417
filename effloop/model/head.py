"""A model's last layer, and training it alone on the features below it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from effloop.batch import ImageSize
from effloop.errors import ConfigError
from effloop.model.base import subclassed


def find_head(model: nn.Module, size: ImageSize, channels: int = 3) -> str:
    """The name of the linear layer whose output is the model's, which is in evaluation mode; a ConfigError if it ends
    with something else.
    """
    calls: list[tuple[str, Tensor, Tensor]] = []
    handles = [
        module.register_forward_hook(lambda _, inputs, output, name=name: calls.append((name, inputs[0], output)))
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    ]
    device = next(model.parameters()).device
    with torch.no_grad():
        logits = model(torch.zeros(1, channels, *size, device=device))
    for handle in handles:
        handle.remove()
    for name, features, output in calls:
        if output is logits and features.ndim == 2:
            return name
    raise ConfigError("probe: this model doesn't end with a linear layer; choose another model, or set probe=0")


class Features:
    """The features below the head of a model in evaluation mode: (N, C, H, W) images -> (N, D)."""

    def __init__(self, model: nn.Module, head: str) -> None:
        self.model, self.head = model, model.get_submodule(head)

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        """The input of the head, (N, D) float32 on the images' device."""
        seen: list[Tensor] = []
        with self.head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0])):
            self.model(images)
        return seen[0].float()


def train_head_only(model: nn.Module, head: str) -> None:
    """Let a model take (N, D) features instead of images, and freeze all but its head.

    Its names in the state dict stay as they are, and so do its weights below the head.
    """
    model.requires_grad_(False)
    model.get_submodule(head).requires_grad_(True)
    subclassed(model, _of_features, head)


def _of_features(kind: Any, head: str) -> type[nn.Module]:
    class OfFeatures(kind):  # type: ignore[misc]
        def forward(self, features: Tensor) -> Tensor:
            outputs: Tensor = self.get_submodule(head)(features)
            return outputs

    return OfFeatures

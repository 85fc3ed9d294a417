"""Segmentation networks of torchvision, whose outputs are as EffLoop's models give them."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor, nn


def pixel_model(arch: str, num_classes: int) -> nn.Module:
    """An untrained segmentation model of torchvision, with its auxiliary head where it has one.

    Its names in the state dict are torchvision's.

    Args:
        arch: its name, such as deeplabv3_resnet50.
        num_classes: K.

    Returns:
        (N, 3, H, W) -> (N, K, H, W), or in training with an auxiliary head {"out": those, "aux": the head's}.
    """
    import torchvision.models as zoo

    has_head = not arch.startswith("lraspp")
    options: dict[str, Any] = {"aux_loss": True} if has_head else {}
    model: nn.Module = zoo.get_model(arch, weights=None, weights_backbone=None, num_classes=num_classes, **options)
    kind: Any = type(model)
    model.__class__ = _of_pixels(kind, has_head)
    return model


@functools.cache
def _of_pixels(kind: Any, has_head: bool) -> type[nn.Module]:
    """A subclass that gives a tensor in evaluation; the class is changed, so that names stay as they are."""

    class OfPixels(kind):  # type: ignore[misc]
        has_auxiliary_heads = has_head

        def forward(self, images: Tensor) -> Tensor | dict[str, Tensor]:
            """(N, 3, H, W) -> (N, K, H, W) logits, or in training those of the heads."""
            found: dict[str, Tensor] = super().forward(images)
            return found if self.training and has_head else found["out"]

    OfPixels.__name__, OfPixels.__qualname__ = kind.__name__, kind.__qualname__
    return OfPixels

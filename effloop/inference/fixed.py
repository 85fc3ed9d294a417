"""Exported files that take a fixed number of images, given any number."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class FixedBatch(nn.Module):
    """A model that takes a fixed number of images, for any number: the last ones are filled up.

    Args:
        model: takes (batch, 3, H, W).
        batch: that number.
    """

    def __init__(self, model: nn.Module, batch: int) -> None:
        super().__init__()
        self.model = model
        self.batch = batch

    def forward(self, images: Tensor) -> Tensor:
        """(N, 3, H, W) -> (N, K)."""
        missing = -len(images) % self.batch
        filled = torch.cat([images, images[:1].expand(missing, -1, -1, -1)]) if missing else images
        return torch.cat([self.model(part) for part in torch.split(filled, self.batch)])[: len(images)]

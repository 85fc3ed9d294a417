"""The step of `parallel=dp`: of each device, and of all."""

from __future__ import annotations

from torch import Tensor, nn


class ReplicaStep(nn.Module):
    """The step of one of several devices: it returns scalars, so that no logits are copied to the first device."""

    def __init__(self, step: nn.Module) -> None:
        super().__init__()
        self.step = step

    def forward(self, images: Tensor, targets: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        """Part of a batch -> its summed loss (1,), its sums (1, M)."""
        loss, sums = self.step(images, targets, valid)
        return (loss * len(images))[None], sums[None]


class GatheredStep(nn.Module):
    """A step whose batch is split over devices.

    Args:
        replicas: (images, targets, valid) -> the results of every device's `ReplicaStep`, concatenated.
    """

    def __init__(self, replicas: nn.Module) -> None:
        super().__init__()
        self.replicas = replicas

    def forward(self, images: Tensor, targets: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        """A batch -> loss (), sums (M,), as the step itself returns them."""
        losses, sums = self.replicas(images, targets, valid)
        return losses.sum() / len(images), sums.sum(0)

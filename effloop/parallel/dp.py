"""One process, several GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from effloop.errors import ConfigError, warn
from effloop.parallel.base import ParallelConfig, parallels
from effloop.parallel.single import NoParallel


@dataclass
class DpConfig(ParallelConfig):
    """Fields of `parallel=dp`: there are none."""

    replicates: ClassVar[bool] = True


class ReplicaStep(nn.Module):
    """A step as one of several devices does it: it returns scalars, so that no logits travel to the first device."""

    def __init__(self, step: nn.Module) -> None:
        super().__init__()
        self.step = step

    def forward(self, images: Tensor, targets: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        """Some of the batch's images -> (1,) their summed loss, (1, 7) their sums."""
        loss, sums = self.step(images, targets, valid)
        return (loss * len(images))[None], sums[None]


class GatheredStep(nn.Module):
    """A step whose batch is split over devices.

    Args:
        shares: (images, targets, valid) -> what `ReplicaStep` gives, of every device one below the other.
    """

    def __init__(self, shares: nn.Module) -> None:
        super().__init__()
        self.shares = shares

    def forward(self, images: Tensor, targets: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        """The whole batch -> (loss (), sums (7,)), as the step itself gives them."""
        losses, sums = self.shares(images, targets, valid)
        return losses.sum() / len(images), sums.sum(0)


@parallels.register("dp", DpConfig)
class Dp(NoParallel):
    """One process that splits each batch over the GPUs it sees; ddp is faster.

    There is one rank: `batch_size` is the whole batch, and each GPU gets its part of it. The first GPU keeps the
    weights and hands out copies in every step.

    Raises:
        ConfigError: the device is one of them.
    """

    def __init__(self, config: DpConfig, device: torch.device) -> None:
        super().__init__(config, device)
        if str(device) != device.type:
            raise ConfigError(
                f"device: '{device}' is one GPU, parallel=dp takes all that are visible; set device=cuda, "
                "and CUDA_VISIBLE_DEVICES to choose among them"
            )
        self._num_gpus = torch.cuda.device_count() if device.type == "cuda" else 0
        if self._num_gpus > 1:
            self.device = torch.device("cuda", 0)
        else:
            warn(f"parallel=dp does nothing here: it splits batches over GPUs, and has {self._num_gpus}")

    def wrap(self, step: nn.Module, *, find_unused: bool) -> nn.Module:
        if self._num_gpus < 2:
            return step
        return GatheredStep(nn.DataParallel(ReplicaStep(step), list(range(self._num_gpus))))

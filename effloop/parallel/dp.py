"""One process, several GPUs."""

from __future__ import annotations

from dataclasses import dataclass

from effloop.errors import ConfigError, warn
from effloop.lazy import nn, torch
from effloop.parallel.base import Parallel, ParallelConfig, parallels
from effloop.system import gpu


@dataclass
class DpConfig(ParallelConfig):
    """`parallel=dp` has no fields."""

    replicates = True


@parallels.register("dp", DpConfig)
class Dp(Parallel):
    """One process that splits each batch over the GPUs it sees; ddp is faster.

    There is one rank: `batch_size` is the whole batch, and each GPU gets a part of it. The first GPU keeps the
    weights and copies them to the others in every step.

    Raises:
        ConfigError: the device is a single GPU, such as cuda:0.
    """

    def __init__(self, config: DpConfig, device: torch.device) -> None:
        if str(device) != device.type:
            raise ConfigError(
                f"device: '{device}' is one GPU, parallel=dp takes all that are visible; set device=cuda, "
                "and CUDA_VISIBLE_DEVICES to choose among them"
            )
        super().__init__(config, device)
        self._num_gpus = gpu.count() if device.type == "cuda" else 0
        if self._num_gpus > 1:
            self.device = gpu.use(torch.device("cuda", 0))
        else:
            warn(f"parallel=dp does nothing here: it splits batches over GPUs, and has {self._num_gpus}")

    def wrap_step(self, step: nn.Module, *, find_unused: bool) -> nn.Module:
        if self._num_gpus < 2:
            return step
        from effloop.parallel.replicas import GatheredStep, ReplicaStep

        return GatheredStep(nn.DataParallel(ReplicaStep(step), list(range(self._num_gpus))))

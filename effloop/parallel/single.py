"""One process, one device."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from torch import Tensor, nn

from effloop.parallel.base import Parallel, ParallelConfig, parallels


@dataclass
class NoneConfig(ParallelConfig):
    """Fields of `parallel=none`: there are none."""


@parallels.register("none", NoneConfig)
class NoParallel(Parallel):
    """One process on one device."""

    def __init__(self, config: NoneConfig) -> None:
        del config
        self.rank = 0
        self.world_size = 1

    def wrap(self, model: nn.Module) -> nn.Module:
        return model

    def gradients(self, model: nn.Module, *, sync: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def sum(self, values: Tensor) -> Tensor:
        return values

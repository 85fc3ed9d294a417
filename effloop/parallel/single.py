"""One process, one device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from effloop.batch import Batch
from effloop.parallel.base import Parallel, ParallelConfig, T, parallels


@dataclass
class NoneConfig(ParallelConfig):
    """`parallel=none` has no fields."""


@parallels.register("none", NoneConfig)
class NoParallel(Parallel):
    """One process on one device."""

    def __init__(self, config: ParallelConfig, device: torch.device) -> None:
        del config
        self.rank, self.world_size, self.local_world_size = 0, 1, 1
        self.device = device

    def wrap(self, step: nn.Module, *, find_unused: bool) -> nn.Module:
        return step

    def gradients(self, step: nn.Module, *, sync: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def sum(self, values: Tensor) -> Tensor:
        return values

    def average_buffers(self, model: nn.Module) -> None:
        pass

    def gather(self, value: T) -> list[T]:
        return [value]

    def on_rank0(self, call: Callable[[], T]) -> T:
        return call()

    def assert_equal(self, what: str, value: str) -> None:
        pass

    def agree(self, wish: int) -> int:
        return wish

    def monitored(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        return iter(batches)

    def close(self) -> None:
        pass

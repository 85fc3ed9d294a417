"""The base class of parallel strategies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import torch
from torch import Tensor, nn

from effloop.batch import Batch
from effloop.registry import PartConfig, Registry

T = TypeVar("T")


@dataclass
class ParallelConfig(PartConfig):
    """The base class of strategies' fields; there are no common ones.

    Attributes:
        of_ranks: whether it runs in several processes, which have to be started first.
        replicates: whether it copies the model in every step, which isn't possible for a compiled one.
    """

    of_ranks: ClassVar[bool] = False

    @property
    def syncs_batch_norm(self) -> bool:
        """Whether BatchNorm's statistics are computed over the images of all ranks."""
        return False

    replicates: ClassVar[bool] = False


class Parallel(ABC):
    """The rank of this process, and the operations that ranks do together.

    A factory gets its config and the requested device.

    Attributes:
        rank, world_size: this rank's number, counted from 0, and the number of ranks.
        local_world_size: number of ranks on this machine.
        device: this rank's device.
    """

    rank: int
    world_size: int
    local_world_size: int
    device: torch.device

    @property
    def sharing(self) -> int:
        """Number of ranks that share this rank's cores, itself included: all local ones, unless they are bound."""
        return self.local_world_size

    def least_images(self, batch_size: int) -> int:
        """The fewest images of a rank's batch that go through the model at once."""
        return batch_size

    def wrap(self, model: nn.Module) -> nn.Module:
        """Prepare a model that has its initial weights; optimizer, EMA, training step and checkpoints get the result.

        A strategy may replace modules and parameters here, as `fully_shard` does. Names have to stay as they are, and
        so has what `state_dict` returns, on every rank.
        """
        return model

    def wrap_step(self, step: nn.Module, *, find_unused: bool) -> nn.Module:
        """Wrap a training step around the model that `wrap` has returned.

        Args:
            step: (images, targets, valid) -> (loss (), sums (M,)), as `Step` does.
            find_unused: whether some parameters get no gradient.
        """
        del find_unused
        return step

    @abstractmethod
    def gradients(self, step: nn.Module, *, sync: bool) -> AbstractContextManager[None]:
        """Context of forward and backward; with `sync` False gradients aren't averaged over ranks."""

    @abstractmethod
    def sum(self, values: Tensor) -> Tensor:
        """The element-wise sum of `values` over all ranks, on every rank; `values` isn't changed."""

    @abstractmethod
    def average_buffers(self, model: nn.Module) -> None:
        """Replace floating-point buffers, such as BatchNorm's statistics, by their mean over all ranks."""

    @abstractmethod
    def gather(self, value: T) -> list[T]:
        """Every rank's value (tensors and plain values), by rank, on every rank."""

    @abstractmethod
    def on_rank0(self, call: Callable[[], T]) -> T:
        """Call a function on rank 0 only, and return its result (plain values) on every rank.

        Raises:
            EffLoopError: `call` raised it; it is raised on every rank.
        """

    @abstractmethod
    def assert_equal(self, what: str, value: str) -> None:
        """Check that all ranks have the same value.

        Raises:
            ConfigError: they differ; the line has `what`, and the values by rank and machine.
        """

    @abstractmethod
    def agree(self, wish: int) -> int:
        """What any rank wishes, the same on every rank: the bits of all ranks' wishes of the call before this one.

        All ranks call it equally often, such as once an update. It waits for no rank and no device: the wishes travel
        while the ranks compute what comes next. Where there is one rank its wish counts at once.

        Args:
            wish: of this rank, from 0 to 255.
        """

    @abstractmethod
    def monitored(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the same batches, counted for the watchdog, which finds ranks that hang."""

    @abstractmethod
    def close(self) -> None:
        """Leave the group of ranks."""


parallels: Registry[Parallel] = Registry(
    "parallel",
    {
        "ddp": "effloop.parallel.ddp",
        "dp": "effloop.parallel.dp",
        "none": "effloop.parallel.dp",
    },
)

"""What every parallel strategy is."""

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
    """Fields that every strategy has: none so far.

    Attributes:
        of_ranks: whether it is made of several processes, which have to be started first.
        replicates: whether it copies the model in every step, which a compiled one can't be.
    """

    of_ranks: ClassVar[bool] = False

    @property
    def syncs_batch_norm(self) -> bool:
        """Whether BatchNorm's statistics are computed over the images of all ranks."""
        return False

    replicates: ClassVar[bool] = False


class Parallel(ABC):
    """How many ranks there are, which one this is, and how they share a step.

    A factory gets its config and the device that was asked for.

    Attributes:
        rank, world_size: this rank's number, counted from 0, and how many there are.
        local_world_size: how many of them are on this machine.
        device: where this rank computes.
    """

    rank: int
    world_size: int
    local_world_size: int
    device: torch.device

    @property
    def sharing(self) -> int:
        """How many ranks share this one's cores, itself included: all on this machine, unless each is bound to some."""
        return self.local_world_size

    @abstractmethod
    def wrap(self, step: nn.Module, *, find_unused: bool) -> nn.Module:
        """A training step as the loop calls it.

        Args:
            step: (images, targets, valid) -> (loss (), sums (7,)), as `Step` does.
            find_unused: whether some parameters get no gradient.
        """

    @abstractmethod
    def gradients(self, step: nn.Module, *, sync: bool) -> AbstractContextManager[None]:
        """Around forward and backward; `sync` False keeps this step's gradients on the rank."""

    @abstractmethod
    def sum(self, values: Tensor) -> Tensor:
        """The element-wise sum of `values` over all ranks, on every rank; `values` stay as they are."""

    @abstractmethod
    def average_buffers(self, model: nn.Module) -> None:
        """Replace floating-point buffers, such as BatchNorm's statistics, by their mean over all ranks."""

    @abstractmethod
    def gather(self, value: T) -> list[T]:
        """Every rank's value, on every rank, in the order of the ranks: tensors and plain values."""

    @abstractmethod
    def on_rank0(self, call: Callable[[], T]) -> T:
        """What `call` returns on rank 0, which alone calls it, on every rank: plain values.

        Raises:
            EffLoopError: `call` raised one; so does every rank.
        """

    @abstractmethod
    def assert_equal(self, what: str, value: str) -> None:
        """Check that all ranks have the same value.

        Raises:
            ConfigError: they don't; the line has `what`, and the values by rank and machine.
        """

    @abstractmethod
    def monitored(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The same batches, counted for the watchdog that finds a rank which hangs."""

    @abstractmethod
    def close(self) -> None:
        """Leave the group of ranks."""


parallels: Registry[Parallel] = Registry("parallel")

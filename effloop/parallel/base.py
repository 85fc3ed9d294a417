"""What every parallel strategy is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from dataclasses import dataclass

from torch import Tensor, nn

from effloop.registry import PartConfig, Registry


@dataclass
class ParallelConfig(PartConfig):
    """Fields that every strategy has: none so far."""


class Parallel(ABC):
    """How many ranks there are, which one this is, and how they share a step.

    Attributes:
        rank, world_size: this rank's number, counted from 0, and how many there are.
    """

    rank: int
    world_size: int

    @abstractmethod
    def wrap(self, model: nn.Module) -> nn.Module:
        """The model as the loop calls it."""

    @abstractmethod
    def gradients(self, model: nn.Module, *, sync: bool) -> AbstractContextManager[None]:
        """Around forward and backward; `sync` False keeps this step's gradients on the rank."""

    @abstractmethod
    def sum(self, values: Tensor) -> Tensor:
        """The element-wise sum of `values` over all ranks, on every rank."""


parallels: Registry[Parallel] = Registry("parallel")

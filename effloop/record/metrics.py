"""A task's sums, on the device, read only when a line is logged."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class Metrics:
    """Running sums on one device. Counts are exact up to 2**53 samples; adding never waits for the device.

    Args:
        num_sums: M, of the task.
        device: where the sums are.
        over_ranks: the sums of one rank -> those of all; every rank must then read at the same time.

    Attributes:
        sums: (M,) float64 as `Task.sums` gives them, of this rank.
    """

    def __init__(
        self, num_sums: int, device: torch.device, over_ranks: Callable[[Tensor], Tensor] = lambda sums: sums
    ) -> None:
        self.sums = torch.zeros(num_sums, dtype=torch.float64, device=device)
        self.over_ranks = over_ranks

    def reset(self) -> None:
        self.sums.zero_()

    def add(self, sums: Tensor) -> None:
        """Count a batch: (M,) float64."""
        self.sums += sums

    def read(self) -> list[float]:
        """The M sums so far, of all ranks, on the host; waits for the device."""
        read: list[float] = self.over_ranks(self.sums).tolist()
        return read

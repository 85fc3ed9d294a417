"""A task's running sums on the device, read only when a line is logged."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class Metrics:
    """Running sums on one device. Counts are exact up to 2**53 samples; adding never waits for the device.

    Args:
        num_sums: M, the number of the task's sums.
        device: of the sums.
        over_ranks: adds the sums of all ranks; if it is given, all ranks must read at the same time.

    Attributes:
        sums: (M,) float64, this rank's total of what `Task.sums` returns.
    """

    def __init__(
        self, num_sums: int, device: torch.device, over_ranks: Callable[[Tensor], Tensor] = lambda sums: sums
    ) -> None:
        self.sums = torch.zeros(num_sums, dtype=torch.float64, device=device)
        self.over_ranks = over_ranks

    def reset(self) -> None:
        self.sums.zero_()

    def add(self, sums: Tensor) -> None:
        """Add a batch's sums: (M,) float64."""
        self.sums += sums

    def read(self) -> list[float]:
        """The M sums so far over all ranks; waits for the device."""
        total: list[float] = self.over_ranks(self.sums).tolist()
        return total

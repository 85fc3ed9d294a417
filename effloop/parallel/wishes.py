"""What ranks wish, exchanged while they compute."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

_BITS = 8
"""Wishes that there can be."""


@dataclass(frozen=True)
class Wishes:
    """Wishes on their way: a bit for each kind.

    gloo adds and takes maxima but has no bitwise-or, so each bit is a number of its own. They are on the host, whatever
    the device: gloo's threads exchange them, without the GPU, while the loop goes on.

    Attributes:
        bits: (8,) uint8, of this rank, and once they have arrived of all ranks.
        work: what exchanges them; None where nothing was sent.
    """

    bits: Tensor = field(default_factory=lambda: torch.zeros(_BITS, dtype=torch.uint8))
    work: dist.Work | None = None

    @classmethod
    def sent(cls, wish: int) -> Wishes:
        """Send this rank's wish to all ranks, and return at once."""
        bits = torch.tensor([wish >> number & 1 for number in range(_BITS)], dtype=torch.uint8)
        return cls(bits, dist.all_reduce(bits, dist.ReduceOp.MAX, async_op=True))

    def settle(self) -> int:
        """The bits that any rank has sent; waits only for ranks that are a whole update behind."""
        if self.work is not None:
            self.work.wait()
        return sum(bit << number for number, bit in enumerate(self.bits.tolist()))

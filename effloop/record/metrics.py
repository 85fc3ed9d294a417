"""Loss, top-1 and top-5, summed on the device and read only when somebody looks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

_RANKS = 5


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over samples, on the host.

    Attributes:
        loss: summed losses.
        top1, top5: samples whose class is the first, or among the first five, of the logits; of a
            mixed sample, the share that its classes there have.
        samples: how many were counted.
    """

    loss: float = 0.0
    top1: float = 0.0
    top5: float = 0.0
    samples: float = 0.0

    def __sub__(self, other: Totals) -> Totals:
        return Totals(
            self.loss - other.loss, self.top1 - other.top1, self.top5 - other.top5, self.samples - other.samples
        )

    def scores(self) -> dict[str, float]:
        """Means: `loss`, `top1` and `top5`, the last two from 0 to 1. No samples give NaN."""
        names = ("loss", "top1", "top5")
        return {name: getattr(self, name) / self.samples if self.samples else float("nan") for name in names}


@torch.no_grad()
def counted(losses: Tensor, logits: Tensor, targets: Tensor, valid: Tensor) -> Tensor:
    """A batch's loss, samples, and hits at ranks 1 to 5 of the logits, summed: (7,) float64, on the device.

    Mixed samples count as MixUp's authors count them: a hit is worth the share that the class has.

    Args:
        losses: (N,) per sample, or () the batch's mean.
        logits: (N, K).
        targets: (N,) int64, or (N, K) float32 shares of the classes.
        valid: (N,) bool; False is not counted.
    """
    ranked = logits.topk(min(_RANKS, logits.shape[1]), dim=1).indices
    hits = ranked == targets[:, None] if targets.ndim == 1 else targets.gather(1, ranked)
    losses = losses.double().expand(len(valid))
    rows = torch.cat([losses[:, None], torch.ones_like(losses)[:, None], hits], dim=1)
    sums = rows.masked_fill(~valid[:, None], 0).sum(dim=0)
    return F.pad(sums, (0, 2 + _RANKS - len(sums)))  # fewer classes than ranks


class Metrics:
    """Running sums on one device. Counts are exact up to 2**53 samples; adding never syncs.

    Args:
        device: where the sums are.
        over_ranks: the sums of one rank -> those of all; every rank must then read at the same time.

    Attributes:
        sums: (7,) float64 as `counted` gives them, of this rank.
    """

    def __init__(self, device: torch.device, over_ranks: Callable[[Tensor], Tensor] = lambda sums: sums) -> None:
        self.sums = torch.zeros(2 + _RANKS, dtype=torch.float64, device=device)
        self.over_ranks = over_ranks

    def reset(self) -> None:
        self.sums.zero_()

    def add(self, sums: Tensor) -> None:
        """Count a batch: (7,) float64."""
        self.sums += sums

    def read(self) -> Totals:
        """The sums so far, of all ranks, on the host; waits for the device."""
        loss, samples, *hits = self.over_ranks(self.sums).tolist()
        return Totals(loss=loss, top1=hits[0], top5=sum(hits), samples=samples)

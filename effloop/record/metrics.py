"""Loss, top-1 and top-5, summed on the device and read only when somebody looks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
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


class Metrics:
    """Running sums on one device. Counts are exact up to 2**53 samples; updating never syncs.

    Mixed samples count as MixUp's authors count them: a hit is worth the share that the class has.

    Attributes:
        sums: (7,) float64: loss, samples, and hits at ranks 1 to 5 of the logits.
    """

    def __init__(self, device: torch.device) -> None:
        self.sums = torch.zeros(2 + _RANKS, dtype=torch.float64, device=device)

    def reset(self) -> None:
        self.sums.zero_()

    @torch.no_grad()
    def update(self, losses: Tensor, logits: Tensor, targets: Tensor, valid: Tensor) -> None:
        """Count a batch.

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
        self.sums[: rows.shape[1]] += rows.masked_fill(~valid[:, None], 0).sum(dim=0)

    def read(self) -> Totals:
        """The sums so far, on the host; waits for the device."""
        return totals(self.sums)


def totals(sums: Tensor) -> Totals:
    """(7,) float64 sums -> what they come to, on the host."""
    loss, samples, *hits = sums.tolist()
    return Totals(loss=loss, top1=hits[0], top5=sum(hits), samples=samples)

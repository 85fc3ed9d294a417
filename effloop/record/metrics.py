"""Loss, top-1 and top-5, summed on the device and read only when somebody looks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over samples, on the host.

    Attributes:
        loss: summed losses.
        top1, top5: samples whose class is the first, or among the first five, of the logits.
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

    Attributes:
        sums: (4,) float64: loss, top-1, top-5, samples.
    """

    def __init__(self, device: torch.device) -> None:
        self.sums = torch.zeros(4, dtype=torch.float64, device=device)

    def reset(self) -> None:
        self.sums.zero_()

    @torch.no_grad()
    def update(self, losses: Tensor, logits: Tensor, targets: Tensor, valid: Tensor) -> None:
        """Count a batch.

        Args:
            losses: (N,) per sample, or () the batch's mean.
            logits: (N, K).
            targets: (N,) int64.
            valid: (N,) bool; False is not counted.
        """
        ranked = logits.topk(min(5, logits.shape[1]), dim=1).indices
        hits = (ranked == targets[:, None]) & valid[:, None]
        counted = (losses.expand(len(targets)) * valid, hits[:, 0], hits.any(dim=1), valid)
        self.sums += torch.stack([values.sum(dtype=torch.float64) for values in counted])

    def read(self) -> Totals:
        """The sums so far, on the host; waits for the device."""
        return totals(self.sums)


def totals(sums: Tensor) -> Totals:
    """(4,) float64 sums -> the same on the host."""
    return Totals(*sums.tolist())

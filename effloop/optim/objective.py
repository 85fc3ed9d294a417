"""The loss."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


class Objective:
    """Cross-entropy; labels are smoothed for training and never for evaluation.

    Args:
        label_smoothing: share of the target spread evenly over all classes (Szegedy et al. 2016,
            "Rethinking the Inception architecture").
    """

    def __init__(self, label_smoothing: float = 0.0) -> None:
        self.label_smoothing = label_smoothing

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        """(N, K) logits, (N,) int64 or (N, K) float32 shares of the classes -> () mean loss of a training batch."""
        return F.cross_entropy(logits, targets, label_smoothing=self.label_smoothing)

    def per_sample(self, logits: Tensor, targets: Tensor) -> Tensor:
        """(N, K) logits, (N,) int64 -> (N,) float32 losses for evaluation, without smoothing."""
        return F.cross_entropy(logits.float(), targets, reduction="none")

"""The part of a training step that a parallel strategy may run in several places at once."""

from __future__ import annotations

from torch import Tensor, nn

from effloop.optim import Objective
from effloop.precision import Precision
from effloop.record import counted


class Step(nn.Module):
    """Images and targets in, loss and the meters' sums out.

    The loss is computed in here, and no logits come out, so that nothing large is gathered where a strategy
    runs copies of it on several devices.

    Args:
        model: (N, 3, S, S) -> (N, K) logits.
        objective: what is minimised.
        precision: in which number formats.
    """

    def __init__(self, model: nn.Module, objective: Objective, precision: Precision) -> None:
        super().__init__()
        self.model = model
        self.objective = objective
        self.precision = precision

    def forward(self, images: Tensor, targets: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        """One batch of training.

        Args:
            images: (N, 3, S, S) float32.
            targets: (N,) int64, or (N, K) float32 shares of the classes.
            valid: (N,) bool; False is not counted by the meters.

        Returns:
            The mean loss, () float32, and (7,) float64 sums as `counted` gives them.
        """
        with self.precision.autocast():
            logits = self.model(images)
            loss = self.objective(logits, targets)
        return loss, counted(loss.detach(), logits.detach(), targets, valid)

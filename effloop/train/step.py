"""Forward pass and loss: the part of a training step that a parallel strategy may run on several devices."""

from __future__ import annotations

from torch import Tensor, nn

from effloop.precision import Precision
from effloop.task import Task


class Step(nn.Module):
    """Images and targets in, loss and the task's sums out.

    The loss is computed in here, and the model's outputs don't leave it, so that nothing large is gathered where a
    strategy runs copies of it on several devices.

    Args:
        model: (N, 3, S, S) -> (N, K) outputs.
        task: its loss is what is minimised.
        precision: autocast of the forward pass.
    """

    def __init__(self, model: nn.Module, task: Task, precision: Precision) -> None:
        super().__init__()
        self.model = model
        self.task = task
        self.precision = precision

    def forward(self, images: Tensor, targets: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        """One batch of training.

        Args:
            images: (N, 3, S, S) float32.
            targets: (N, ...) as the task wants them, or (N, K) float32 shares of the classes.
            valid: (N,) bool; False is not counted.

        Returns:
            The mean loss, () float32, and (M,) float64 sums as `Task.sums` gives them.
        """
        with self.precision.autocast():
            outputs = self.model(images)
            loss = self.task.loss(outputs, targets)
        return loss, self.task.sums(outputs.detach(), targets, valid, loss.detach())

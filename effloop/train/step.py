"""Forward pass and loss: the part of a training step that a parallel strategy may run on several devices."""

from __future__ import annotations

from torch import Tensor, nn

from effloop.precision import Precision
from effloop.task import Task
from effloop.train.distill import TrainLoss


class Step(nn.Module):
    """Images and targets in, loss and the task's sums out.

    The loss is computed in here, and the model's outputs don't leave it, so that nothing large is gathered where a
    strategy runs copies of it on several devices.

    Args:
        model: (N, 3, H, W) -> (N, K) outputs, or what the task's `heads` takes.
        task: its sums are returned.
        precision: autocast of the forward pass.
        loss: what is minimised; None is the task's loss.
    """

    def __init__(self, model: nn.Module, task: Task, precision: Precision, loss: TrainLoss | None = None) -> None:
        super().__init__()
        self.model = model
        self.loss = loss or TrainLoss(task)
        self.task = task
        self.precision = precision

    def forward(self, images: Tensor, targets: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        """One batch of training.

        Args:
            images: (N, 3, H, W) float32.
            targets: (N, ...) as the task wants them, or (N, K) float32 shares of the classes.
            valid: (N,) bool; False is not counted.

        Returns:
            The mean loss, () float32, and (M,) float64 sums as `Task.sums` gives them.
        """
        with self.precision.autocast():
            outputs = self.model(images)
            loss = self.loss(outputs, targets, images)
        own = self.task.heads(outputs)[0].detach()
        return loss, self.task.sums(self.task.finish(own), targets, valid, loss.detach())

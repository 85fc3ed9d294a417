"""Forward pass and loss, the part of a training step that a parallel strategy replicates."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from effloop.precision import Precision
from effloop.task import Task


class Step(nn.Module):
    """Images and targets in, loss and the task's sums out.

    The loss is computed in here, and the model's outputs don't leave it, so that nothing large is gathered where a
    strategy runs copies of it on several devices.
    """

    def __init__(self, model: nn.Module, task: Task, precision: Precision) -> None:
        super().__init__()
        self.model = model
        self.task = task
        self.precision = precision

    def forward(self, images: Tensor, targets: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        """(N, 3, H, W) float32, targets as the task wants them, (N,) bool -> () float32 mean loss of the batch, and
        (M,) float64 sums of the valid samples, as `Task.sums` gives them.
        """
        with self.precision.autocast():
            outputs = self.model(images)
            loss = self.task.loss(outputs, targets)
        with torch.no_grad():
            own = self.task.scored_outputs(outputs).detach()
        return loss, self.task.sums(own, targets, valid, loss.detach())

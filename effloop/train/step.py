"""Forward pass and loss, the part of a training step that a parallel strategy replicates; distillation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from effloop.batch import ImageSize
from effloop.errors import ConfigError, check_value
from effloop.precision import Precision
from effloop.task import Task

Normalisation = tuple[Sequence[float], Sequence[float]]
"""Mean and std of images, a number for each channel, in units of 0-1."""


@dataclass
class DistillConfig:
    """Distillation (Hinton et al. 2015, "Distilling the knowledge in a neural network").

    Attributes:
        teacher: a run folder or .ckpt file of the same classes, whose model's outputs are learned, too; null is none.
        alpha: share of the teacher in the loss, from 0 to 1.
        temperature: that both models' logits are divided by before they are compared.
    """

    teacher: str | None = None
    alpha: float = 0.5
    temperature: float = 4.0

    def __post_init__(self) -> None:
        if self.teacher is not None and not self.teacher.strip():
            raise ConfigError("distill.teacher: '' is not allowed; set a run folder, a .ckpt file, or null")
        check_value("distill.alpha", self.alpha, 0 <= self.alpha <= 1, "a share from 0 to 1")
        finite = 0 < self.temperature < float("inf")
        check_value("distill.temperature", self.temperature, finite, "a finite number above 0")


class TrainLoss(nn.Module):
    """The task's loss."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.task = task

    def forward(self, outputs: Tensor, targets: Tensor, images: Tensor) -> Tensor:
        """(N, K) outputs of the model, (N, ...) targets, (N, 3, H, W) images that it was given -> () mean loss."""
        del images
        return self.task.loss(outputs, targets)


class DistillationLoss(TrainLoss):
    """The mean of the task's loss and of what the outputs differ from a teacher's, on the same images."""

    def __init__(self, task: Task, teacher: Teacher, config: DistillConfig) -> None:
        super().__init__(task)
        self.teacher = teacher
        self.alpha, self.temperature = config.alpha, config.temperature

    def forward(self, outputs: Tensor, targets: Tensor, images: Tensor) -> Tensor:
        soft = self.task.distillation_loss(outputs, self.teacher(images), self.temperature)
        return (1 - self.alpha) * self.task.loss(outputs, targets) + self.alpha * soft


class Teacher(nn.Module):
    """A trained model that isn't changed: in evaluation mode and without gradients, whatever it is a part of.

    Args:
        model: of normalised images; its parameters are frozen.
        own: mean and std that it was trained with.
        given: mean and std of the images that it will be given.
        size: height and width that it was trained at; images of another size are resized to it.
    """

    scale: Tensor
    offset: Tensor

    def __init__(self, model: nn.Module, own: Normalisation, given: Normalisation, size: ImageSize) -> None:
        super().__init__()
        self.model = model.requires_grad_(False).eval()
        self.size = size
        self.renormalises = [*map(list, own)] != [*map(list, given)]
        # Pixels are given[0] + given[1] * image; in the teacher's units they are image * scale + offset.
        (mean, std), (given_mean, given_std) = (
            (torch.tensor(each, dtype=torch.float64).view(1, -1, 1, 1) for each in pair) for pair in (own, given)
        )
        device = next(model.parameters()).device
        self.register_buffer("scale", (given_std / std).float().to(device))
        self.register_buffer("offset", ((given_mean - mean) / std).float().to(device))

    def train(self, mode: bool = True) -> Self:
        """Nothing changes: a teacher stays in evaluation mode."""
        return self

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        """(N, 3, H, W) images as the student is given them, mixed ones, too -> (N, K) outputs."""
        if (*images.shape[2:],) != self.size:
            images = F.interpolate(images, size=self.size, mode="bilinear", antialias=True)
        if self.renormalises:
            images = torch.addcmul(self.offset, images, self.scale)
        outputs: Tensor = self.model(images)
        return outputs


class Step(nn.Module):
    """Images and targets in, loss and the task's sums out.

    The loss is computed in here, and the model's outputs don't leave it, so that nothing large is gathered where a
    strategy runs copies of it on several devices.
    """

    def __init__(self, model: nn.Module, task: Task, precision: Precision, loss: TrainLoss | None = None) -> None:
        super().__init__()
        self.model = model
        self.loss = loss or TrainLoss(task)
        self.task = task
        self.precision = precision

    def forward(self, images: Tensor, targets: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        """(N, 3, H, W) float32, targets as the task wants them, (N,) bool -> () float32 mean loss of the batch, and
        (M,) float64 sums of the valid samples, as `Task.sums` gives them.
        """
        with self.precision.autocast():
            outputs = self.model(images)
            loss = self.loss(outputs, targets, images)
        with torch.no_grad():
            own = self.task.scored_outputs(outputs).detach()
        return loss, self.task.sums(own, targets, valid, loss.detach())

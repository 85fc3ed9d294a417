"""Segmentation: one class for each pixel."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from effloop.batch import ImageSize
from effloop.errors import ConfigError, DataError
from effloop.registry import choices
from effloop.task.base import Task, TaskConfig, tasks
from effloop.task.confusion import IGNORED, as_matrix, confusion_matrices, pixel_scores, predicted_classes
from effloop.task.details import Details
from effloop.task.kinds import check_kind
from effloop.task.mask_details import of_masks
from effloop.task.meter import LOSS, Meter
from effloop.task.pixel_losses import LOSSES, WEIGHTED, pixel_losses
from effloop.task.sliding import SlidingWindow
from effloop.task.targets import Labelled, TargetSpec
from effloop.task.weights import Counts, check_weights, class_weights, is_weight, weights_of

_SAME = 0.99
"""Share of an image's pixels that two forms of a model have to give the same class."""


@dataclass
class SegmentationConfig(TaskConfig):
    """Fields of `task=segmentation`.

    Attributes:
        loss: cross_entropy, dice, focal or lovasz, or several with what each is multiplied by, e.g.
            {cross_entropy: 1, dice: 0.5}.
        class_weights: of the classes in cross_entropy and focal, as torch.nn.CrossEntropyLoss has them: null, a number
            for each class, or balanced: n / (K n_c) for n_c of n pixels. Scores have no weights.
        gamma: of focal, how much less a pixel counts that is nearly right; 0 is cross_entropy.
        aux_weight: what the losses of auxiliary heads are multiplied by, of models that have them.
        window: height and width, one number or [height, width], of windows that larger images are evaluated in; null is
            the whole image at once.
        stride: from one window to the next, as a share of the window, at most 1.
    """

    loss: Any = "cross_entropy"
    class_weights: Any = None
    gamma: float = 2.0
    aux_weight: float = 0.4
    window: Any = None
    stride: float = 2 / 3

    def __post_init__(self) -> None:
        self.losses  # noqa: B018  refuses what is none
        check_weights("task.class_weights", self.class_weights)
        if self.class_weights is not None and not {*self.losses} & {*WEIGHTED}:
            raise ConfigError(
                f"task.class_weights: {self.class_weights} is for {' and '.join(WEIGHTED)}, not for task.loss="
                f"{self.loss}; set task.class_weights=null"
            )
        for key in ("gamma", "aux_weight"):
            if not 0 <= getattr(self, key) < math.inf:
                raise ConfigError(f"task.{key}: {getattr(self, key)} is not allowed; set a finite number, 0 or above")
        if not 0 < self.stride <= 1:
            raise ConfigError(f"task.stride: {self.stride} is not allowed; set a share above 0, at most 1")
        try:
            self.window_size  # noqa: B018
        except ValueError:
            raise ConfigError(
                f"task.window: {self.window} is not allowed; set a number of pixels, [height,width], or null"
            ) from None

    @property
    def losses(self) -> dict[str, float]:
        """{name: what it is multiplied by}.

        Raises:
            ConfigError: there is no such loss.
        """
        given = self.loss if isinstance(self.loss, Mapping) else {str(self.loss): 1.0}
        for name, factor in given.items():
            if name not in LOSSES:
                raise ConfigError(f"task.loss: no loss '{name}'; {choices(str(name), LOSSES)}")
            if not is_weight(factor):
                raise ConfigError(f"task.loss: {name} times {factor} is not allowed; set a finite number above 0")
        if not given:
            raise ConfigError("task.loss: {} is none; set e.g. task.loss=cross_entropy")
        return {str(name): float(factor) for name, factor in given.items()}

    @property
    def window_size(self) -> ImageSize | None:
        """`window` as height and width.

        Raises:
            ValueError: it is neither.
        """
        return None if self.window is None else ImageSize.of(self.window)


@tasks.register("segmentation", SegmentationConfig)
class Segmentation(Task):
    """One class for each pixel: cross-entropy, focal, Dice and Lovász losses, mean intersection over union."""

    meters = (
        Meter("miou", "mIoU"),
        Meter("accuracy", "Pixel acc"),
        Meter("mean_accuracy", "Mean acc"),
        LOSS,
    )
    spatial: ClassVar[bool] = True
    ensembles: ClassVar[bool] = True
    digits: ClassVar[int | None] = 6
    outputs: ClassVar[str] = "logits of each pixel; their softmax is the classes' probabilities"

    def __init__(self, config: SegmentationConfig) -> None:
        self.config = config
        self.losses = {name: (factor, pixel_losses(config.gamma)[name]) for name, factor in config.losses.items()}
        self.weight: Tensor | None = None
        self.target = TargetSpec((16, 16), torch.uint8)
        self._shape_for(1)

    def _shape_for(self, num_outputs: int) -> None:
        self.num_classes = num_outputs
        self.num_sums = 2 + num_outputs**2

    def num_outputs(self, source: Labelled) -> int:
        check_kind(source, "masks")
        if not 1 < len(source.classes) <= IGNORED:
            raise DataError(
                f"{source.where} has masks of {len(source.classes)} classes; they have 2 to {IGNORED}, the background "
                "among them"
            )
        return len(source.classes)

    def for_outputs(self, num_outputs: int) -> Self:
        task = super().for_outputs(num_outputs)
        task._shape_for(num_outputs)
        return task

    def for_size(self, height: int, width: int) -> Self:
        task = copy.copy(self)
        task.target = TargetSpec((height, width), torch.uint8)
        return task

    def fitted(self, source: Labelled, counts: Counts) -> Self:
        if self.config.class_weights is None:
            return self
        task = copy.copy(self)
        key, balanced = "task.class_weights", lambda: class_weights(counts())
        task.weight = weights_of(key, self.config.class_weights, source.classes, balanced)
        return task

    def heads(self, outputs: Tensor | Mapping[str, Tensor]) -> list[Tensor]:
        """Logits, or `out` and those of auxiliary heads by their names, as torchvision's networks give them."""
        if isinstance(outputs, Tensor):
            return [outputs]
        return [outputs["out"], *(each for name, each in outputs.items() if name != "out")]

    def loss(self, outputs: Tensor | Mapping[str, Tensor], targets: Tensor) -> Tensor:
        """(N, K, H, W) logits, or those of several `heads`; (N, H, W) uint8 -> () loss of a training batch.

        It is that of the model's own outputs, and `aux_weight` times those of its auxiliary heads. A batch in which no
        pixel counts has 0.
        """
        weight = None if self.weight is None else self.weight.to(targets.device)  # of replicas on several devices
        heads = self.heads(outputs)
        losses = [self._losses(head, targets, weight, batch=True)[0] for head in heads]
        return losses[0] + self.config.aux_weight * sum(losses[1:]) if len(losses) > 1 else losses[0]

    def _losses(self, logits: Tensor, masks: Tensor, weight: Tensor | None = None, *, batch: bool) -> Tensor:
        """(1,) of a batch, or (N,) of each image."""
        found = [factor * loss(logits, masks, weight, batch=batch) for factor, loss in self.losses.values()]
        return torch.stack(found).sum(0) if len(found) > 1 else found[0]

    @torch.no_grad()
    def sums(self, outputs: Tensor, targets: Tensor, valid: Tensor, loss: Tensor | None = None) -> Tensor:
        """A batch's loss, images with a pixel that counts, and the confusion matrix: (2 + K * K,) float64, on the
        device.

        Args:
            outputs: (N, K, H, W) logits.
            targets: (N, H, W) uint8.
            valid: (N,) bool; False is not counted.
            loss: () the batch's; None computes each image's own, without weights.
        """
        masks = targets.masked_fill(~valid.view(-1, 1, 1), IGNORED)
        counts = (masks != IGNORED).flatten(1).any(1)
        losses = self._losses(outputs, masks, batch=False) if loss is None else loss
        total = losses.double().expand(len(valid)).masked_fill(~counts, 0).sum()
        confusion = confusion_matrices(predicted_classes(outputs), masks, outputs.shape[1]).sum(0)
        return torch.cat([torch.stack([total, counts.sum().double()]), confusion.flatten().double()])

    def scores(self, sums: Sequence[float], since: Sequence[float] | None = None) -> dict[str, float]:
        loss, images, *cells = np.subtract(sums, since).tolist() if since else sums
        return {"loss": loss / images if images else math.nan, **pixel_scores(as_matrix(cells))}

    @torch.no_grad()
    def facts(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Pixels of each class that are right, that there are, and that are predicted: (N, 3 K) float32, exact up to
        2**24 of them.
        """
        found = confusion_matrices(predicted_classes(outputs), targets, outputs.shape[1])
        columns = [found.diagonal(dim1=1, dim2=2), found.sum(2), found.sum(1)]
        return torch.cat(columns, dim=1).float()

    def details(
        self,
        facts: NDArray[np.float32],
        targets: NDArray[Any],
        names: Sequence[str],
        sums: Sequence[float] = (),
    ) -> Details:
        return of_masks(as_matrix(sums[2:]).astype(np.int64) if len(sums) else None, facts, names)

    def finished(self, model: nn.Module) -> nn.Module:
        size = self.config.window_size
        return SlidingWindow(model, size, self.config.stride) if size else model

    def bare(self, finished: nn.Module) -> nn.Module:
        return finished.model if isinstance(finished, SlidingWindow) else finished

    def bare_size(self, size: ImageSize) -> ImageSize:
        return ImageSize(*map(min, size, self.config.window_size or size))

    def predictions(
        self, outputs: Tensor, classes: Sequence[str], top: int = 1, *, every: bool = False
    ) -> dict[str, NDArray[np.float32] | list[str]]:
        """`share_NAME`, the share of an image's pixels that each class has."""
        predicted = predicted_classes(outputs).flatten(1)
        counts = predicted.new_zeros(len(predicted), len(classes))
        counts.scatter_add_(1, predicted, torch.ones_like(predicted))
        shares = (counts.cpu().numpy() / predicted.shape[1]).astype(np.float32)
        return {f"share_{name}": shares[:, label] for label, name in enumerate(classes)}

    def ensemble(self, outputs: Sequence[Tensor]) -> Tensor:
        """Logits of several views -> logarithms of the mean probabilities of each pixel, (N, K, H, W) float32."""
        views = torch.stack([each.float().log_softmax(dim=1) for each in outputs])
        return views.logsumexp(dim=0) - math.log(len(outputs))

    def agreement(self, outputs: Tensor, expected: Tensor) -> Tensor:
        """(N, K, H, W) logits twice -> (N,) bool, whether 99 % of an image's pixels have the same class."""
        same = predicted_classes(outputs) == predicted_classes(expected)
        return same.flatten(1).float().mean(dim=1) >= _SAME

    def example_targets(self, batch_size: int, num_outputs: int, device: torch.device) -> Tensor:
        """(N, H, W) uint8 classes."""
        shape = (batch_size, *self.target.shape)
        return torch.randint(num_outputs, shape, device=device, dtype=torch.uint8)

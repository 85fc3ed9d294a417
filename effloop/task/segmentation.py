"""Segmentation: one class for each pixel."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from effloop.batch import ImageSize
from effloop.errors import ConfigError, DataError, check_value
from effloop.lazy import F, Tensor, nn, no_grad, torch
from effloop.registry import choices
from effloop.task import base
from effloop.task.details import Details, of_masks

_SAME = 0.99  # share of an image's pixels that two forms of a model have to give the same class


@dataclass
class SegmentationConfig(base.TaskConfig):
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
        base.check_weights("task.class_weights", self.class_weights)
        if self.class_weights is not None and not {*self.losses} & {*WEIGHTED}:
            raise ConfigError(
                f"task.class_weights: {self.class_weights} is for {' and '.join(WEIGHTED)}, not for task.loss="
                f"{self.loss}; set task.class_weights=null"
            )
        for key in ("gamma", "aux_weight"):
            value = getattr(self, key)
            check_value(f"task.{key}", value, 0 <= value < math.inf, "a finite number, 0 or above")
        check_value("task.stride", self.stride, 0 < self.stride <= 1, "a share above 0, at most 1")
        try:
            self.window_size  # noqa: B018
        except ValueError:
            raise ConfigError(
                f"task.window: {self.window} is not allowed; set a number of pixels, [height,width], or null"
            ) from None

    @property
    def losses(self) -> dict[str, float]:
        """{name: what it is multiplied by}; a ConfigError if there is no such loss."""
        given = self.loss if isinstance(self.loss, Mapping) else {str(self.loss): 1.0}
        for name, factor in given.items():
            if name not in LOSSES:
                raise ConfigError(f"task.loss: no loss '{name}'; {choices(str(name), LOSSES)}")
            if not base.is_weight(factor):
                raise ConfigError(f"task.loss: {name} times {factor} is not allowed; set a finite number above 0")
        if not given:
            raise ConfigError("task.loss: {} is none; set e.g. task.loss=cross_entropy")
        return {str(name): float(factor) for name, factor in given.items()}

    @property
    def window_size(self) -> ImageSize | None:
        """`window` as height and width; a ValueError if it is neither."""
        return None if self.window is None else ImageSize.of(self.window)


@base.tasks.register("segmentation", SegmentationConfig)
class Segmentation(base.Task):
    """One class for each pixel: cross-entropy, focal, Dice and Lovász losses, mean intersection over union."""

    meters = (
        base.Meter("miou", "mIoU"),
        base.Meter("accuracy", "Pixel acc"),
        base.Meter("mean_accuracy", "Mean acc"),
        base.LOSS,
    )
    spatial: ClassVar[bool] = True
    digits: ClassVar[int | None] = 6
    outputs: ClassVar[str] = "logits of each pixel; their softmax is the classes' probabilities"

    def __init__(self, config: SegmentationConfig) -> None:
        self.config = config
        self.losses = {name: (factor, pixel_losses(config.gamma)[name]) for name, factor in config.losses.items()}
        self.weight: Tensor | None = None
        self.target = base.TargetSpec((16, 16), torch.uint8)
        self._shape_for(1)

    def _shape_for(self, num_outputs: int) -> None:
        self.num_classes = num_outputs
        self.num_sums = 2 + num_outputs**2

    def num_outputs(self, source: base.Labelled) -> int:
        base.check_kind(source, "masks")
        if not 1 < len(source.classes) <= IGNORED:
            raise DataError(
                f"{source.where} has masks of {len(source.classes)} classes; they have 2 to {IGNORED}, the background "
                "among them"
            )
        return len(source.classes)

    def fitted(self, source: base.Labelled, counts: base.Counts) -> Self:
        task, balanced = copy.copy(self), lambda: base.class_weights(counts())
        task.weight = base.weights_of("task.class_weights", self.config.class_weights, source.classes, balanced)
        return task

    def scored_outputs(self, outputs: Tensor | Mapping[str, Tensor]) -> Tensor:
        """Logits, or the `out` of torchvision's networks, which give a dict with those of auxiliary heads."""
        return outputs if isinstance(outputs, torch.Tensor) else outputs["out"]

    def loss(self, outputs: Tensor | Mapping[str, Tensor], targets: Tensor) -> Tensor:
        """(N, K, H, W) logits, or a dict of them; (N, H, W) uint8 -> () loss of a training batch, 0 without a pixel."""
        weight = None if self.weight is None else self.weight.to(targets.device)  # of replicas on several devices
        own = self._losses(self.scored_outputs(outputs), targets, weight, batch=True)[0]
        if isinstance(outputs, torch.Tensor):
            return own
        others = (logits for name, logits in outputs.items() if name != "out")
        return own + self.config.aux_weight * sum(self._losses(each, targets, weight, batch=True)[0] for each in others)

    def _losses(self, logits: Tensor, masks: Tensor, weight: Tensor | None = None, *, batch: bool) -> Tensor:
        """(1,) of a batch, or (N,) of each image."""
        found = [factor * loss(logits, masks, weight, batch=batch) for factor, loss in self.losses.values()]
        return torch.stack(found).sum(0) if len(found) > 1 else found[0]

    @no_grad
    def sums(self, outputs: Tensor, targets: Tensor, valid: Tensor, loss: Tensor | None = None) -> Tensor:
        """A batch's loss, images with a pixel that counts, and the confusion matrix: (2 + K * K,) float64."""
        masks = targets.masked_fill(~valid.view(-1, 1, 1), IGNORED)
        counts = (masks != IGNORED).flatten(1).any(1)
        losses = self._losses(outputs, masks, batch=False) if loss is None else loss
        total = losses.double().expand(len(valid)).masked_fill(~counts, 0).sum()
        confusion = confusion_matrices(predicted_classes(outputs), masks, outputs.shape[1]).sum(0)
        return torch.cat([torch.stack([total, counts.sum().double()]), confusion.flatten().double()])

    def scores(self, sums: Sequence[float]) -> dict[str, float]:
        loss, images, *cells = sums
        return {"loss": loss / images if images else math.nan, **pixel_scores(_as_matrix(cells))}

    @no_grad
    def facts(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Pixels of each class that are right, that there are, and that are predicted: (N, 3 K) float32."""
        found = confusion_matrices(predicted_classes(outputs), targets, outputs.shape[1])
        columns = [found.diagonal(dim1=1, dim2=2), found.sum(2), found.sum(1)]
        return torch.cat(columns, dim=1).float()

    def details(
        self, facts: NDArray[np.float32], targets: NDArray[Any], names: Sequence[str], sums: Sequence[float] = ()
    ) -> Details:
        return of_masks(_as_matrix(sums[2:]).astype(np.int64) if len(sums) else None, facts, names)

    def with_output_transform(self, model: nn.Module) -> nn.Module:
        size = self.config.window_size
        from effloop.task.outputs import SlidingWindow

        return SlidingWindow(model, size, self.config.stride) if size else model

    def ensemble(self, outputs: Sequence[Tensor]) -> Tensor:
        return base.mean_of_views(outputs)

    def agreement(self, outputs: Tensor, expected: Tensor) -> Tensor:
        """Whether 99 % of an image's pixels have the same class."""
        same = predicted_classes(outputs) == predicted_classes(expected)
        return same.flatten(1).float().mean(dim=1) >= _SAME

    def example_targets(self, batch_size: int, num_outputs: int, device: torch.device) -> Tensor:
        shape = (batch_size, *self.target.shape)
        return torch.randint(num_outputs, shape, device=device, dtype=torch.uint8)


IGNORED = 255  # the value in a mask of pixels that aren't counted


def predicted_classes(logits: Tensor) -> Tensor:
    """(N, K, H, W) -> (N, H, W) int64, the class with the largest logit."""
    if logits.device.type == "cpu":  # there argmax takes 25 ms of (16, 2, 128, 128), and 2 of channels_last
        logits = logits.contiguous(memory_format=torch.channels_last)
    return logits.argmax(dim=1)


def confusion_matrices(predicted: Tensor, masks: Tensor, num_classes: int) -> Tensor:
    """(N, H, W) int64 classes, (N, H, W) uint8 classes or IGNORED -> (N, K, K) int64 on the device, without a wait: of
    each image the pixels of each class, in rows, by what they are taken for, in columns.
    """
    count, cells = len(masks), num_classes**2
    images = torch.arange(count, device=masks.device).view(-1, 1, 1) * cells
    places = images + masks.long() * num_classes + predicted
    found = _histogram(places, masks == IGNORED, count * cells)
    return found.view(count, num_classes, num_classes)


def _histogram(places: Tensor, ignored: Tensor, bins: int) -> Tensor:
    """Counts of 0 to bins - 1, (bins,) int64."""
    # `bincount` asks a GPU how large the result is, and `histc` doesn't; it takes no integers on a CPU, where adding up
    # is as quick. There is one for each image, so that few threads add to the same number at once.
    if places.is_cuda:  # what is above the maximum isn't counted, and the maximum itself is in the last bin
        return places.masked_fill(ignored, bins + 1).flatten().histc(bins, 0, bins)
    places = places.masked_fill(ignored, bins).flatten()
    return places.new_zeros(bins + 1).scatter_add_(0, places, torch.ones_like(places))[:bins]


def _as_matrix(sums: Sequence[float]) -> NDArray[np.float64]:
    side = round(len(sums) ** 0.5)
    return np.asarray(sums, np.float64).reshape(side, side)


def pixel_scores(confusion: NDArray[np.float64]) -> dict[str, float]:
    """(K, K) -> `miou`, `accuracy` and `mean_accuracy`: means over the classes that have one, NaN without pixels."""
    hits, targets, predicted = np.diagonal(confusion), confusion.sum(1), confusion.sum(0)
    return {
        "miou": _mean_share(hits, targets + predicted - hits),
        "accuracy": _mean_share(hits.sum(keepdims=True), confusion.sum(keepdims=True)[0]),
        "mean_accuracy": _mean_share(hits, targets),
    }


def _mean_share(part: NDArray[np.float64], whole: NDArray[np.float64]) -> float:
    """The mean of the shares of what isn't nothing; NaN if all is."""
    known = whole > 0
    return float((part[known] / whole[known]).mean()) if known.any() else math.nan


# Losses take logits (N, K, H, W), masks (N, H, W) uint8 with IGNORED where a pixel isn't counted, and weights of the
# classes (K,) or None. With `batch` they give (1,), the loss of all pixels together, without it (N,), one for each
# image; where no pixel counts it is 0, with gradients of 0. Nothing waits for the device.

PixelLoss = Callable[..., Tensor]


def cross_entropy(logits: Tensor, masks: Tensor, weight: Tensor | None = None, *, batch: bool) -> Tensor:
    """The mean over pixels, by the weights of their classes, as torch.nn.CrossEntropyLoss with `ignore_index`."""
    losses = F.cross_entropy(logits.float(), masks.long(), weight, ignore_index=IGNORED, reduction="none")
    return _mean(losses, masks, weight, batch=batch)


def focal(logits: Tensor, masks: Tensor, weight: Tensor | None = None, *, batch: bool, gamma: float) -> Tensor:
    """The focal loss of the classes' softmax (Lin et al. 2017, "Focal loss for dense object detection"):
    -(1 - p)^gamma log p of the pixel's class, the mean over pixels by the weights of their classes.
    """
    losses = F.cross_entropy(logits.float(), masks.long(), ignore_index=IGNORED, reduction="none")
    tiny = torch.finfo(losses.dtype).tiny  # the derivative of 0^gamma is infinite for some
    losses = (-torch.expm1(-losses)).clamp(min=tiny) ** gamma * losses
    if weight is not None:
        losses = losses * _weights(masks, weight)
    return _mean(losses, masks, weight, batch=batch)


def dice(logits: Tensor, masks: Tensor, weight: Tensor | None = None, *, batch: bool) -> Tensor:
    """1 - 2 sum(p g) / (sum(p) + sum(g)) of each class, with probabilities p and g 1 in the class and 0 elsewhere; the
    mean over classes that have a pixel (Milletari et al. 2016, "V-Net", without squares). Weights aren't used.
    """
    probabilities = logits.float().softmax(dim=1) * (masks != IGNORED)[:, None]
    has = masks[:, None] == torch.arange(logits.shape[1], device=masks.device, dtype=masks.dtype).view(1, -1, 1, 1)
    hits, predicted, targets = ((each.sum((2, 3))) for each in (probabilities * has, probabilities, has))
    if batch:
        hits, predicted, targets = (each.sum(0, keepdim=True) for each in (hits, predicted, targets))
    losses = 1 - 2 * hits / (predicted + targets).clamp(min=1)
    return _mean_of_present(losses, targets)


def lovasz(logits: Tensor, masks: Tensor, weight: Tensor | None = None, *, batch: bool) -> Tensor:
    """The Lovász-Softmax loss, the convex extension of 1 - IoU of each class to probabilities; the mean over classes
    that have a pixel (Berman et al. 2018, "The Lovász-Softmax loss"). Weights aren't used.
    """
    probabilities = logits.float().softmax(dim=1).flatten(2).transpose(0, 1)  # (K, N, pixels)
    pixels = masks.flatten(1)
    if batch:
        probabilities, pixels = probabilities.flatten(1)[:, None], pixels.flatten()[None]
    ignored = pixels == IGNORED
    losses, targets = [], []
    for label, probability in enumerate(probabilities):  # one class at a time: sorting takes five times its memory
        has = pixels == label
        errors = (has.float() - probability).abs().masked_fill(ignored, 0)
        losses.append((errors * _lovasz_weights(errors.detach(), has, ignored)).sum(1))
        targets.append(has.sum(1))
    return _mean_of_present(torch.stack(losses, 1), torch.stack(targets, 1))


@no_grad
def _lovasz_weights(errors: Tensor, has: Tensor, ignored: Tensor) -> Tensor:
    """By how much 1 - IoU grows if, after all pixels with a larger error, this one is wrong, too, (G, P)."""
    # 1 / (n + b) of a pixel of the class, with n of them and b other pixels before, (n - f) / ((n + b) (n + b + 1)) of
    # another, with f pixels of the class before. The authors subtract two values of 1 - IoU: few digits in float32.
    order = errors.masked_fill(ignored, -1).argsort(dim=1, descending=True, stable=True)
    first = has.gather(1, order)
    number = has.sum(1, keepdim=True)
    hits = first.cumsum(1)
    union = number + (~first).cumsum(1)
    grown = torch.where(first, 1 / union, (number - hits) / union / (union - 1).clamp(min=1))
    return torch.empty_like(errors).scatter_(1, order, grown.to(errors.dtype))


def pixel_losses(gamma: float) -> dict[str, PixelLoss]:
    """{name: loss}; `gamma` is the focal loss's."""
    return {"cross_entropy": cross_entropy, "dice": dice, "focal": partial(focal, gamma=gamma), "lovasz": lovasz}


LOSSES = tuple(pixel_losses(0))  # their names

WEIGHTED = ("cross_entropy", "focal")  # those that have weights of the classes


def _weights(masks: Tensor, weight: Tensor) -> Tensor:
    """(N, H, W) float32 weights of the pixels, 0 where they are ignored."""
    return F.pad(weight, (0, IGNORED + 1 - len(weight)))[masks.long()]


def _mean(losses: Tensor, masks: Tensor, weight: Tensor | None, *, batch: bool) -> Tensor:
    """(N, H, W) losses times weights, 0 where ignored -> their sum over the sum of the weights."""
    weights = masks != IGNORED if weight is None else _weights(masks, weight)
    total, whole = losses.flatten(1).sum(1), weights.flatten(1).sum(1)
    if batch:
        total, whole = total.sum(0, keepdim=True), whole.sum(0, keepdim=True)
    return total / torch.where(whole > 0, whole, 1)


def _mean_of_present(losses: Tensor, targets: Tensor) -> Tensor:
    """(G, K) losses and pixels of the classes -> (G,) means over classes that have pixels."""
    present = targets > 0
    return (losses * present).sum(1) / present.sum(1).clamp(min=1)

"""Losses of pixels: cross-entropy, focal, Dice and Lovász-Softmax, of a whole batch or of each image by itself.

Each takes logits (N, K, H, W), masks (N, H, W) uint8 with IGNORED where a pixel isn't counted, and weights of the
classes (K,) or None. With `batch` it gives (1,), the loss of all pixels together, and without it (N,), one for each
image; of none that count it is 0, with gradients of 0. Nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from effloop.task.confusion import IGNORED

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
    del weight
    probabilities = logits.float().softmax(dim=1) * (masks != IGNORED)[:, None]
    has = _one_hot(masks, logits.shape[1])
    hits, predicted, targets = ((each.sum((2, 3))) for each in (probabilities * has, probabilities, has))
    if batch:
        hits, predicted, targets = (each.sum(0, keepdim=True) for each in (hits, predicted, targets))
    losses = 1 - 2 * hits / (predicted + targets).clamp(min=1)
    return _mean_of_present(losses, targets)


def lovasz(logits: Tensor, masks: Tensor, weight: Tensor | None = None, *, batch: bool) -> Tensor:
    """The Lovász-Softmax loss, the convex extension of 1 - IoU of each class to probabilities; the mean over classes
    that have a pixel (Berman et al. 2018, "The Lovász-Softmax loss"). Weights aren't used.
    """
    del weight
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


@torch.no_grad()
def _lovasz_weights(errors: Tensor, has: Tensor, ignored: Tensor) -> Tensor:
    """By how much each pixel's error counts, (G, P): by how much 1 - IoU grows if, after all pixels with a larger
    error, this one is wrong, too.

    That is 1 / (n + b) of a pixel of the class, with n of them and b other pixels before, and (n - f) / ((n + b) (n + b
    + 1)) of another one, with f pixels of the class before it. The authors subtract two values of 1 - IoU, which in
    float32 leaves few digits of very many pixels.
    """
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


LOSSES = tuple(pixel_losses(0))
"""Their names."""

WEIGHTED = ("cross_entropy", "focal")
"""Those that have weights of the classes."""


def _one_hot(masks: Tensor, num_classes: int) -> Tensor:
    """(N, H, W) -> (N, K, H, W) bool."""
    return masks[:, None] == torch.arange(num_classes, device=masks.device, dtype=masks.dtype).view(1, -1, 1, 1)


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

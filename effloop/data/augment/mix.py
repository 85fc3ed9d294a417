"""MixUp and CutMix on the batch's device, each image mixed with its neighbour by its own draw."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from effloop.data.augment.operation import to_device
from effloop.data.random import stream, uniforms
from effloop.lazy import Tensor, torch

_SALT = int.from_bytes(b"mixing")  # longer than the operations' salts of 32 bits, so that none is equal


@dataclass(frozen=True, slots=True)
class MixDraws:
    """What was drawn for a batch of N images."""

    cut: NDArray[np.bool_]  # (N,) bool, True for CutMix, False for MixUp
    # (N,) float64 from 0 to 1, how much of an image stays: its weight, or the area outside its box
    shares: NDArray[np.float64]
    boxes: NDArray[np.int64]  # (N, 4) int64: left, top, right, bottom of the box from the other image; empty for MixUp


class Mix:
    """MixUp and CutMix of a batch, with the image before it in the batch (the first one with the last).

    With both above 0 each image gets one of them, with probability 1/2. Each image has its own share and box, from
    its own key and with the distributions of torchvision's `MixUp` and `CutMix`, which draw one for the whole batch.

    Args:
        mixup: alpha of MixUp's Beta(alpha, alpha) distribution (Zhang et al. 2018, "mixup: Beyond empirical risk
            minimization"); 0 is off.
        cutmix: alpha of CutMix's (Yun et al. 2019, "CutMix: Regularization strategy to train strong
            classifiers with localizable features"); 0 is off. With both off, batches are unchanged.
        num_classes: K.
    """

    def __init__(self, mixup: float, cutmix: float, num_classes: int) -> None:
        self.mixup = mixup
        self.cutmix = cutmix
        self.num_classes = num_classes

    @property
    def on(self) -> bool:
        """Whether anything is mixed."""
        return bool(self.mixup or self.cutmix)

    def __call__(self, images: Tensor, targets: Tensor, keys: NDArray[np.uint64]) -> tuple[Tensor, Tensor]:
        """Mix a batch on its device, without a sync.

        Args:
            images: (N, 3, H, W) float32, or uint8, which is rounded; as what is returned.
            targets: (N,) int64 class indices, which become (N, K) float32 probabilities; or (N, K) float32 flags or
                numbers.
            keys: (N,) uint64, the samples' keys, on the host.
        """
        if not self.on:
            return images, targets
        draws = self.draw(keys, images.shape[2], images.shape[3])
        shares = to_device(draws.shares.astype(np.float32)[:, None], images)
        if targets.ndim == 1:
            targets = (targets[:, None] == torch.arange(self.num_classes, device=targets.device)).to(torch.float32)
        pixels = images.to(torch.float32)
        pixels = _blend_boxes(pixels, draws) if self.cutmix else _blend(pixels, shares[:, :, None, None])
        return pixels if pixels.dtype == images.dtype else pixels.round_().to(images.dtype), _blend(targets, shares)

    def draw(self, keys: NDArray[np.uint64], height: int, width: int) -> MixDraws:
        """Draw for (N,) keys of images of one size; row i depends on keys[i] alone."""
        # Contiguous, as NumPy may use other loops, with other last bits, for strided arrays.
        numbers = np.ascontiguousarray(uniforms(stream(keys, _SALT), 5).T)
        cut = numbers[0] < (0.5 if self.mixup and self.cutmix else float(self.cutmix > 0))
        shares = symmetric_beta(np.where(cut, self.cutmix, self.mixup), numbers[1:3])
        boxes = np.where(cut[:, None], cut_boxes(shares, numbers[3:], height, width), 0)
        areas = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
        return MixDraws(cut, np.where(cut, 1 - areas / (height * width), shares), boxes)


def symmetric_beta(alphas: NDArray[np.float64], numbers: NDArray[np.float64]) -> NDArray[np.float64]:
    """Draw from Beta(alpha, alpha) without tables or rejection: (N,) alphas and (2, N) numbers in [0, 1) -> (N,).

    If T has Student's t-distribution with 2 alpha degrees of freedom, (1 + T / sqrt(2 alpha + T^2)) / 2 has this one;
    T = sqrt(2 alpha (U^(-1/alpha) - 1)) cos(2 pi V) (Bailey 1994, "Polar generation of random variates with the
    t-distribution").
    """
    with np.errstate(over="ignore"):  # a tiny alpha: all of it at 0 and 1
        log_power = np.log1p(-numbers[0]) / alphas
    power, rest = np.exp(log_power), -np.expm1(log_power)  # U^(1/alpha), which may be 0, and 1 - U^(1/alpha)
    cosine = np.cos(2 * np.pi * numbers[1])
    shares: NDArray[np.float64] = 0.5 + 0.5 * cosine * np.sqrt(rest / (power + rest * cosine**2))
    return shares.clip(0, 1)


def cut_boxes(shares: NDArray[np.float64], numbers: NDArray[np.float64], height: int, width: int) -> NDArray[np.int64]:
    """(N, 4) left, top, right, bottom, distributed as torchvision's CutMix: centred anywhere, clipped at the edges.

    Args:
        shares: (N,) of the area to stay outside, before clipping.
        numbers: (2, N) in [0, 1): x and y of the centre.
        height: of the images.
        width: of the images.
    """
    sides = np.array([[width], [height]])
    half = (0.5 * np.sqrt(1 - shares) * sides).astype(np.int64)
    centre = (numbers * sides).astype(np.int64)
    return np.concatenate([np.maximum(centre - half, 0), np.minimum(centre + half, sides)]).T


def _spans(first: NDArray[np.int64], end: NDArray[np.int64], size: int) -> NDArray[np.bool_]:
    """(N,) and (N,) -> (N, size) bool, True from `first` to before `end`."""
    places = np.arange(size)
    return (places >= first[:, None]) & (places < end[:, None])


def _blend(rows: Tensor, weights: Tensor) -> Tensor:
    """Each of N rows times its weight, plus the row before times 1 - weight; exact at weights 0 and 1."""
    # `roll` would be one more pass over memory, and loses channels_last on CUDA.
    out = torch.empty_like(rows)
    torch.lerp(rows[:-1], rows[1:], weights[1:], out=out[1:])
    torch.lerp(rows[-1:], rows[:1], weights[:1], out=out[:1])
    return out


def _blend_boxes(images: Tensor, draws: MixDraws) -> Tensor:
    """(N, 3, H, W) float32 -> the same, with a box from the image before, or blended completely for MixUp.

    In two passes, rows and then columns: this needs no mask per pixel, and works on runs of 3 W numbers in
    channels_last, too. (64, 3, 224, 224) takes 6 ms on a core; with masks shared by the channels it took 16.
    """
    left, top, right, bottom = draws.boxes.T
    cut, (count, channels, height, width) = draws.cut[:, None], images.shape
    lines = (cut & ~_spans(top, bottom, height)).astype(np.float32)
    columns = np.where(cut, ~_spans(left, right, width), draws.shares[:, None]).astype(np.float32)
    runs = images
    if images.stride(1) == 1:  # channels_last; of one channel the other format is contiguous as this one, too
        runs = images.permute(0, 2, 3, 1).reshape(count, 1, height, width * channels)
        columns = columns.repeat(channels, axis=1)
    others = _blend(runs, to_device(lines, images)[:, None, :, None])  # the image itself above and below its box
    blended = others.lerp_(runs, to_device(columns, images)[:, None, None, :])
    return blended if runs is images else blended.view(count, height, width, channels).permute(0, 3, 1, 2)

"""MixUp and CutMix on the batch's device: each image mixed by its own draw, or by one of its pair or its batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from effloop.data.augment.base import AugmentConfig, MixMode
from effloop.data.augment.operation import Keys, to_device
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
    """MixUp and CutMix of a batch.

    With `mix=element` each image is mixed with the one before it in the batch (the first one with the last), and has
    its own share and box, from its own key and with the distributions of torchvision's `MixUp` and `CutMix`, which
    draw one for the whole batch. The others are those of timm's `Mixup`, with its distributions: the image at row i is
    mixed with the one at N - 1 - i; a `pair` has one draw, from the key of the one that comes first, and so has a
    `batch`, from that of its first image. (torchvision's is `batch` but for the other image, which is the one before,
    and a box's sides, which are even.)

    Args:
        config: whose `mixup` and `cutmix` are the alphas of Beta(alpha, alpha) (Zhang et al. 2018, "mixup: Beyond
            empirical risk minimization"; Yun et al. 2019, "CutMix: Regularization strategy to train strong classifiers
            with localizable features"). With both off, batches are unchanged.
        num_classes: K.
    """

    def __init__(self, config: AugmentConfig, num_classes: int) -> None:
        self.config = config
        self.num_classes = num_classes

    @property
    def on(self) -> bool:
        """Whether anything is mixed."""
        return bool(self.config.mixup or self.config.cutmix)

    def __call__(self, images: Tensor, targets: Tensor, keys: Keys, epoch: int = 0) -> tuple[Tensor, Tensor]:
        """Mix a batch on its device, without a sync.

        Args:
            images: (N, 3, H, W) float32, or uint8, which is rounded; as what is returned.
            targets: (N,) int64 class indices, which become (N, K) float32 probabilities; or (N, K) float32 flags or
                numbers.
            keys: (N,) uint64, the samples' keys, on the host.
            epoch: counted from 0; once mixing has ended, both are returned as they are.
        """
        end = self.config.mix_epochs
        if not self.on or (end is not None and epoch >= end):
            return images, targets
        draws = self.draw(keys, images.shape[2], images.shape[3])
        shares = to_device(draws.shares.astype(np.float32)[:, None], images)
        if targets.ndim == 1:
            targets = (targets[:, None] == torch.arange(self.num_classes, device=targets.device)).to(torch.float32)
        pixels = images.to(torch.float32)
        flip = self.config.mix is not MixMode.element
        cuts, each = bool(self.config.cutmix), shares[:, :, None, None]
        pixels = _blend_boxes(pixels, draws, flip) if cuts else _blend(pixels, each, flip)
        mixed = pixels if pixels.dtype == images.dtype else pixels.round_().to(images.dtype)
        return mixed, _blend(targets, shares, flip)

    def draw(self, keys: Keys, height: int, width: int) -> MixDraws:
        """Draw for (N,) keys of images of one size; what is drawn from a key depends on it alone."""
        config, rows = self.config, np.arange(len(keys))
        if config.mix is not MixMode.element:
            rows = np.minimum(rows, rows[::-1]) if config.mix is MixMode.pair else 0 * rows
        # Contiguous, as NumPy may use other loops, with other last bits, for strided arrays.
        numbers = np.ascontiguousarray(uniforms(stream(keys[: rows.max(initial=-1) + 1], _SALT), 6).T)
        cut = numbers[0] < (config.cutmix_share if config.mixup and config.cutmix else float(config.cutmix > 0))
        mixed = numbers[5] < config.mix_prob
        shares = np.where(mixed, symmetric_beta(np.where(cut, config.cutmix, config.mixup), numbers[1:3]), 1)
        cut &= mixed
        boxes = cut_boxes(shares, numbers[3:5], height, width, even=config.mix is MixMode.element)
        boxes = np.where(cut[:, None], boxes, 0)
        areas = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
        return MixDraws(cut[rows], np.where(cut, 1 - areas / (height * width), shares)[rows], boxes[rows])


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


def cut_boxes(
    shares: NDArray[np.float64], numbers: NDArray[np.float64], height: int, width: int, *, even: bool = True
) -> NDArray[np.int64]:
    """(N, 4) left, top, right, bottom, distributed as torchvision's CutMix: centred anywhere, clipped at the edges.

    Args:
        shares: (N,) of the area to stay outside, before clipping.
        numbers: (2, N) in [0, 1): x and y of the centre.
        height: of the images.
        width: of the images.
        even: whether sides are, as in torchvision; else they are whole numbers, as in timm.
    """
    sides = np.array([[width], [height]])
    step, centre = 1 + even, (numbers * sides).astype(np.int64)
    length = (np.sqrt(1 - shares) * sides / step).astype(np.int64) * step
    return np.concatenate([np.maximum(centre - length // 2, 0), np.minimum(centre + (length + 1) // 2, sides)]).T


def _spans(first: NDArray[np.int64], end: NDArray[np.int64], size: int) -> NDArray[np.bool_]:
    """(N,) and (N,) -> (N, size) bool, True from `first` to before `end`."""
    places = np.arange(size)
    return (places >= first[:, None]) & (places < end[:, None])


def _blend(rows: Tensor, weights: Tensor, flip: bool) -> Tensor:
    """Each of N rows times its weight, plus another times 1 - weight, exact at 0 and 1: the one before, or `flip`'s."""
    out = torch.empty_like(rows)
    if flip:
        return torch.lerp(rows.flip(0), rows, weights, out=out)
    # `roll` would be one more pass over memory, and loses channels_last on CUDA.
    torch.lerp(rows[:-1], rows[1:], weights[1:], out=out[1:])
    torch.lerp(rows[-1:], rows[:1], weights[:1], out=out[:1])
    return out


def _blend_boxes(images: Tensor, draws: MixDraws, flip: bool) -> Tensor:
    """(N, 3, H, W) float32 -> the same, with a box from the other image, or blended completely for MixUp.

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
    others = _blend(runs, to_device(lines, images)[:, None, :, None], flip)  # the image itself above and below its box
    blended = others.lerp_(runs, to_device(columns, images)[:, None, None, :])
    return blended if runs is images else blended.view(count, height, width, channels).permute(0, 3, 1, 2)

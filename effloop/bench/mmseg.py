"""mmsegmentation's transforms for training, written from their definitions, with NumPy and OpenCV as there.

RandomResize with keep_ratio, RandomCrop with cat_max_ratio, RandomFlip, PhotoMetricDistortion, Pad and PackSegInputs of
mmsegmentation 1.2 and mmcv 2.1. Images are RGB from the decoder on, which there costs a copy on the device.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from effloop.bench.baselines import ScaleCrop, Workload
from effloop.data.image.mask import IGNORED

_ATTEMPTS = 10
"""Crops of RandomCrop that are looked at."""

Pixels = NDArray[np.uint8]
"""(H, W, 3) RGB, or (H, W) classes."""


@dataclass(frozen=True)
class Mmseg:
    """The transforms, in their order.

    Attributes:
        size: height and width of the crop.
        crop: random scale and crop.
        jitters: {brightness, contrast, saturation or hue: how far it is changed} by PhotoMetricDistortion.
        scale: mean and standard deviation of the levels, (3, 1, 1) each, by which images are normalised; None: uint8.
    """

    size: tuple[int, int]
    crop: ScaleCrop
    jitters: Mapping[str, float]
    scale: tuple[Tensor, Tensor] | None

    @classmethod
    def of(cls, workload: Workload) -> Self:
        """Those for a recipe with RandomScaleCrop."""
        crop = workload.scale_crop
        assert crop is not None
        size, mean, std = workload.config.size, workload.mean, workload.std
        scale = None if mean is None or std is None else (_levels(mean), _levels(std))
        return cls((size.height, size.width), crop, workload.jitters, scale)

    def __call__(self, image: Pixels, mask: Pixels) -> tuple[Tensor, Tensor]:
        """(H, W, 3) and (H, W) of any size -> (3, h, w) uint8 or float32, and (h, w) int64."""
        image, mask = self._resized(image, mask)
        image, mask = self._cropped(image, mask)
        if random.random() < 0.5:
            image, mask = np.flip(image, axis=1), np.flip(mask, axis=1)
        image = self._distorted(image)
        image, mask = self._padded(image, mask)
        packed = torch.from_numpy(np.ascontiguousarray(image.transpose(2, 0, 1)))
        if self.scale:
            packed = (packed.float() - self.scale[0]) / self.scale[1]
        return packed, torch.from_numpy(mask.astype(np.int64))

    def _resized(self, image: Pixels, mask: Pixels) -> tuple[Pixels, Pixels]:
        import cv2

        low, high = self.crop.shorter
        height, width = image.shape[:2]
        factor = int(random.uniform(low, high)) / min(height, width)
        size = int(width * factor + 0.5), int(height * factor + 0.5)
        wide: Any = cv2.resize(image, size, interpolation=cv2.INTER_LINEAR)
        return wide, np.asarray(cv2.resize(mask, size, interpolation=cv2.INTER_NEAREST))

    def _cropped(self, image: Pixels, mask: Pixels) -> tuple[Pixels, Pixels]:
        box = self._box(mask)
        if self.crop.cat_max_ratio < 1:
            for _ in range(_ATTEMPTS):
                classes, counts = np.unique(mask[box], return_counts=True)
                counts = counts[classes != IGNORED]
                if len(counts) > 1 and counts.max() / counts.sum() < self.crop.cat_max_ratio:
                    break
                box = self._box(mask)
        return image[box], mask[box]

    def _box(self, mask: Pixels) -> tuple[slice, slice]:
        corner = [random.randint(0, max(0, have - want)) for have, want in zip(mask.shape, self.size, strict=True)]
        top, left = (slice(start, start + side) for start, side in zip(corner, self.size, strict=True))
        return top, left

    def _distorted(self, image: Pixels) -> Pixels:
        """PhotoMetricDistortion: each with probability 0.5, contrast before or after saturation and hue."""
        order = ["brightness", "saturation", "hue"]
        order.insert(random.choice((1, 3)), "contrast")
        for key in order:
            if key in self.jitters and random.getrandbits(1):
                image = _changed(image, key, random.uniform(-self.jitters[key], self.jitters[key]))
        return image

    def _padded(self, image: Pixels, mask: Pixels) -> tuple[Pixels, Pixels]:
        import cv2

        below, right = (max(0, want - have) for want, have in zip(self.size, mask.shape, strict=True))
        if not below and not right:
            return image, mask
        wide: Any = cv2.copyMakeBorder(image, 0, below, 0, right, cv2.BORDER_CONSTANT, value=(0, 0, 0))
        return wide, np.asarray(cv2.copyMakeBorder(mask, 0, below, 0, right, cv2.BORDER_CONSTANT, value=IGNORED))


def _levels(shares: list[float]) -> Tensor:
    """Of 0 to 1 for each channel -> (3, 1, 1) of 0 to 255."""
    return 255 * torch.tensor(shares).view(3, 1, 1)


def _changed(image: Pixels, key: str, far: float) -> Pixels:
    """Brightness, contrast, saturation or hue changed: by a share of 255, of itself or of the circle."""
    import cv2

    if key == "brightness":
        return _linear(image, beta=255 * far)
    if key == "contrast":
        return _linear(image, alpha=1 + far)
    hsv: Any = cv2.cvtColor(image, cv2.COLOR_RGB2HSV)
    if key == "saturation":
        hsv[:, :, 1] = _linear(hsv[:, :, 1], alpha=1 + far)
    else:
        hsv[:, :, 0] = (hsv[:, :, 0].astype(int) + round(180 * far)) % 180  # OpenCV's circle has 180 steps
    return np.asarray(cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB), np.uint8)


def _linear(values: Pixels, alpha: float = 1, beta: float = 0) -> Pixels:
    """Multiplied and added to in float32, cut to 0..255."""
    changed: Pixels = np.clip(values.astype(np.float32) * alpha + beta, 0, 255).astype(np.uint8)
    return changed

"""Masks at their images' own sizes, from outputs at the model's size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from effloop.batch import ImageSize
from effloop.config import Config
from effloop.data.augment.base import Evaluation, RecipeConfig
from effloop.data.prepared import Read, sizes_of
from effloop.data.source import Source
from effloop.errors import ConfigError
from effloop.inference.predict import Predictions, TolerantPlan
from effloop.inference.trained import Trained
from effloop.inference.writers import Columns
from effloop.train.views import ONE_VIEW, Views

Mask = NDArray[np.uint8]
"""(height, width) classes of an image's pixels."""

_AT_ONCE = 1 << 22
"""Numbers of the enlarged outputs that are there at a time: all of them are 7 GB for 150 classes of 12 megapixels."""


def showing_all(config: Config) -> Config:
    """A config by which the model sees the whole of each image: with `augment.eval=crop`, whose centre would leave a
    border without classes, letterboxed, because that keeps the aspect ratio as the crop does.

    Raises:
        ConfigError: the augmentation isn't a recipe, whose geometry isn't known.
    """
    if not isinstance(config.augment, RecipeConfig):
        raise ConfigError(
            f"augment: {config.augment.name} is of a plugin, whose crop can't be undone, and masks have their images' "
            "sizes; choose augment=native"
        )
    if config.augment.eval is not Evaluation.crop:
        return config
    return replace(config, augment=replace(config.augment, eval=Evaluation.letterbox, eval_ratio=1.0))


@dataclass(frozen=True)
class Frame:
    """Where an image lies in the model's input, in pixels.

    Attributes:
        top, left: of its first pixel.
        height, width: that it was resized to.
    """

    top: int
    left: int
    height: int
    width: int

    @classmethod
    def of(cls, how: Evaluation, image: ImageSize, size: ImageSize) -> Frame:
        """That of an image of some size in an input of another one, `letterbox` or `squash`."""
        if how is Evaluation.squash:
            return cls(0, 0, *size)
        scale = min(size.height / image.height, size.width / image.width)
        height, width = max(1, round(image.height * scale)), max(1, round(image.width * scale))
        return cls((size.height - height) // 2, (size.width - width) // 2, height, width)


def mask_of(outputs: Tensor, frame: Frame, image: ImageSize) -> Tensor:
    """The best class of each pixel of an image.

    Outputs are enlarged, or reduced, bilinearly (`align_corners=False`) before the best one is taken, so that borders
    between classes are smooth; some rows at a time.

    Args:
        outputs: (K, H, W) logits at the model's size, on any device; K up to 256.
        frame: the image's part of them.
        image: its size.

    Returns:
        (height, width) uint8, on the outputs' device.
    """
    part = outputs[:, frame.top : frame.top + frame.height, frame.left : frame.left + frame.width].float()
    if tuple(part.shape[1:]) == tuple(image):
        return part.argmax(dim=0).to(torch.uint8)
    mask = torch.empty(image, dtype=torch.uint8, device=outputs.device)
    rows = max(1, _AT_ONCE // (len(part) * max(image.width, frame.width)))
    for start in range(0, image.height, rows):
        stop = min(start + rows, image.height)
        wide = F.interpolate(_rows(part, start, stop, image.height)[None], (stop - start, image.width), mode="bilinear")
        mask[start:stop] = wide[0].argmax(dim=0)
    return mask


def _rows(part: Tensor, start: int, stop: int, height: int) -> Tensor:
    """(K, h, w) -> (K, stop - start, w): some of the rows that resizing to `height` gives."""
    places = torch.arange(start, stop, device=part.device, dtype=torch.float64)
    places = ((places + 0.5) * (part.shape[1] / height) - 0.5).clamp_(0, part.shape[1] - 1)
    above = places.floor().long()
    below = (above + 1).clamp_(max=part.shape[1] - 1)
    return part[:, above].lerp(part[:, below], (places - above).float()[None, :, None])


@dataclass(frozen=True)
class SizedPlan(TolerantPlan):
    """A tolerant plan that notes the images' sizes.

    Attributes:
        sizes: {sample: of the image as decoded}; whoever needs them takes them out.
    """

    sizes: dict[int, ImageSize] = field(default_factory=dict)

    def read(self, ids: NDArray[np.int64]) -> Read:
        found = super().read(ids)
        self.sizes.update(zip(ids.tolist(), (ImageSize(*size) for size in sizes_of(found[1]).tolist()), strict=True))
        return found


@dataclass(frozen=True)
class PredictedMasks:
    """The masks that a model predicts for the samples of a source.

    Attributes:
        predictions: the model, and what is wrong with samples; its images are whole, see `showing_all`.
        plan: of its loader.
        how: the images' place in the model's input.
    """

    predictions: Predictions
    plan: SizedPlan
    how: Evaluation

    @classmethod
    def of(cls, trained: Trained, source: Source, views: Views = ONE_VIEW) -> PredictedMasks:
        """Of all samples of a source.

        Raises:
            ConfigError: the augmentation can't be undone, or the task doesn't allow the views.
        """
        config = showing_all(trained.config)
        assert isinstance(config.augment, RecipeConfig)
        predictions = Predictions.of(replace(trained, config=config), source, views, SizedPlan)
        plan = predictions.loader.plan
        assert isinstance(plan, SizedPlan)
        return cls(predictions, plan, config.augment.eval)

    def batches(self) -> Iterator[tuple[NDArray[np.int64], list[Mask | None]]]:
        """The ids of some samples, in order, and their masks; None for an image that can't be used."""
        for ids, outputs in self.predictions.outputs():
            yield ids, [self._mask(*each) for each in zip(ids.tolist(), outputs, strict=True)]

    def _mask(self, sample: int, outputs: Tensor) -> Mask | None:
        image = self.plan.sizes.pop(sample)
        if sample in self.predictions.problems:
            return None
        frame = Frame.of(self.how, image, ImageSize(*outputs.shape[1:]))
        mask: Mask = mask_of(outputs, frame, image).cpu().numpy()
        return mask

    def image(self, sample: int) -> NDArray[np.uint8]:
        """(height, width, 3) uint8 RGB, the image of a mask."""
        pixels = self.plan.decoder.decode(self.plan.source.read(sample))
        return np.broadcast_to(pixels, (*pixels.shape[:2], 3))


def shares(masks: Sequence[Mask | None], num_classes: int) -> NDArray[np.float32]:
    """(N, num_classes) float32, each class's share of each image's pixels; NaN where there is no mask."""
    found = np.full((len(masks), num_classes), np.nan, np.float32)
    for row, mask in zip(found, masks, strict=True):
        if mask is not None:
            row[:] = np.bincount(mask.ravel(), minlength=num_classes)[:num_classes] / mask.size
    return found


def share_columns(masks: Sequence[Mask | None], names: Sequence[str]) -> Columns:
    """A column `share_NAME` for each class."""
    found = shares(masks, len(names))
    return {f"share_{name}": column for name, column in zip(names, found.T, strict=True)}

"""Recipes of torchvision's operations."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from effloop.batch import ImageSize
from effloop.data.augment import recipe
from effloop.data.augment.base import Augment, RecipeConfig, augments
from effloop.data.augment.framing import Image, Sizes
from effloop.data.augment.library import LibraryAugment
from effloop.data.augment.native.augment import for_evaluation
from effloop.data.augment.operation import Keys
from effloop.data.augment.outcomes import choice_sizes, observed_sizes, sequential_sizes, shuffled_sizes
from effloop.data.augment.torchvision.operations import (
    IMAGES_ALONE,
    LEAVES_MASKS,
    always,
    as_mask,
    from_mask,
    names_in,
    operations,
)
from effloop.data.augment.torchvision.seeded import seeded
from effloop.data.image.grey import batch_to_grey, batch_to_rgb
from effloop.data.image.nearest import Mask
from effloop.data.image.resize import readable
from effloop.errors import ConfigError


@dataclass
class TorchvisionConfig(RecipeConfig):
    """Fields of `augment=torchvision`; `op` is the name of a class of torchvision.transforms.v2."""


@augments.register("torchvision", TorchvisionConfig)
def torchvision(config: TorchvisionConfig, *, size: ImageSize, train: bool, channels: int = 3) -> Augment:
    """Operations of torchvision, on the host or, image by image, on the device."""
    if not train:
        return for_evaluation(config, size, channels)
    library = importlib.import_module("torchvision.transforms.v2")
    steps = recipe.build_steps(config, operations(library, size), size)
    return TorchvisionAugment(steps, config, size, channels)


class TorchvisionAugment(LibraryAugment[Any]):
    """torchvision's operations, one image at a time, on views: nothing is copied except by torchvision."""

    def is_crop(self, op: Any) -> bool:
        return type(op).__name__ == "RandomResizedCrop"

    def box(self, op: Any, key: int, height: int, width: int) -> tuple[int, int, int, int]:
        image = torch.empty(1).expand(3, height, width)  # has a size, but no pixels
        with seeded(key):
            found = op.make_params([image])
        return found["top"], found["left"], found["height"], found["width"]

    def resize(self, op: Any, region: Image) -> Image:
        height, width = region.shape[:2]
        with seeded(0):  # it draws nothing
            return _image(op.transform(_tensor(region), {"top": 0, "left": 0, "height": height, "width": width}))

    def run(self, op: Any, key: int, image: Image) -> Image:
        with seeded(key):
            return _image(op(_tensor(image)))

    def with_masks(self) -> Augment:
        for step in [*self.host, *self.device]:
            if name := next((each for each in names_in(step.op) if each in IMAGES_ALONE), None):
                raise ConfigError(
                    f"{step.where}: torchvision's {name} can't be applied to masks; leave it out, or set "
                    "augment=native_rand"
                )
        return self

    def resize_mask(self, op: Any, mask: Mask) -> Mask:
        height, width = mask.shape
        with seeded(0):
            return _values(op.transform(as_mask(mask), {"top": 0, "left": 0, "height": height, "width": width}))

    def run_with_mask(self, op: Any, key: int, image: Image, mask: Mask) -> tuple[Image, Mask]:
        if type(op).__name__ in LEAVES_MASKS:  # some warn of masks
            return self.run(op, key, image), mask
        with seeded(key):
            done, cut = op(_tensor(image), as_mask(mask))
        return _image(done), _values(cut)

    def on_device(self, images: Tensor, keys: Keys) -> Tensor:
        if not self.device:
            return images
        return self._on_device(images, keys, [None] * len(images))[0]

    def on_device_with_masks(self, images: Tensor, masks: Tensor, keys: Keys) -> tuple[Tensor, Tensor]:
        if not self.device:
            return images, masks
        done, cut = self._on_device(images, keys, [as_mask(mask) for mask in masks])
        return done, torch.stack([from_mask(each) for each in cut])

    def _on_device(self, images: Tensor, keys: Keys, masks: Sequence[Any]) -> tuple[Tensor, list[Any]]:
        if self.channels == 1:
            images = batch_to_rgb(images)
        steps = [(step.op, step.keys(keys).tolist()) for step in self.device]
        done: list[Tensor] = []
        cut: list[Any] = []
        with _exact_matmul(images.device):
            for row, (image, mask) in enumerate(zip(images, masks, strict=True)):
                for op, own in steps:
                    with seeded(own[row]):
                        if mask is None or type(op).__name__ in LEAVES_MASKS:
                            image = op(image)
                        else:
                            image, mask = op(image, mask)
                done.append(image)
                cut.append(mask)
        batch = _batch(done)
        return batch_to_grey(batch) if self.channels == 1 else batch, cut

    def sizes_after(self, op: Any, sizes: Sizes) -> Sizes:
        chance = getattr(op, "p", None)
        if not isinstance(chance, int | float):  # RandomChoice's p are weights of its operations
            return self._done(op, sizes)
        if chance == 0:
            return sizes
        found = self._done(always(op), sizes)
        return found if chance == 1 else np.concatenate([found, sizes])

    def _done(self, op: Any, sizes: Sizes) -> Sizes:
        parts = [self.inside(type(one).__name__, one) for one in getattr(op, "transforms", ())]
        match type(op).__name__:
            case "RandomApply":
                return sequential_sizes(parts, sizes)
            case "RandomChoice":
                return choice_sizes([part for part, weight in zip(parts, op.p, strict=True) if weight > 0], sizes)
            case "RandomOrder":
                return shuffled_sizes(parts, sizes)
            case _:
                return observed_sizes(partial(self.run, op), sizes)


@contextmanager
def _exact_matmul(device: torch.device) -> Iterator[None]:
    """Full float32 matrix products on CUDA: with precision=tf32, affine warps would pick some neighbouring pixels.

    Uses torch's newer setting: the older one raises once a user has set the newer.
    """
    if device.type != "cuda":
        yield
        return
    products = torch.backends.cuda.matmul
    usual = products.fp32_precision
    products.fp32_precision = "ieee"
    try:
        yield
    finally:
        products.fp32_precision = usual


def _batch(images: list[Tensor]) -> Tensor:
    """(3, h, w) each -> (N, 3, h, w), channels_last."""
    out = images[0].new_empty((len(images), *images[0].shape[1:], 3)).permute(0, 3, 1, 2)
    for target, image in zip(out, images, strict=True):
        target.copy_(image)
    return out


def _tensor(image: Image) -> Tensor:
    """(h, w, 3) -> (3, h, w) view, to be read only."""
    return torch.from_numpy(readable(image)).permute(2, 0, 1)


def _values(mask: Any) -> Mask:
    """A mask of torchvision's -> (h, w)."""
    values: Mask = from_mask(mask).contiguous().numpy()
    return values


def _image(tensor: Tensor) -> Image:
    """(3, h, w) -> (h, w, 3), copied only if it isn't contiguous."""
    image: Image = tensor.permute(1, 2, 0).contiguous().numpy()
    return image

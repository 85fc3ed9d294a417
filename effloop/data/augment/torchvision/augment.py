"""Recipes of torchvision's operations."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from effloop.data.augment import recipe
from effloop.data.augment.base import Augment, RecipeConfig, augments
from effloop.data.augment.framing import Image, Sizes
from effloop.data.augment.library import LibraryAugment
from effloop.data.augment.native.augment import NativeAugment, NativeConfig
from effloop.data.augment.operation import Keys
from effloop.data.augment.outcomes import either, in_any_order, one_after_other, tried
from effloop.data.augment.torchvision import operations as vision
from effloop.data.augment.torchvision.seeded import seeded
from effloop.data.image.resize import readable


@dataclass
class TorchvisionConfig(RecipeConfig):
    """Fields of `augment=torchvision`; `op` is the name of a class of torchvision.transforms.v2."""


@augments.register("torchvision", TorchvisionConfig)
def torchvision(config: TorchvisionConfig, *, size: int, train: bool) -> Augment:
    """Torchvision's operations, on the host or, image by image, on the device."""
    if not train:
        return NativeAugment(NativeConfig(name="native", eval_ratio=config.eval_ratio), size=size, train=False)
    library = importlib.import_module("torchvision.transforms.v2")
    steps = recipe.read(config, vision.operations(library, size), size)
    return TorchvisionAugment(steps, config, size)


class TorchvisionAugment(LibraryAugment[Any]):
    """torchvision's operations, one image at a time, on views: nothing is copied that torchvision doesn't copy."""

    def is_crop(self, made: Any) -> bool:
        return type(made).__name__ == "RandomResizedCrop"

    def box(self, made: Any, key: int, height: int, width: int) -> tuple[int, int, int, int]:
        image = torch.empty(1).expand(3, height, width)  # of a size, and without pixels
        with seeded(key):
            found = made.make_params([image])
        return found["top"], found["left"], found["height"], found["width"]

    def resize(self, made: Any, region: Image) -> Image:
        height, width = region.shape[:2]
        with seeded(0):  # it draws nothing
            return _image(made.transform(_tensor(region), {"top": 0, "left": 0, "height": height, "width": width}))

    def run(self, made: Any, key: int, image: Image) -> Image:
        with seeded(key):
            return _image(made(_tensor(image)))

    def on_device(self, images: Tensor, keys: Keys) -> Tensor:
        if not self.device:
            return images
        steps = [(step.made, step.keys(keys).tolist()) for step in self.device]
        done: list[Tensor] = []
        with _places_exact(images.device):
            for row, image in enumerate(images):
                for made, own in steps:
                    with seeded(own[row]):
                        image = made(image)
                done.append(image)
        return _batch(done)

    def sizes_after(self, made: Any, sizes: Sizes) -> Sizes:
        chance = getattr(made, "p", None)
        if not isinstance(chance, int | float):  # RandomChoice's are its operations'
            return self._done(made, sizes)
        if chance == 0:
            return sizes
        found = self._done(vision.always(made), sizes)
        return found if chance == 1 else np.concatenate([found, sizes])

    def _done(self, made: Any, sizes: Sizes) -> Sizes:
        parts = [self.inside(type(one).__name__, one) for one in getattr(made, "transforms", ())]
        match type(made).__name__:
            case "RandomApply":
                return one_after_other(parts, sizes)
            case "RandomChoice":
                return either([part for part, weight in zip(parts, made.p, strict=True) if weight > 0], sizes)
            case "RandomOrder":
                return in_any_order(parts, sizes)
            case _:
                return tried(partial(self.run, made), sizes)


@contextmanager
def _places_exact(device: torch.device) -> Iterator[None]:
    """For affine warps, where a product of matrices says which pixel goes where: with precision=tf32, some would be
    the neighbours on a CUDA device.

    Torch's newer name for it is used: the older one raises, once a user has set the newer.
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
    """(h, w, 3) -> (3, h, w) of the same memory, only to be read."""
    return torch.from_numpy(readable(image)).permute(2, 0, 1)


def _image(tensor: Tensor) -> Image:
    """(3, h, w) -> (h, w, 3), copied only if it doesn't lie so."""
    image: Image = tensor.permute(1, 2, 0).contiguous().numpy()
    return image

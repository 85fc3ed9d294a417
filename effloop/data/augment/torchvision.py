"""Recipes of torchvision's operations."""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from effloop.data.augment import recipe, vision
from effloop.data.augment.base import Augment, RecipeConfig, augments
from effloop.data.augment.framing import Image, Sizes
from effloop.data.augment.library import LibraryAugment
from effloop.data.augment.native import NativeAugment, NativeConfig
from effloop.data.augment.operation import Keys
from effloop.data.augment.seeded import seeded
from effloop.data.resize import readable


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
        # Of a line of pixels, torchvision may ask for none, and then fails.
        return found["top"], found["left"], max(1, found["height"]), max(1, found["width"])

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
        out: Tensor | None = None
        for row, image in enumerate(images):
            for made, own in steps:
                with seeded(own[row]):
                    image = made(image)
            if out is None:
                out = image.new_empty((len(images), *image.shape)).to(memory_format=torch.channels_last)
            out[row].copy_(image)
        assert out is not None
        return out

    def sizes_after(self, made: Any, sizes: Sizes) -> Sizes:
        always = vision.with_chance(made, math.ceil)
        if not vision.sizes_differ(made):
            return super().sizes_after(always, sizes)
        found = []
        for tried in (always, vision.with_chance(made, math.floor)):
            for size in np.unique(sizes, axis=0):
                found.append(super().sizes_after(tried, np.tile(size, (_TRIES, 1))))
        return np.unique(np.concatenate(found), axis=0)


_TRIES = 64
"""Of an operation that makes several sizes of one: takes 0.1 s for each size that it is tried on."""


def _tensor(image: Image) -> Tensor:
    """(h, w, 3) -> (3, h, w) of the same memory, only to be read."""
    return torch.from_numpy(readable(image)).permute(2, 0, 1)


def _image(tensor: Tensor) -> Image:
    """(3, h, w) -> (h, w, 3), copied only if it doesn't lie so."""
    image: Image = tensor.permute(1, 2, 0).contiguous().numpy()
    return image

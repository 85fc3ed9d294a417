"""Augmentation by Albumentations: its own operations, on the host, each image by the random numbers of its key."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from effloop.data.augment import recipe
from effloop.data.augment.albumentations_set import Made, operations
from effloop.data.augment.base import Augment, Device, RecipeConfig, augments
from effloop.data.augment.framing import Image, Sizes
from effloop.data.augment.library import LibraryAugment
from effloop.data.augment.native import NativeAugment, NativeConfig
from effloop.errors import ConfigError


@dataclass
class AlbumentationsConfig(RecipeConfig):
    """Fields of `augment=albumentations`; operations and their parameters are called what the library calls them.

    OpenCV's numbers may be given by name (INTER_AREA, BORDER_REFLECT_101), and a `size` as one number. Containers
    (OneOf, SomeOf, RandomOrder, Sequential) have `transforms: {label: {op: NAME, parameter: value, ...}, ...}`.
    """


@augments.register("albumentations", AlbumentationsConfig)
def albumentations(config: AlbumentationsConfig, *, size: int, train: bool) -> Augment:
    """Albumentations' operations, on the host."""
    if config.device is Device.gpu:
        raise ConfigError(
            "augment.device: gpu is not allowed, albumentations runs on the host only; set augment.device=cpu, "
            "or augment=native or torchvision"
        )
    if not train:
        return NativeAugment(NativeConfig(name="native", eval_ratio=config.eval_ratio), size=size, train=False)
    return AlbumentationsAugment(recipe.read(config, operations(size), size), config, size)


class AlbumentationsAugment(LibraryAugment[Made]):
    """A recipe of Albumentations' operations."""

    def is_crop(self, made: Made) -> bool:
        return made.name in ("RandomResizedCrop", "RandomSizedCrop") and made.seeded(0).p == 1

    def box(self, made: Made, key: int, height: int, width: int) -> tuple[int, int, int, int]:
        drawn = made.seeded(key).get_params_dependent_on_data({"shape": (height, width, 3)}, {})
        left, top, right, bottom = drawn["crop_coords"]
        return top, left, bottom - top, right - left

    def resize(self, made: Made, region: Image) -> Image:
        height, width = region.shape[:2]
        resized: Image = made.seeded(0).apply(region, crop_coords=(0, 0, width, height))
        return resized

    def run(self, made: Made, key: int, image: Image) -> Image:
        return made(key, image)

    def sizes_after(self, made: Made, sizes: Sizes) -> Sizes:
        always = Made(made.name, made.parameters, always=True)
        found = [super(AlbumentationsAugment, self).sizes_after(one, sizes) for one in (made, always)]
        return np.unique(np.concatenate(found), axis=0)

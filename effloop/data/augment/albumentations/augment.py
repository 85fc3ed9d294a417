"""Augmentation by Albumentations: its own operations, on the host, each image by the random numbers of its key."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from effloop.data.augment import recipe
from effloop.data.augment.albumentations.operations import CONTAINERS, Made, operations
from effloop.data.augment.base import Augment, Device, RecipeConfig, augments
from effloop.data.augment.framing import Image, Sizes
from effloop.data.augment.library import LibraryAugment
from effloop.data.augment.native.augment import NativeAugment, NativeConfig
from effloop.data.augment.outcomes import After, either, in_any_order, one_after_other, several, tried
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
        chance = made.seeded(0).p
        if chance == 0:
            return sizes
        found = self._done(made, sizes)
        return found if chance == 1 else np.concatenate([found, sizes])

    def _done(self, made: Made, sizes: Sizes) -> Sizes:
        if made.name not in CONTAINERS:
            return tried(Made(made.name, made.parameters, always=True), sizes)
        given = made.parameters["transforms"].items()
        if made.name == "OneOf":  # it does the one, whose p is but its weight
            parts = [self._forced(label, one) for label, one in given if one.seeded(0).p > 0]
            return either(parts, sizes)
        parts = [self.inside(f"transforms.{label}: {one.name}", one) for label, one in given]
        count, replace = made.parameters.get("n", 1), made.parameters.get("replace", False)
        if made.name == "Sequential" or (made.name == "SomeOf" and count == len(parts) and not replace):
            return one_after_other(parts, sizes)
        if count == len(parts) and not replace:
            return in_any_order(parts, sizes)
        return several(parts, count, sizes)

    def _forced(self, label: str, made: Made) -> After:
        # SomeOf and RandomOrder heed their own p even so.
        forced = {} if made.name in ("SomeOf", "RandomOrder") else {"p": 1.0}
        return self.inside(f"transforms.{label}: {made.name}", Made(made.name, {**made.parameters, **forced}))

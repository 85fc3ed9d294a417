"""Recipes of Albumentations' operations, on the host, each image with random numbers of its key."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

import numpy as np

from effloop.batch import ImageSize
from effloop.data.augment import recipe
from effloop.data.augment.albumentations.operations import CONTAINERS, KeyedTransform, operations
from effloop.data.augment.base import Augment, Device, RecipeConfig, augments
from effloop.data.augment.framing import Image, Sizes
from effloop.data.augment.library import LibraryAugment
from effloop.data.augment.native.augment import for_evaluation
from effloop.data.augment.outcomes import (
    SizeMap,
    choice_sizes,
    observed_sizes,
    sequential_sizes,
    shuffled_sizes,
    some_of_sizes,
)
from effloop.data.image.nearest import Mask
from effloop.errors import ConfigError


@dataclass
class AlbumentationsConfig(RecipeConfig):
    """Fields of `augment=albumentations`; operations and parameters have the library's names.

    OpenCV's constants may be given by name (INTER_AREA, BORDER_REFLECT_101), and a `size` as one number. Containers
    (OneOf, SomeOf, RandomOrder, Sequential) have `transforms: {label: {op: NAME, parameter: value, ...}, ...}`.
    """


@augments.register("albumentations", AlbumentationsConfig)
def albumentations(config: AlbumentationsConfig, *, size: ImageSize, train: bool, channels: int = 3) -> Augment:
    """Albumentations' operations, on the host."""
    if config.device is Device.gpu:
        raise ConfigError(
            "augment.device: gpu is not allowed, albumentations runs on the host only; set augment.device=cpu, "
            "or augment=native or torchvision"
        )
    if not train:
        return for_evaluation(config, size, channels)
    return AlbumentationsAugment(recipe.build_steps(config, operations(size), size), config, size, channels)


class AlbumentationsAugment(LibraryAugment[KeyedTransform]):
    """A recipe of Albumentations' operations."""

    def is_crop(self, op: KeyedTransform) -> bool:
        return op.name in ("RandomResizedCrop", "RandomSizedCrop") and op.seeded(0).p == 1

    def box(self, op: KeyedTransform, key: int, height: int, width: int) -> tuple[int, int, int, int]:
        drawn = op.seeded(key).get_params_dependent_on_data({"shape": (height, width, 3)}, {})
        left, top, right, bottom = drawn["crop_coords"]
        return top, left, bottom - top, right - left

    def resize(self, op: KeyedTransform, region: Image) -> Image:
        height, width = region.shape[:2]
        resized: Image = op.seeded(0).apply(region, crop_coords=(0, 0, width, height))
        return resized

    def run(self, op: KeyedTransform, key: int, image: Image) -> Image:
        return op(key, image)

    def with_masks(self) -> Augment:
        for step in self.host:
            if name := step.op.without_masks:
                raise ConfigError(
                    f"{step.where}: Albumentations' {name} can't be applied to masks; leave it out, or set "
                    "augment=segmentation"
                )
        made = copy.copy(self)
        made.host = [replace(step, op=step.op.with_masks()) for step in self.host]
        return made

    def resize_mask(self, op: KeyedTransform, mask: Mask) -> Mask:
        height, width = mask.shape
        resized: Mask = op.seeded(0).apply_to_mask(mask, crop_coords=(0, 0, width, height))
        return resized

    def run_with_mask(self, op: KeyedTransform, key: int, image: Image, mask: Mask) -> tuple[Image, Mask]:
        return op.with_mask(key, image, mask)

    def sizes_after(self, op: KeyedTransform, sizes: Sizes) -> Sizes:
        chance = op.seeded(0).p
        if chance == 0:
            return sizes
        found = self._done(op, sizes)
        return found if chance == 1 else np.concatenate([found, sizes])

    def _done(self, op: KeyedTransform, sizes: Sizes) -> Sizes:
        if op.name not in CONTAINERS:
            return observed_sizes(KeyedTransform(op.name, op.parameters, always=True), sizes)
        given = op.parameters["transforms"].items()
        if op.name == "OneOf":  # its transforms' p are weights
            parts = [self._forced(label, one) for label, one in given if one.seeded(0).p > 0]
            return choice_sizes(parts, sizes)
        parts = [self.inside(f"transforms.{label}: {one.name}", one) for label, one in given]
        count, replace = op.parameters.get("n", 1), op.parameters.get("replace", False)
        if op.name == "Sequential" or (op.name == "SomeOf" and count == len(parts) and not replace):
            return sequential_sizes(parts, sizes)
        if count == len(parts) and not replace:
            return shuffled_sizes(parts, sizes)
        return some_of_sizes(parts, count, sizes)

    def _forced(self, label: str, op: KeyedTransform) -> SizeMap:
        # SomeOf and RandomOrder still apply their own p.
        forced = {} if op.name in ("SomeOf", "RandomOrder") else {"p": 1.0}
        return self.inside(f"transforms.{label}: {op.name}", KeyedTransform(op.name, {**op.parameters, **forced}))

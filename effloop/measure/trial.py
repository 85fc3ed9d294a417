"""What may help a run: the changes, and the measurements that predict what they bring."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from effloop.convert.reencode import Recipe, shrunk
from effloop.data.image.header import Encoded, pnm_header
from effloop.data.image.mask import decode_mask, encode_mask, resize_mask
from effloop.data.source import Kind
from effloop.measure.costs import Cost, LoadingCosts, costs_of, sample_ids
from effloop.measure.forecast import Load
from effloop.measure.measured import Measured

IMAGES = 32
"""That are tried otherwise: decoded, re-encoded, augmented."""

_MOST_PIXELS = 100_000_000
"""Of all these images: 300 MB when they are decoded."""

_MATTERS = 0.05
"""Share of the loop's time below which a stage isn't looked at."""


@dataclass(frozen=True)
class Change:
    """What an override changes.

    Attributes:
        override: words for the command line, or for `convert`.
        why: a few words.
        load: what is done for each image with it.
        evaluation_s: seconds of evaluation for each epoch with it.
        exact: whether the same images are trained on, in the same precision.
        ease: from 1 (a word) down to 0; of two that bring as much the easier one is preferred.
        recipe: how the images are to be re-encoded, where it is a conversion.
        then: the override for the converted data.
    """

    override: str
    why: str
    load: Load
    evaluation_s: float
    exact: bool = True
    ease: float = 1.0
    recipe: Recipe | None = None
    then: str = ""


class Trial:
    """A measured run, and a few of its images to try changes on.

    Args:
        found: the run, measured.
    """

    def __init__(self, found: Measured) -> None:
        self.found = found
        self.load, self.plan = found.load, found.loader.plan

    def change(self, override: str, why: str, load: Load, **more: Any) -> Change:
        """A change of what is done for each image; `more` are fields of `Change`."""
        return Change(override, why, load, self.found.evaluation_s, **more)

    def matters(self, stage: str) -> bool:
        """Whether the run would be faster if a stage cost nothing."""
        forecast = self.found.forecast
        return forecast.without(self.load, stage) > (1 + _MATTERS) * forecast.images_per_s(self.load)

    @property
    def loading_matters(self) -> bool:
        """Whether it would be faster without a stage of loading."""
        return any(map(self.matters, ("storage", "decode", "augment", "batch")))

    def loaded(self, costs: LoadingCosts) -> Load:
        """With other costs of decoding and augmenting; those of reading and batching stay."""
        return self.load.with_loading(decode=costs.decode, augment=costs.augment)

    @cached_property
    def encoded(self) -> list[Encoded]:
        """The first images of the first epoch; fewer where they are large."""
        images: list[Encoded] = []
        pixels = 0
        for index in sample_ids(self.plan, IMAGES).tolist():
            images.append(bytes(self.plan.source.read(index)))
            info = self.plan.decoder.read_info(images[-1])
            pixels += info.height * info.width
            if pixels > _MOST_PIXELS:
                break
        return images

    @cached_property
    def decoded(self) -> tuple[float, list[Encoded]]:
        """Their mean bytes as pixels, and these."""
        images: list[Encoded] = []
        for data in self.encoded:
            pixels = np.ascontiguousarray(self.plan.decoder.decode(data))
            images.append(pnm_header(*pixels.shape) + pixels.tobytes())
        return sum(map(len, images)) / len(images), images

    def masks(self, max_side: int | None) -> list[Encoded] | None:
        """Masks of these images, with at most so many pixels on the longer side, as `convert` writes them; None where
        targets are no masks.
        """
        source = self.plan.source
        if source.kind is not Kind.masks:
            return None
        stored = map(source.read_mask, sample_ids(self.plan, len(self.encoded)).tolist())
        found = (decode_mask(data, source.mask_format) for data in stored)
        sized = ((mask, shrunk(mask.shape[0], mask.shape[1], max_side)) for mask in found)
        return [encode_mask(resize_mask(mask, *size)) for mask, size in sized]

    def relative(self, costs: LoadingCosts) -> LoadingCosts:
        """Costs of the few images that were tried -> of the many that were measured."""
        tried, many = self._tried, self.load.loading

        def scaled(stage: str) -> Cost:
            now, before, all_s = getattr(costs, stage), getattr(tried, stage), getattr(many, stage)
            ratio = now.cpu_s / before.cpu_s if before.cpu_s else 1.0
            return Cost(all_s.wall_s * ratio, all_s.cpu_s * ratio)

        return replace(costs, decode=scaled("decode"), augment=scaled("augment"))

    @cached_property
    def _tried(self) -> LoadingCosts:
        """Costs of the few images as they are."""
        return costs_of(self.plan, self.encoded, self.found.seconds)

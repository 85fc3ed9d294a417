"""EffLoop's own augmentation: drawn for many samples at once, resized straight into the batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from effloop.batch import ImageSize
from effloop.data.augment import recipe
from effloop.data.augment.base import Augment, Device, Draws, Evaluation, RecipeConfig, augments
from effloop.data.augment.native import crops
from effloop.data.augment.native.crops import RandomHorizontalFlip, RandomResizedCrop, RandomScaleCrop
from effloop.data.augment.operation import (
    CropOperation,
    Image,
    Keys,
    Operation,
    Sizes,
    bad,
    clip_boxes,
    crop_and_flip_batch,
    operations,
    write_crop,
)
from effloop.data.augment.recipe import Step
from effloop.data.image.mask import Mask
from effloop.data.image.pixels import batch_to_grey, batch_to_rgb, to_grey, to_rgb
from effloop.errors import ConfigError
from effloop.lazy import Tensor

Steps = Sequence[Step[Operation]]

_PROBES = np.array([[1_000_003, 1_000_033], [1_000_003, 2_000_003], [3_000_017, 1_000_003]])
"""Sizes larger than any crop, to see the output's size for images of several sizes."""


@augments.register("native", RecipeConfig)
class NativeAugment(Augment):
    """EffLoop's own operations, drawn for many samples at once; on the host or, on batches, on the device."""

    def __init__(self, config: RecipeConfig, *, size: ImageSize, train: bool, channels: int = 3) -> None:
        self.config = config
        self.channels = channels
        steps = _steps(config, size, train=train)
        ends = [_sizes_after(steps[:count], _PROBES) for count in range(1, len(steps) + 1)]
        recipe.check_output_sizes(ends[-1], size)
        # Once all images have one size, the rest can run on batches.
        alike = next(count for count, end in enumerate(ends, 1) if (end == end[0]).all())
        alike = max(n for n, step in enumerate(steps, 1) if n == alike or getattr(step.op, "on_host", False))
        count = alike if config.device is Device.gpu else len(steps)
        self.host, self.device = steps[:count], steps[count:]
        self.size = ImageSize(*ends[count - 1][0].tolist())
        first = self.first
        plain = first.write is write_crop
        self._can_flip = plain and len(self.host) > 1 and type(self.host[1].op) is RandomHorizontalFlip
        self._last_frame = max(n for n, step in enumerate(self.host) if isinstance(step.op, CropOperation))
        self._rest = 1 + self._can_flip  # the first of the operations that `apply_rest` does
        own = type(self).apply is NativeAugment.apply  # a subclass may do more
        self.fast_path = plain and own and not first.pads and self._last_frame == 0
        self.has_rest = self._rest < len(self.host)
        alternating = [step for step in steps if step.op.alternates]
        self.alternates = bool(alternating)
        for step in alternating[1:]:
            with recipe.error_context(step):
                raise bad("alternate", True, "false, as another one alternates: both would flip the same images")

    @property
    def first(self) -> CropOperation:
        """The operation that draws the boxes to decode."""
        first = self.host[0].op
        assert isinstance(first, CropOperation)
        return first

    @property
    def at_least(self) -> tuple[int, int] | None:
        return self.first.target if self.first.resizes else None

    @property
    def has_device_part(self) -> bool:
        return bool(self.device)

    def draw(self, keys: Keys, sizes: Sizes) -> Draws:
        drawn = _drawn(self.host, keys, sizes)
        flips = drawn[1] if self._can_flip else np.zeros(len(keys), np.bool_)
        return Draws(keys, clip_boxes(drawn[0][:, :4], sizes), flips, drawn)

    def apply(self, region: Image, draws: Draws, row: int, out: Image, mask: tuple[Mask, Mask] | None = None) -> None:
        box = draws.drawn[0][row].tolist()
        image = out if self._last_frame == 0 else np.empty((*box[4:6], region.shape[2]), np.uint8)
        # The flip in the same pass: it takes nothing there, and 7 µs of its own.
        flipped = self._can_flip and box[2:4] != box[4:] and bool(draws.drawn[1][row])
        self.first.write(region, box, image, flipped)
        self._apply_from(2 if flipped else 1, image, draws, row, out)
        if mask is not None:
            found, target = mask
            for step, drawn in zip(self.host, draws.drawn, strict=True):
                found = step.op.apply_mask(found, drawn, row)
            np.copyto(target, found)

    def apply_rest(self, draws: Draws, row: int, out: Image) -> None:
        self._apply_from(self._rest, out, draws, row, out)

    def _apply_from(self, first: int, image: Image, draws: Draws, row: int, out: Image) -> None:
        for number in range(first, len(self.host)):
            op, drawn = self.host[number].op, draws.drawn[number]
            if self.channels == 3 or op.any_channels:
                target = out if number == self._last_frame else None
                image = op.apply_host(image, drawn, row, target)
            else:
                image[:] = to_grey(op.apply_host(to_rgb(image), drawn, row, None))

    def with_masks(self) -> Augment:
        for number, step in enumerate([*self.host, *self.device]):
            if not step.op.takes_masks:
                able = ", ".join(sorted(name for name, kind in all_operations().items() if kind.takes_masks))
                raise ConfigError(
                    f"{step.where}: {step.name} can't be applied to masks; leave it out, or use one of {able}"
                )
            if number and isinstance(step.op, RandomScaleCrop) and step.op.looks:
                raise ConfigError(
                    f"{step.where}: {step.name} looks at the stored mask for cat_max_ratio, and so has to be the first "
                    f"operation; set {step.where}.cat_max_ratio=1, or move it to the front"
                )
        return self

    def choose(self, draws: Draws, row: int, mask: Mask) -> None:
        if self.first.choose(draws.drawn[0], row, mask):
            draws.boxes[row] = clip_boxes(draws.drawn[0][row : row + 1, :4], np.array([mask.shape]))[0]

    def on_device(self, images: Tensor, keys: Keys, masks: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        drawn = _drawn(self.device, keys, np.tile(self.size, (len(keys), 1)))
        ops = [step.op for step in self.device]
        for number, (op, found) in enumerate(zip(ops, drawn, strict=True)):
            if masks is not None:
                masks = op.apply_mask_batch(masks, found)
            if number and _flips_after_crop(*ops[number - 1 : number + 1]):
                continue
            if number + 1 < len(ops) and _flips_after_crop(*ops[number : number + 2]):
                images = crop_and_flip_batch(images, found, drawn[number + 1])  # both in one kernel
            elif self.channels == 3 or op.any_channels:
                images = op.apply_batch(images, found)
            else:
                images = batch_to_grey(op.apply_batch(batch_to_rgb(images), found))
        return images, masks

    def check(self, sizes: Sizes) -> None:
        recipe.check_output_sizes(_sizes_after(self.host, sizes), self.size)


def _flips_after_crop(op: Operation, following: Operation) -> bool:
    plain = isinstance(op, CropOperation) and op.write is write_crop
    return plain and type(following) is RandomHorizontalFlip


_FOR_EVALUATION: Mapping[Evaluation, Callable[[ImageSize, float], CropOperation]] = {
    Evaluation.crop: crops.CenterCropResize,
    Evaluation.letterbox: lambda size, _: crops.Letterbox(size),
    Evaluation.squash: lambda size, _: crops.Resize(list(size)),
}


def for_evaluation(config: RecipeConfig, size: ImageSize, channels: int) -> NativeAugment:
    """The evaluation transform, shared by all libraries."""
    plain = RecipeConfig(name="native", eval=config.eval, eval_ratio=config.eval_ratio)
    return NativeAugment(plain, size=size, train=False, channels=channels)


def all_operations() -> dict[str, type[Operation]]:
    """The native operations by name, also those that a recipe of crops and flips doesn't import."""
    from effloop.data.augment.native import affine, pixels, timm_policy  # noqa: F401  (they register)

    return operations


def _steps(config: RecipeConfig, size: ImageSize, *, train: bool) -> Steps:
    """A recipe's operations, the first of which is a crop."""
    if not train:
        op = _FOR_EVALUATION[config.eval](size, config.eval_ratio)
        return [Step("eval", type(op).__name__, op, 0)]
    given = {label: entry for label, entry in config.ops.items() if entry is not None}
    names = {recipe.split_entry(label, entry, f"augment.ops.{label}")[0] for label, entry in given.items()}
    known = operations if names <= operations.keys() else all_operations()
    steps = recipe.build_steps(config, known, size)
    whole = Step[Operation]("whole", "WholeImage", crops.WholeImage(), 0)
    return steps if isinstance(steps[0].op, CropOperation) else [whole, *steps]


def _drawn(steps: Steps, keys: Keys, sizes: Sizes) -> tuple[Any, ...]:
    found = []
    for step in steps:
        with recipe.error_context(step):
            found.append(step.op.draw(keys if step.op.alternates or step.salt in _SHARED else step.keys(keys), sizes))
            sizes = step.op.out_sizes(sizes)
    return tuple(found)


def _sizes_after(steps: Steps, sizes: Sizes) -> Sizes:
    """(N, 2) sizes of images -> those after some steps."""
    for step in steps:
        with recipe.error_context(step):
            sizes = step.op.out_sizes(sizes)
    return sizes


_SHARED = {recipe.salt(kind.__name__, 0) for kind in (RandomResizedCrop, RandomHorizontalFlip)}
"""The first of each takes its numbers from the samples' keys themselves, and the two take different ones."""

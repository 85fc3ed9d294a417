"""Native operations: their interface, checks of their parameters, and crops, which are drawn before decoding."""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray

from effloop.data.image.mask import IGNORED, Mask, crop_mask, nearest_places
from effloop.data.image.pixels import resize_into
from effloop.data.random import uniforms
from effloop.lazy import F, Tensor, torch
from effloop.system import gpu

Keys = NDArray[np.uint64]
Sizes = NDArray[np.int64]
Image = NDArray[np.uint8]

MOST_FACTOR = 1e4  # the largest factor of colours or sharpness. 1e39 overflows float32, and made images black

MOST_SIDE = 16_384  # the largest height or width of an operation's output, in pixels: 800 MB per image

RATIOS = (1e-3, 1e3)
"""The smallest and largest ratio of two lengths. Beyond, nothing is visible; at 1e-320 numbers overflow."""


class BadParameterError(ValueError):
    """A bad parameter of an operation: `NAME: got is not allowed; set ...`."""


def bad(name: str, value: object, allowed: str) -> BadParameterError:
    """The error for a parameter's value."""
    return BadParameterError(f"{name}: {value} is not allowed; set {allowed}")


def check_range(name: str, value: object, low: float, high: float, *, above: bool = False) -> tuple[float, float]:
    """Check and return [smallest, largest], from `low` (exclusive with `above`) to `high`."""
    pair = as_list(value)
    fits = len(pair) == 2 and all(map(_is_number, pair)) and low <= pair[0] <= pair[1] <= high
    if not fits or (above and pair[0] == low):
        bounds = f"{'above' if above else 'at least'} {low:g}" + (f" and at most {high:g}" if high < math.inf else "")
        raise bad(name, value, f"[smallest, largest], {bounds}")
    return float(pair[0]), float(pair[1])


def check_number(name: str, value: Any, low: float, high: float) -> float:
    """Check and return a number from `low` to `high`."""
    if not _is_number(value) or not low <= value <= high:
        bounds = f"from {low:g} to {high:g}" if high < math.inf else f"of at least {low:g}"
        raise bad(name, value, f"a number {bounds}")
    return float(value)


def check_whole(name: str, value: object, low: int, high: int) -> int:
    """Check and return a whole number from `low` to `high`."""
    if type(value) is not int or not low <= value <= high:
        raise bad(name, value, f"a whole number from {low} to {high}")
    return value


def check_size(name: str, value: object) -> tuple[int, int]:
    """Height and width, from a pair or one number for both."""
    pair = as_list(value) or [value, value]
    if len(pair) != 2 or not all(type(side) is int and 0 < side <= MOST_SIDE for side in pair):
        raise bad(name, value, f"a number of pixels from 1 to {MOST_SIDE}, or [height, width]")
    return pair[0], pair[1]


def check_levels(name: str, value: object, *, whole: bool = True, other: str = "") -> tuple[float, float, float]:
    """Levels of red, green and blue, 0 to 255, from three or one for all; `other` is what else is allowed."""
    levels = as_list(value) or [value] * 3
    fits = len(levels) == 3 and all(_is_number(each) and 0 <= each <= 255 for each in levels)
    if not fits or (whole and any(int(each) != each for each in levels)):
        some = "" if other else "or "
        raise bad(name, value, f"a {'whole ' * whole}number from 0 to 255, {some}three of them{other}")
    return levels[0], levels[1], levels[2]


def as_list(value: object) -> list[Any]:
    """The items of a list or another sequence, but of a text; empty for what is none."""
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else []


def _is_number(value: object) -> bool:
    # Not isfinite, which fails on an int too large for a float.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


# Cropping and resizing: one image on the host, a batch on its device.


def to_device(array: NDArray[Any], images: Tensor) -> Tensor:
    """Copy draws to the images' device, without a sync."""
    return gpu.to_device(torch.from_numpy(np.ascontiguousarray(array)), images.device)


def clip_boxes(boxes: NDArray[np.int64], sizes: Sizes) -> NDArray[np.int64]:
    """(N, 4) boxes, (N, 2) sizes of images -> (N, 4), the part of each box inside its image."""
    corners = np.minimum(np.maximum(boxes[:, :2], 0), sizes - 1)  # half the time of `clip`
    ends = np.minimum(np.maximum(boxes[:, :2] + boxes[:, 2:], corners + 1), sizes)
    return np.concatenate([corners, ends - corners], axis=1)


def write_crop(cut: Image, box: list[int], out: Image, flip: bool = False) -> None:
    """Write a crop to its output, resized and maybe flipped or, where the box has the output's size, padded with black.

    `cut` is the part of the box (top, left, height, width) inside the image, maybe scaled down by the decoder.
    """
    if out.shape[:2] != (box[2], box[3]):
        resize_into(cut, out, flip)
        return
    (height, width), top, left = cut.shape[:2], max(0, -box[0]), max(0, -box[1])
    if cut.shape != out.shape:
        out.fill(0)
    out[top : top + height, left : left + width] = cut


def reflected(places: NDArray[np.int64], side: int) -> NDArray[np.int64]:
    """Places in a row of `side` pixels, for those beyond it the ones that a reflection shows, the edge once."""
    found: NDArray[np.int64] = side - 1 - np.abs(side - 1 - np.abs(places))
    return found


def write_reflected(cut: Image, box: list[int], out: Image, flip: bool = False) -> None:
    """`write_crop` of a box of the output's size, filled by reflections instead of black."""
    rows, columns = (reflected(np.arange(box[2 + n]) + min(0, box[n]), cut.shape[n]) for n in (0, 1))
    out[:] = cut[rows[:, None], columns]


def crop_and_flip_batch(images: Tensor, drawn: NDArray[np.int64], flips: NDArray[np.bool_]) -> Tensor:
    """Crop each image of a batch, resize it if necessary, and flip it horizontally or not.

    Args:
        images: (N, C, H, W) uint8, channels_last, as what is returned.
        drawn: (N, 6) top, left, height, width of the boxes, and height and width of the output.
        flips: (N,) bool.
    """
    boxes, target = drawn[:, :4], (int(drawn[0, 4]), int(drawn[0, 5]))
    if (boxes[:, 2:] != drawn[:, 4:]).any():
        images = resize_batch(images, boxes, target)
        return images.flip(3).where(to_device(flips, images).view(-1, 1, 1, 1), images) if flips.any() else images
    beyond = max(0, -int(boxes[:, :2].min()), int((boxes[:, :2] + boxes[:, 2:] - images.shape[2:]).max()))
    if beyond:
        images = F.pad(images, (beyond,) * 4).contiguous(memory_format=torch.channels_last)
        boxes = boxes + np.array([beyond, beyond, 0, 0])
    return crop_batch(images, boxes, flips)


def crop_batch(images: Tensor, boxes: NDArray[np.int64], flips: NDArray[np.bool_]) -> Tensor:
    """`crop_and_flip_batch` for boxes of the output's size, beyond the images their reflections: one kernel."""
    height, width = boxes[0, 2:]
    rows = reflected(boxes[:, :1] + np.arange(height), images.shape[2])
    columns = boxes[:, 1:2] + np.where(flips[:, None], np.arange(width)[::-1], np.arange(width))
    columns = reflected(columns, images.shape[3])
    index = np.arange(len(boxes))[:, None, None], rows[:, :, None], columns[:, None, :]
    cut = images.permute(0, 2, 3, 1)[tuple(to_device(each, images) for each in index)]
    return cut.permute(0, 3, 1, 2)


def crop_mask_batch(masks: Tensor, boxes: NDArray[np.int64], size: tuple[int, int]) -> Tensor:
    """Crop (N, H, W) masks to boxes, which may reach beyond them, in another size: the pixels of `crop_mask`."""
    height, width = masks.shape[1:]
    rows = nearest_places(boxes[:, 0], boxes[:, 2], size[0])[:, :, None]
    columns = nearest_places(boxes[:, 1], boxes[:, 3], size[1])[:, None]
    inside = (rows >= 0) & (rows < height) & (columns >= 0) & (columns < width)
    places = np.arange(len(boxes))[:, None, None], rows.clip(0, height - 1), columns.clip(0, width - 1)
    found = masks[tuple(to_device(each, masks) for each in places)]
    return found if inside.all() else found.masked_fill(to_device(~inside, masks), IGNORED)


def resize_batch(images: Tensor, boxes: NDArray[np.int64], target: tuple[int, int]) -> Tensor:
    """Crop (N, C, H, W) images to boxes inside of them and resize these by an antialiased bilinear filter.

    On a CPU to the pixels of `resize_into`, on a GPU within 1 level of them. Image by image, because each has its own
    weights: as matrix products for the whole batch the weights alone took 108 ms for 64 images, and precision=tf32
    would apply to the sums.
    """
    out = images.new_empty((len(images), *target, images.shape[1]))
    for image, pixels, (top, left, height, width) in zip(images, out, boxes.tolist(), strict=True):
        cut = image[:, top : top + height, left : left + width]
        if images.is_cuda:
            resize_on_gpu(cut, pixels)
        else:
            resize_into(cut.permute(1, 2, 0).numpy(), pixels.numpy())
    return out.permute(0, 3, 1, 2)


def resize_on_gpu(cut: Tensor, out: Tensor) -> None:
    """(C, h, w) uint8 -> (H, W, C) uint8, in float32 and rounded once, without a sync."""
    size = list(out.shape[:2])
    resized = F.interpolate(cut[None].float(), size, mode="bilinear", antialias=True, align_corners=False)
    out.copy_(resized[0].permute(1, 2, 0).round_().clamp_(0, 255))


class Operation(ABC):
    """A named operation; its constructor's arguments are its parameters. Stateless and picklable.

    Random numbers come from the keys only, which differ between operations.

    Attributes:
        any_channels: whether it takes images of one channel, too. Else it is given grey in three, and what it makes of
            that becomes grey again.
        takes_masks: whether `apply_mask` and `apply_mask_batch` do to a mask what is done to its image. What they do by
            default, nothing, is right for an operation on colours.
        alternates: whether it goes by the lowest bit of the samples' keys, as of `Augment.alternates`.
    """

    any_channels: ClassVar[bool] = False
    takes_masks: bool = False
    alternates: bool = False

    @abstractmethod
    def draw(self, keys: Keys, sizes: Sizes) -> Any:
        """Draw for N samples at once: (N,) uint64 keys and (N, 2) height and width of the inputs.

        Returns:
            The other methods' `drawn`; row i depends on keys[i] and sizes[i] only.
        """

    def out_sizes(self, sizes: Sizes) -> Sizes:
        """(N, 2) sizes of inputs -> (N, 2) sizes of outputs.

        Raises:
            BadParameterError: an image is too small.
        """
        return sizes

    @abstractmethod
    def apply_host(self, image: Image, drawn: Any, row: int, out: Image | None) -> Image:
        """Apply it to one image on the host.

        Args:
            image: (H, W, C) uint8, contiguous; may be written. C is 3, RGB, or 1 with `any_channels`.
            drawn: from `draw`.
            row: the image's index in it.
            out: for the result, if this is the last operation to change the size; else None.
        """

    @abstractmethod
    def apply_batch(self, images: Tensor, drawn: Any) -> Tensor:
        """Apply it to (N, C, H, W) uint8 images, channels_last, on their device, without a sync; they may be written.

        Each image with its own row of `drawn`. Within 1 level of `apply_host`; a later operation may amplify that.
        """

    def apply_mask(self, mask: Mask, drawn: Any, row: int) -> Mask:
        """(H, W) uint8 mask of an image, not written -> (h, w), maybe a view; on the host, by nearest neighbour.

        What lies outside of the image is `IGNORED`.
        """
        return mask

    def apply_mask_batch(self, masks: Tensor, drawn: Any) -> Tensor:
        """(N, H, W) uint8 masks on their device, which may be written -> (N, h, w), the pixels of `apply_mask`."""
        return masks


class CropOperation(Operation):
    """Crops an image to a box and resizes it; the box is known before the image is decoded.

    A box may reach beyond the image, where it is black; then it already has the output's size.

    Attributes:
        target: height and width of the output, or of the smallest.
        resizes: whether a decoder may scale the box down to no less than `target`.
        pads: whether the output may have pixels that aren't the image's.
        on_host: whether it and what precedes it run on the host in any case.
    """

    any_channels = True
    takes_masks = True
    target: tuple[int, int]
    resizes: ClassVar[bool] = True
    pads: bool = False
    on_host: ClassVar[bool] = False

    def boxes(self, keys: Keys, sizes: Sizes) -> NDArray[np.int64]:
        """(N, 4) top, left, height, width; the whole image."""
        return np.concatenate([np.zeros_like(sizes), sizes], axis=1)

    def draw(self, keys: Keys, sizes: Sizes) -> NDArray[np.int64]:
        """(N, 6): top, left, height, width, and height and width of the output."""
        return np.concatenate([self.boxes(keys, sizes), self.out_sizes(sizes)], axis=1)

    def out_sizes(self, sizes: Sizes) -> Sizes:
        return np.full((len(sizes), 2), self.target)

    def apply_host(self, image: Image, drawn: NDArray[np.int64], row: int, out: Image | None) -> Image:
        box = drawn[row].tolist()
        top, left, height, width = clip_boxes(drawn[row : row + 1, :4], np.array([image.shape[:2]]))[0].tolist()
        target = np.empty((*box[4:6], image.shape[2]), np.uint8) if out is None else out
        self.write(image[top : top + height, left : left + width], box, target)
        return target

    write = staticmethod(write_crop)  # writes a crop to its output; arguments as of `write_crop`

    def apply_batch(self, images: Tensor, drawn: NDArray[np.int64]) -> Tensor:
        return crop_and_flip_batch(images, drawn, np.zeros(len(drawn), np.bool_))

    def choose(self, drawn: NDArray[np.int64], row: int, mask: Mask) -> bool:
        """Look at an image's (H, W) mask before it is decoded; whether another box was written to `drawn[row]`."""
        return False

    def apply_mask(self, mask: Mask, drawn: NDArray[np.int64], row: int) -> Mask:
        box = drawn[row].tolist()
        out = np.empty((box[4], box[5]), np.uint8)
        crop_mask(mask, box, out)
        return out

    def apply_mask_batch(self, masks: Tensor, drawn: NDArray[np.int64]) -> Tensor:
        return crop_mask_batch(masks, drawn[:, :4], (int(drawn[0, 4]), int(drawn[0, 5])))


class PixelOperation(Operation):
    """Changes pixels and keeps the size."""

    @abstractmethod
    def apply_inplace(self, image: Image, drawn: Any, row: int) -> None:
        """Change one (H, W, 3) uint8 RGB image, contiguous, in place, on the host; `row` is its index in `drawn`."""

    def apply_host(self, image: Image, drawn: Any, row: int, out: Image | None) -> Image:
        self.apply_inplace(image, drawn, row)
        return image


operations: dict[str, type[Operation]] = {}  # the native operations by name

Kind = TypeVar("Kind", bound=type[Operation])


def operation(kind: Kind) -> Kind:
    """Decorator: make a class available to recipes."""
    operations[kind.__name__] = kind
    return kind


def bernoulli(keys: Keys, p: float) -> NDArray[np.bool_]:
    """(N,) bool, True with probability p, from the first random number of each key."""
    return uniforms(keys, 1)[:, 0] < p

"""Cropping and resizing: one image on the host, a batch on its device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from effloop.data.image.mask import IGNORED, nearest_places
from effloop.data.image.resize import resize_into

Sizes = NDArray[np.int64]
Image = NDArray[np.uint8]
ResizeInto = Callable[[Image, Image], None]
"""Resizes (h, w, C) into (H, W, C)."""


def to_device(array: NDArray[Any], images: Tensor) -> Tensor:
    """Copy draws to the images' device, without a sync."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.pin_memory().to(images.device, non_blocking=True) if images.is_cuda else tensor


def clip_boxes(boxes: NDArray[np.int64], sizes: Sizes) -> NDArray[np.int64]:
    """(N, 4) boxes, (N, 2) sizes of images -> (N, 4), the part of each box inside its image."""
    corners = np.minimum(np.maximum(boxes[:, :2], 0), sizes - 1)  # half the time of `clip`
    ends = np.minimum(np.maximum(boxes[:, :2] + boxes[:, 2:], corners + 1), sizes)
    return np.concatenate([corners, ends - corners], axis=1)


def write_crop(cut: Image, box: list[int], out: Image, resize: ResizeInto) -> None:
    """Write a crop to its output, resized or, where the box has the output's size, padded with black.

    `cut` is the part of the box (top, left, height, width) inside the image, maybe scaled down by the decoder.
    """
    if out.shape[:2] != (box[2], box[3]):
        resize(cut, out)
        return
    (height, width), top, left = cut.shape[:2], max(0, -box[0]), max(0, -box[1])
    if cut.shape != out.shape:
        out.fill(0)
    out[top : top + height, left : left + width] = cut


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
    """`crop_and_flip_batch` for boxes inside of the images, all of the output's size.

    On a GPU by one kernel, which takes 40 ms on a CPU for 64 boxes of 224x224; copying one by one takes 2.
    """
    pixels = images.permute(0, 2, 3, 1)
    cut = crop_by_index(pixels, boxes, flips) if images.is_cuda else crop_by_copy(pixels, boxes, flips)
    return cut.permute(0, 3, 1, 2)


def crop_by_index(pixels: Tensor, boxes: NDArray[np.int64], flips: NDArray[np.bool_]) -> Tensor:
    """(N, H, W, C) -> (N, height, width, C), by indexing rows and columns at once."""
    height, width = boxes[0, 2:]
    rows = boxes[:, :1] + np.arange(height)
    columns = boxes[:, 1:2] + np.where(flips[:, None], np.arange(width)[::-1], np.arange(width))
    numbers = np.arange(len(boxes))[:, None, None]
    places = [to_device(index, pixels) for index in (numbers, rows[:, :, None], columns[:, None, :])]
    return pixels[places[0], places[1], places[2]]


def crop_by_copy(pixels: Tensor, boxes: NDArray[np.int64], flips: NDArray[np.bool_]) -> Tensor:
    """`crop_by_index` by copying images one by one."""
    height, width = boxes[0, 2:].tolist()
    out = pixels.new_empty((len(boxes), height, width, pixels.shape[3]))
    for image, target, (top, left, *_), flip in zip(pixels, out, boxes.tolist(), flips.tolist(), strict=True):
        cut = image[top : top + height, left : left + width]
        target.copy_(cut.flip(1) if flip else cut)
    return out


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

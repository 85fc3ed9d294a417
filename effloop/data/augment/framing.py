"""Cutting boxes out and resizing them: one image on the host, a batch on its device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from effloop.data.image.resize import resize_into

Sizes = NDArray[np.int64]
Image = NDArray[np.uint8]
ResizeInto = Callable[[Image, Image], None]
"""Resizes (h, w, 3) into (H, W, 3)."""


def to_device(array: NDArray[Any], images: Tensor) -> Tensor:
    """What was drawn, where the images are; the host doesn't wait for the copy."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.pin_memory().to(images.device, non_blocking=True) if images.is_cuda else tensor


def inside(boxes: NDArray[np.int64], sizes: Sizes) -> NDArray[np.int64]:
    """(N, 4) boxes, (N, 2) sizes of the images -> the part of each box that lies in its image."""
    corners = boxes[:, :2].clip(0, sizes - 1)
    ends = (boxes[:, :2] + boxes[:, 2:]).clip(corners + 1, sizes)
    return np.concatenate([corners, ends - corners], axis=1)


def place(cut: Image, box: list[int], out: Image, resize: ResizeInto) -> None:
    """Bring what was cut out of an image to where it belongs.

    Args:
        cut: (h, w, 3), the part of the box that lies in the image; a decoder may have shrunk it.
        box: top, left, height, width; black where it reaches beyond the image.
        out: written.
        resize: for what hasn't the size of `out`.
    """
    if out.shape[:2] != (box[2], box[3]):
        resize(cut, out)
        return
    (height, width), top, left = cut.shape[:2], max(0, -box[0]), max(0, -box[1])
    if cut.shape != out.shape:
        out.fill(0)
    out[top : top + height, left : left + width] = cut


def reframed(images: Tensor, drawn: NDArray[np.int64], flips: NDArray[np.bool_]) -> Tensor:
    """A box out of each image of a batch, resized where it hasn't the size yet, mirrored or not.

    Args:
        images: (N, 3, H, W) uint8, channels_last.
        drawn: (N, 6) top, left, height, width of the boxes, and the height and width of what comes out.
        flips: (N,) whether it is mirrored.

    Returns:
        (N, 3, height, width) uint8, channels_last.
    """
    boxes, target = drawn[:, :4], (int(drawn[0, 4]), int(drawn[0, 5]))
    if (boxes[:, 2:] != drawn[:, 4:]).any():
        images = resized_batch(images, boxes, target)
        return images.flip(3).where(to_device(flips, images).view(-1, 1, 1, 1), images) if flips.any() else images
    beyond = max(0, -int(boxes[:, :2].min()), int((boxes[:, :2] + boxes[:, 2:]).max()) - min(images.shape[2:]))
    if beyond:
        images = F.pad(images, (beyond,) * 4).contiguous(memory_format=torch.channels_last)
        boxes = boxes + np.array([beyond, beyond, 0, 0])
    return cut_batch(images, boxes, flips)


def cut_batch(images: Tensor, boxes: NDArray[np.int64], flips: NDArray[np.bool_]) -> Tensor:
    """A box out of each image, all of one size, mirrored or not.

    On a GPU in one kernel. On a CPU that took 40 ms for 64 boxes of 224x224, and copying one by one 2.

    Args:
        images: (N, 3, H, W) uint8, channels_last.
        boxes: (N, 4) top, left, height, width, inside of the images.
        flips: (N,) whether it is mirrored.

    Returns:
        (N, 3, height, width) uint8, channels_last.
    """
    pixels = images.permute(0, 2, 3, 1)
    cut = gathered(pixels, boxes, flips) if images.is_cuda else copied(pixels, boxes, flips)
    return cut.permute(0, 3, 1, 2)


def gathered(pixels: Tensor, boxes: NDArray[np.int64], flips: NDArray[np.bool_]) -> Tensor:
    """(N, H, W, 3) -> (N, height, width, 3), by one look-up of rows and columns."""
    height, width = boxes[0, 2:]
    rows = boxes[:, :1] + np.arange(height)
    columns = boxes[:, 1:2] + np.where(flips[:, None], np.arange(width)[::-1], np.arange(width))
    numbers = np.arange(len(boxes))[:, None, None]
    places = [to_device(index, pixels) for index in (numbers, rows[:, :, None], columns[:, None, :])]
    return pixels[places[0], places[1], places[2]]


def copied(pixels: Tensor, boxes: NDArray[np.int64], flips: NDArray[np.bool_]) -> Tensor:
    """The same, one by one."""
    height, width = boxes[0, 2:].tolist()
    out = pixels.new_empty((len(boxes), height, width, 3))
    for image, target, (top, left, *_), flip in zip(pixels, out, boxes.tolist(), flips.tolist(), strict=True):
        cut = image[top : top + height, left : left + width]
        target.copy_(cut.flip(1) if flip else cut)
    return out


def resized_batch(images: Tensor, boxes: NDArray[np.int64], target: tuple[int, int]) -> Tensor:
    """A box out of each image, resized by an antialiased bilinear filter.

    Image by image, because each has its own weights; as products of matrices for the whole batch the weights alone
    took 108 ms for 64 images, and their sums would be TensorFloat-32's where the precision is.

    Args:
        images: (N, 3, H, W) uint8, channels_last.
        boxes: (N, 4) top, left, height, width, inside of the images.
        target: height and width of what comes out.

    Returns:
        (N, 3, *target) uint8, channels_last; on a CPU the pixels of `resize_into`, on a GPU within 1 level of them.
    """
    out = images.new_empty((len(images), *target, 3))
    resize = resize_there if images.is_cuda else _resize_here
    for image, pixels, (top, left, height, width) in zip(images, out, boxes.tolist(), strict=True):
        resize(image[:, top : top + height, left : left + width], pixels)
    return out.permute(0, 3, 1, 2)


def _resize_here(cut: Tensor, out: Tensor) -> None:
    resize_into(cut.permute(1, 2, 0).numpy(), out.numpy())


def resize_there(cut: Tensor, out: Tensor) -> None:
    """(3, h, w) uint8 -> (H, W, 3) uint8, in float32 and rounded once, which a GPU can; it isn't waited for."""
    size = list(out.shape[:2])
    resized = F.interpolate(cut[None].float(), size, mode="bilinear", antialias=True, align_corners=False)
    out.copy_(resized[0].permute(1, 2, 0).round_().clamp_(0, 255))

"""Pixels of images: antialiased resizing into a batch's memory, flipping there, colours and grey."""

from __future__ import annotations

import functools
import importlib
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from effloop.errors import ConfigError
from effloop.lazy import Tensor, torch
from effloop.native import function


def resize_into(region: NDArray[np.uint8], out: NDArray[np.uint8], flipped: bool = False) -> None:
    """Resize with an antialiased bilinear filter, the width first; 0.02 levels (mean) from Pillow's.

    Pillow 13 resizes the height of a tall image first: the same filter, rounded 0.2 levels apart.

    By `effloop/native/resize.c`, or the kernel behind torchvision's uint8 resize, whose pixels are the same and which
    takes 2.5 to 5 times as long for RGB: without AVX2, where a side is shrunk to less than a quarter, with other
    channels. Both release the GIL.

    Args:
        region: (h, w, C) uint8, maybe a view; C is 1 or 3.
        out: (H, W, C) uint8, contiguous; written.
        flipped: whether it is flipped from left to right as well.

    Raises:
        ValueError: `out` is read-only.
    """
    if resized_by_vectors(region, out, flipped):
        return
    if not out.flags.writeable:  # torch would write it
        raise ValueError("out is read-only")
    # Views by NumPy: torch releases the GIL for each of its own, and then has to wait for it.
    source = torch.from_numpy(readable(region).transpose(2, 0, 1)[None])
    target = torch.from_numpy(out.transpose(2, 0, 1)[None])
    torch.ops.aten._upsample_bilinear2d_aa.out(source, list(out.shape[:2]), False, None, None, out=target)
    if flipped:
        flip(out)


def resized_by_vectors(region: NDArray[np.uint8], out: NDArray[np.uint8], flip: bool, level: int = 0) -> bool:
    """`resize_into` by vector instructions; False, and nothing is written, where there are none for it.

    `level`: 1 is AVX2, 2 AVX-512, 0 the fastest that there are.
    """
    if not (isinstance(region, np.ndarray) and isinstance(out, np.ndarray) and region.dtype == out.dtype == np.uint8):
        return False
    resize = function("effloop_resize", "ppii", "i")
    return bool(resize(id(region) + _HEAD, id(out) + _HEAD, flip, level) == 1)


_HEAD = object.__basicsize__  # bytes before an array object's own fields


def readable(array: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The same memory, flagged writable, for torch, which warns otherwise; it must not be written.

    Takes 4 µs; a copy of a crop from a mapped file takes up to 50, and holds the GIL while pages are fetched.
    """
    if array.flags.writeable:
        return array
    interface = array.__array_interface__ | {"data": (array.__array_interface__["data"][0], False)}
    return np.asarray(SimpleNamespace(__array_interface__=interface, kept=array))


def flip(image: NDArray[np.uint8], axis: int = 1) -> None:
    """Flip an (H, W, C) image, horizontally or along axis 0, in place and without the GIL, which NumPy would hold."""
    opencv().flip(image, axis, image)  # 7 µs at 224x224 in one call; torch takes two, and 17, NumPy 239


_WEIGHTS = (19_595, 38_470, 7_471)
"""Of red, green and blue in 65,536ths, as Pillow has them: 0.299, 0.587, 0.114. Equal colours stay as they are."""


def to_grey(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """(H, W, 3) uint8 RGB -> (H, W, 1) by Pillow's formula."""
    return np.asarray(Image.fromarray(np.ascontiguousarray(pixels)).convert("L"))[:, :, None]


def to_rgb(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """(H, W, 1) -> (H, W, 3), contiguous, three times the same."""
    return np.repeat(pixels, 3, axis=2)


def batch_to_grey(images: Tensor) -> Tensor:
    """(N, 3, H, W) uint8 on any device -> (N, 1, H, W), as `to_grey`."""
    red, green, blue = images.to(torch.int32).unbind(1)
    summed = red * _WEIGHTS[0] + green * _WEIGHTS[1] + blue * _WEIGHTS[2] + 0x8000
    return (summed >> 16).to(torch.uint8).unsqueeze(1)


def batch_to_rgb(images: Tensor) -> Tensor:
    """(N, 1, H, W) -> (N, 3, H, W), channels_last, three times the same."""
    return images.expand(-1, 3, -1, -1).contiguous(memory_format=torch.channels_last)


@functools.cache
def opencv() -> Any:
    """The module cv2; a ConfigError where it is missing, or lacks a system library."""
    try:
        cv2 = importlib.import_module("cv2")
    except ImportError as error:
        raise ConfigError(
            f"augment needs OpenCV ({error}); pip install --force-reinstall opencv-python-headless"
        ) from None
    cv2.setNumThreads(0)  # EffLoop brings the threads
    return cv2

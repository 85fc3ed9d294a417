"""Boxes of masks in another size, by nearest neighbour: pixel centres, as torch's `nearest-exact`, in whole numbers."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from effloop.data.image.mask import IGNORED
from effloop.native import address, library

__all__ = ["IGNORED", "Mask", "count_classes", "crop_mask", "nearest_places"]

Mask = NDArray[np.uint8]
"""(H, W) uint8, class indices or `IGNORED`."""


def crop_mask(mask: Mask, box: Sequence[int], out: Mask) -> None:
    """Write a box of a mask in the size of `out`; without the GIL.

    Pixel i of `out` is the box's pixel floor((i + 0.5) * scale), in both directions.

    Args:
        mask: (H, W) uint8.
        box: top, left, height, width in pixels, above 0; where it reaches beyond the mask, `out` is `IGNORED`.
        out: (h, w) uint8, rows contiguous; written.
    """
    rows = _rows_contiguous(mask)
    assert out.strides[1] == 1
    _call(_crop(), _described(rows), _box(box), address(out), out.strides[0], *out.shape)


def count_classes(mask: Mask, box: Sequence[int], size: Sequence[int]) -> NDArray[np.int64]:
    """(256,) how often each value is in what `crop_mask` would write, less what is beyond the mask.

    Args:
        mask: (H, W) uint8.
        box: as in `crop_mask`.
        size: height and width in which it would be written.
    """
    rows, counts = _rows_contiguous(mask), np.empty(256, np.int64)
    _call(_count(), _described(rows), _box(box), *size, address(counts))
    return counts


def nearest_places(begin: NDArray[np.int64], length: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """(N,) first pixels and lengths of boxes -> (N, size), the pixels that a box's in another size are taken from."""
    places: NDArray[np.int64] = begin[:, None] + (2 * np.arange(size) + 1) * length[:, None] // (2 * size)
    return places


def _rows_contiguous(mask: Mask) -> Mask:
    return mask if mask.strides[1] == 1 else np.ascontiguousarray(mask)


def _described(mask: Mask) -> tuple[int, int, int, int]:
    return address(mask), mask.strides[0], mask.shape[0], mask.shape[1]


def _box(box: Sequence[int]) -> Any:
    return (ctypes.c_int64 * 4)(*box[:4])


def _call(function: Any, mask: tuple[int, ...], *rest: Any) -> None:
    if function(*mask, *rest):
        raise MemoryError("for the columns of a mask")


@functools.cache
def _crop() -> Any:
    found = library().effloop_mask_crop
    number, array = ctypes.c_int64, ctypes.c_void_p
    found.argtypes = [array, number, number, number, array, array, number, number, number]
    return found


@functools.cache
def _count() -> Any:
    found = library().effloop_mask_count
    number, array = ctypes.c_int64, ctypes.c_void_p
    found.argtypes = [array, number, number, number, array, number, number, array]
    return found

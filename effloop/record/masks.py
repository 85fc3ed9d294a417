"""Masks of classes as pictures: colours, overlays, legends, and PNG files with a palette."""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image

IGNORED = 255
"""The value of pixels that aren't counted."""

MAX_COLOURED = 256
"""Classes that a mask of uint8, and its palette, can tell apart."""

_SHARE = 128
"""Of 256, how much of an overlay's pixel is the class's colour."""


def _voc() -> NDArray[np.uint8]:
    """(256, 3) uint8 RGB, PASCAL VOC's colours: bits 0, 1 and 2 of an index are the highest bits of red, green and
    blue, bits 3, 4 and 5 the next ones, and so on (`VOClabelcolormap` of its devkit); but white for 255.
    """
    index = np.arange(MAX_COLOURED)
    colours = np.zeros((MAX_COLOURED, 3), np.uint8)
    for place in range(8):
        for channel in range(3):
            bit = index >> (3 * place + channel) & 1
            colours[:, channel] |= (bit << (7 - place)).astype(np.uint8)
    colours[IGNORED] = 255
    return colours


PALETTE = _voc()
"""(256, 3) uint8 RGB: a colour for each class, and white for what isn't counted."""


def overlay(images: NDArray[np.uint8], masks: NDArray[np.uint8], *, borders: bool = False) -> NDArray[np.uint8]:
    """Images with half of their classes' colours.

    Args:
        images: (..., H, W, 3) uint8 RGB.
        masks: (..., H, W) uint8 class indices.
        borders: draw a class's last pixels before another one in its full colour.

    Returns:
        (..., H, W, 3) uint8 RGB.
    """
    colours = PALETTE[masks]
    blended = ((256 - _SHARE) * images.astype(np.uint16) + _SHARE * colours.astype(np.uint16)) >> 8
    mixed = blended.astype(np.uint8)
    return np.where(_borders(masks)[..., None], colours, mixed) if borders else mixed


def _borders(masks: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """(..., H, W) bool: pixels of a class other than 0 beside one of another class."""
    found = np.zeros(masks.shape, np.bool_)
    down, across = masks[..., 1:, :] != masks[..., :-1, :], masks[..., 1:] != masks[..., :-1]
    found[..., 1:, :] |= down
    found[..., :-1, :] |= down
    found[..., 1:] |= across
    found[..., :-1] |= across
    return found & (masks > 0)


def encode(mask: NDArray[np.uint8]) -> bytes:
    """(H, W) uint8 class indices -> a PNG file that holds them, 8 bits each, with `PALETTE`."""
    picture = Image.fromarray(mask)  # mode L
    picture.putpalette(PALETTE.tobytes())  # makes it mode P, its pixels as they are
    file = io.BytesIO()
    picture.save(file, "PNG", compress_level=3)
    return file.getvalue()


def classes_in(masks: Sequence[NDArray[np.uint8]]) -> list[int]:
    """The values that occur in some masks, in ascending order."""
    found = np.zeros(MAX_COLOURED, np.bool_)
    for mask in masks:
        found |= np.bincount(mask.ravel(), minlength=MAX_COLOURED) > 0
    return [int(value) for value in np.flatnonzero(found)]


def class_name(value: int, names: Sequence[str]) -> str:
    """A mask's value in words: its class, or that it isn't counted."""
    return names[value] if value < len(names) else "not counted" if value == IGNORED else f"class {value}"

"""Cutting a crop out of an indexed JPEG."""

from __future__ import annotations

import ctypes
import threading

from effloop.data.image.entropy.native import address, function
from effloop.data.image.header import Encoded
from effloop.data.image.jpeg import Part

_SPARE = 1 << 16  # bytes that a crop may be larger than the whole: longer tables, dummies


class _Scratch:
    """A thread's memory for smaller JPEGs; it is used again, as new pages cost 0.2 µs a KB.

    Attributes:
        out: the smaller JPEG.
        room: its bytes.
        out_at: its address.
        box, shown: arguments of the C function.
    """

    def __init__(self) -> None:
        self.box, self.shown = (ctypes.c_int32 * 4)(), (ctypes.c_int32 * 4)()
        self.box_at, self.shown_at = ctypes.addressof(self.box), ctypes.addressof(self.shown)
        self.crop = function("effloop_jpeg_crop")
        self.grow(_SPARE)

    def grow(self, room: int) -> None:
        memory = bytearray(room)
        self.room, self.out = room, memoryview(memory)
        self.out_at = ctypes.addressof(ctypes.c_char.from_buffer(memory))


_local = threading.local()


def crop_indexed(data: Encoded, index: Encoded, box: tuple[int, int, int, int], factor: int = 1) -> Part | None:
    """A JPEG of the MCUs that cover a box and the neighbours its chroma is interpolated from.

    Args:
        data: JPEG.
        index: its index.
        box: (top, left, height, width) in pixels, inside the image.
        factor: 1, 2, 4 or 8 if it is to be decoded at 1 / `factor` of its size.

    Returns:
        None if the index doesn't belong to these bytes, either is damaged, or all of the image is needed. The part's
        data is a view of memory that the thread's next crop overwrites. Beside the box the part may have pixels that
        aren't the image's: its first or last MCU of each row, or all of its first row.
    """
    try:
        scratch = _local.scratch
    except AttributeError:
        scratch = _local.scratch = _Scratch()
    if scratch.room < len(data) + _SPARE:
        scratch.grow(len(data) + len(data) // 4 + _SPARE)
    scratch.box[:] = box
    size = scratch.crop(
        address(data), len(data), address(index), len(index), scratch.box_at, 2 * factor, scratch.out_at,
        scratch.room, scratch.shown_at,
    )  # fmt: skip
    return Part(scratch.out[:size], *scratch.shown) if size else None

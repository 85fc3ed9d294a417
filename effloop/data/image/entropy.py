"""Crops out of JPEGs that have no restart markers: an index beside the file, which stays as it is.

The index holds the states of the entropy decoder at every few MCUs of each row: bit position and DC predictors. With
it the bits of a crop are spliced into an ordinary smaller JPEG, whose pixels are those of the whole to the bit.
"""

from __future__ import annotations

import ctypes
import threading

import numpy as np

from effloop.data.image.header import Encoded
from effloop.data.image.jpeg import Part
from effloop.native import function


def address(data: Encoded) -> bytes | int:
    """What a pointer argument takes: the bytes themselves, or where those of a view are."""
    return data if isinstance(data, bytes) else np.frombuffer(data, np.uint8).ctypes.data


_SPARE = 1 << 16  # bytes that a crop may be larger than the whole: longer tables, dummies


class _Scratch:
    """A thread's memory for smaller JPEGs, and the C function's arguments; new pages would cost 0.2 µs a KB."""

    def __init__(self) -> None:
        self.box, self.shown = (ctypes.c_int32 * 4)(), (ctypes.c_int32 * 4)()
        self.box_at, self.shown_at = ctypes.addressof(self.box), ctypes.addressof(self.shown)
        self.crop = function("effloop_jpeg_crop", "plplpiplp", "l")
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


VERSION = 1
"""Of the format; another one's indexes match nothing."""

_SHARE = 0.03  # of the file's bytes, which gives a grid of one to two MCUs to photographs of 500x375 and 110 KB


def build_index(data: Encoded) -> bytes | None:
    """The index of a JPEG, from its bytes alone: the same bytes give the same index.

    It takes at most 3 % of the file, by its grid: a state at every MCU, at every second, and so on. It holds a checksum
    of all of the file and one of itself, so that `crop_indexed` notices when either has changed. The GIL is released
    meanwhile.

    Returns:
        None if it can't be indexed: it isn't a JPEG, or progressive, arithmetic, of 12 bits, CMYK, in several scans,
        has restart markers, several chroma samples in an MCU, data after its end, damage, or is so small or plain
        that no grid fits.
    """
    room = int(len(data) * _SHARE)
    out = ctypes.create_string_buffer(room)
    size = function("effloop_jpeg_index", "plpl", "l")(address(data), len(data), out, room)
    if size < 0:
        raise MemoryError
    return out.raw[:size] if size else None


def matches(data: Encoded, index: Encoded) -> bool:
    """Whether an index is undamaged and belongs to these bytes of a file."""
    return bool(
        function("effloop_jpeg_index_matches", "plpl", "l")(address(data), len(data), address(index), len(index))
    )

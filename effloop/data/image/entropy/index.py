"""Building the index of a JPEG."""

from __future__ import annotations

import ctypes

from effloop.data.image.entropy.native import address, function
from effloop.data.image.header import Encoded

VERSION = 1
"""Of the format; another one's indexes match nothing."""

_SHARE = 0.03  # of the file's bytes, which gives a grid of one to two MCUs to photographs of 500x375 and 110 KB


def build_index(data: Encoded) -> bytes | None:
    """The index of a JPEG, from its bytes alone: the same bytes give the same index.

    It takes at most 3 % of the file, by its grid: a state at every MCU, at every second, and so on. It holds a
    checksum of all of the file and one of itself, so that `crop_indexed` notices when either has changed. The GIL is
    released meanwhile.

    Args:
        data: any file.

    Returns:
        None if it can't be indexed: it isn't a JPEG, or progressive, arithmetic, of 12 bits, CMYK, in several scans,
        has restart markers, several chroma samples in an MCU, data after its end, damage, or is so small or plain
        that no grid fits.

    Raises:
        MemoryError: there isn't enough.
    """
    room = int(len(data) * _SHARE)
    out = ctypes.create_string_buffer(room)
    size = function("effloop_jpeg_index")(address(data), len(data), out, room)
    if size < 0:
        raise MemoryError
    return out.raw[:size] if size else None


def matches(data: Encoded, index: Encoded) -> bool:
    """Whether an index is undamaged and belongs to these bytes of a file."""
    return bool(function("effloop_jpeg_index_matches")(address(data), len(data), address(index), len(index)))

"""What allows native/jpeg_box.c to decode only a crop of a JPEG: restart markers, or an entropy index.

A restart marker resets a JPEG's entropy coder, so the data between two of them can be decoded on its own. They are of
use where their interval (DRI) divides a row of MCUs; `convert` writes such files.
"""

from __future__ import annotations

import ctypes
import struct
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from effloop.data.image.header import Encoded
from effloop.native import function, pointer

_EOI, _APP9 = 0xD9, 0xE9
_NAME = b"EffLoop\0"  # 8 bytes
_SEGMENT = struct.Struct(">BBH")
_ORDER = np.arange(1 << 16, dtype=np.uint8) & 7


class Layout(NamedTuple):
    """Where to find what in a baseline JPEG with one scan, in the order of `effloop_jpeg_layout` in native/jpeg.c."""

    sos_at: int  # offset of the scan's header
    scan_at: int  # of its entropy-coded data
    interval: int  # MCUs between restart markers; 0 is none
    lengths: int  # how many lengths of intervals `with_interval_lengths` has stored; 0 is none


_LAYOUT = ctypes.c_int64 * len(Layout._fields)


def read_layout(data: Encoded) -> Layout | None:
    """A JPEG's layout; None if it isn't baseline, in one scan, of 1 or 3 components."""
    found = _LAYOUT()
    return Layout(*found) if function("effloop_jpeg_layout", "plp", "i")(*pointer(data), found) else None


def with_interval_lengths(data: Encoded) -> bytes:
    """The same JPEG with the lengths of its restart intervals in a segment before the scan (APP9 `EffLoop`).

    Cropping then needn't search for the markers, which takes 16 to 22 µs at 62 KB. Two bytes per interval, 0.7 % of
    a file of 104 KB with an interval of two MCUs. Other programs skip the segment. A file without restart markers is
    returned as it is, and so is one where an interval or the segment would exceed 64 KB.
    """
    layout = read_layout(data)
    if layout is None or not layout.interval or layout.lengths:
        return bytes(data)
    lengths = _scan_interval_lengths(data, layout.scan_at)
    size = 2 + len(_NAME) + 2 * len(lengths)
    if len(lengths) < 2 or max(size, lengths.max()) > 0xFFFF:
        return bytes(data)
    segment = _SEGMENT.pack(0xFF, _APP9, size) + _NAME + lengths.astype("<u2").tobytes()
    return b"".join((data[: layout.sos_at], segment, data[layout.sos_at :]))


def _scan_interval_lengths(data: Encoded, scan_at: int) -> NDArray[Any]:
    """Bytes of each interval with its marker (EOI for the last), by a search; empty if there are other markers."""
    scan = np.frombuffer(data, np.uint8)[scan_at:]
    after = np.flatnonzero(scan[:-1] == 0xFF)
    after += 1
    kinds = scan[after]
    ends: NDArray[np.int64] = after[kinds != 0]  # FF 00 is a byte FF of the entropy-coded data
    kinds = kinds[kinds != 0] - np.uint8(0xD0)
    # Numbered in order, and EOI last; everything else is left to libjpeg.
    if not len(ends) or kinds[-1] != _EOI - 0xD0 or not np.array_equal(kinds[:-1], _ORDER[: len(kinds) - 1]):
        return ends[:0]
    lengths: NDArray[Any] = np.diff(ends + 1, prepend=0)
    return lengths


# Entropy indexes are for JPEGs without restart markers, and stored outside of the file. They hold the state of the
# entropy decoder (bit position and DC predictors) at every few MCUs of each row.

VERSION = 1  # of the format; another one's indexes match nothing

_SHARE = 0.03  # of the file's bytes, which gives a grid of one to two MCUs to photographs of 500x375 and 110 KB


def build_index(data: Encoded) -> bytes | None:
    """The index of a JPEG, from its bytes alone: the same bytes give the same index.

    It takes at most 3 % of the file, by its grid: a state at every MCU, at every second, and so on. It holds a checksum
    of all of the file and one of itself, so that decoding notices when either has changed. The GIL is released
    meanwhile.

    Returns:
        None if it can't be indexed: it isn't a JPEG, or progressive, arithmetic, of 12 bits, CMYK, in several scans,
        has restart markers, several chroma samples in an MCU, data after its end, damage, or is so small or plain
        that no grid fits.
    """
    room = int(len(data) * _SHARE)
    out = ctypes.create_string_buffer(room)
    size = function("effloop_jpeg_index", "plpl", "l")(*pointer(data), out, room)
    if size < 0:
        raise MemoryError
    return out.raw[:size] if size else None


def matches(data: Encoded, index: Encoded) -> bool:
    """Whether an index is undamaged and belongs to these bytes of a file."""
    return bool(function("effloop_jpeg_index_matches", "plpl", "l")(*pointer(data), *pointer(index)))

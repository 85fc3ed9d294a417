"""CRC-32C, the checksum of records and files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from effloop.data.image.header import Encoded

_BLOCK = 1 << 20
_VALUES = 1 << 18  # bytes that are copied at a time: 3.9 GB/s, of 64 KiB 2.6, of 4 MiB 3.1
_END = 4096


def crc32c(data: Encoded) -> int:
    """CRC-32C (Castagnoli): 9 µs for 110 KB, 1 % of decoding them; zlib's CRC-32 takes 45."""
    checksum: int = google_crc32c.value(bytes(data))  # it takes bytes only; the copy is 4 of the 9 µs
    return checksum


def extended(checksum: int, data: Encoded) -> int:
    """The CRC-32C of what `checksum` is of, followed by `data`; the checksum of nothing is 0."""
    longer: int = google_crc32c.extend(checksum, bytes(data))
    return longer


def crc32c_of_values(values: NDArray[Any]) -> int:
    """CRC-32C of an array's values, little-endian, row after row: 3 GB/s, without a copy of all."""
    checksum, flat = 0, values.reshape(-1)
    step = _VALUES // max(1, values.itemsize)
    little = values.dtype.newbyteorder("<")
    for start in range(0, len(flat), step):
        piece = np.ascontiguousarray(flat[start : start + step], little)
        checksum = google_crc32c.extend(checksum, piece.tobytes())
    return checksum


def crc32c_of_file(path: Path) -> int:
    """CRC-32C of a whole file."""
    checksum = 0
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            checksum = google_crc32c.extend(checksum, block)
    return checksum


def crc32c_of_ends(path: Path) -> int:
    """CRC-32C of a file's first and last 4 KiB: fast, and enough to tell one file from another."""
    with open(path, "rb") as file:
        first = google_crc32c.value(file.read(_END))
        file.seek(max(0, file.seek(0, 2) - _END))
        checksum: int = google_crc32c.extend(first, file.read(_END))
        return checksum

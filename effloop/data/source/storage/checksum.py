"""CRC-32C, the checksum of records and files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from effloop.data.image.encoded import EncodedImages
from effloop.data.image.header import Encoded
from effloop.data.in_progress import in_progress
from effloop.native import address, function, pointer

_BLOCK = 1 << 20
_VALUES = 1 << 18  # bytes that are copied at a time: 3.9 GB/s, of 64 KiB 2.6, of 4 MiB 3.1
_END = 4096


def crc32c(data: Encoded) -> int:
    """CRC-32C (Castagnoli), without a copy and without the GIL: 6 µs for 110 KB; zlib's CRC-32 takes 45."""
    return extended(0, data)


def extended(checksum: int, data: Encoded) -> int:
    """The CRC-32C of what `checksum` is of, followed by `data`; the checksum of nothing is 0."""
    longer: int = function("effloop_crc32c", "upl", "u")(checksum, *pointer(data))
    return longer


def differs(images: EncodedImages, checksums: NDArray[Any]) -> bool:
    """Whether the CRC-32C of any of (N,) images isn't the one that is wanted, in one call without the GIL."""
    wanted = checksums.astype(np.uint64)
    arrays = (address(images.addresses), address(images.sizes), address(wanted))
    found: int = function("effloop_crc32c_differs", "ppplpp", "l")(*arrays, len(images), *in_progress.addresses())
    return found >= 0


def crc32c_of_values(values: NDArray[Any]) -> int:
    """CRC-32C of an array's values, little-endian, row after row: 3 GB/s, without a copy of all."""
    checksum, flat = 0, values.reshape(-1)
    step = _VALUES // max(1, values.itemsize)
    little = values.dtype.newbyteorder("<")
    for start in range(0, len(flat), step):
        piece = np.ascontiguousarray(flat[start : start + step], little)
        checksum = extended(checksum, piece.view(np.uint8).data)
    return checksum


def crc32c_of_file(path: Path) -> int:
    """CRC-32C of a whole file."""
    checksum = 0
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            checksum = extended(checksum, block)
    return checksum


def crc32c_of_ends(path: Path) -> int:
    """CRC-32C of a file's first and last 4 KiB: fast, and enough to tell one file from another."""
    with open(path, "rb") as file:
        first = crc32c(file.read(_END))
        file.seek(max(0, file.seek(0, 2) - _END))
        checksum: int = extended(first, file.read(_END))
        return checksum

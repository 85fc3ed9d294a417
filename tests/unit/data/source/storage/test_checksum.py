"""CRC-32C in C, compared with Google's."""

from __future__ import annotations

import google_crc32c
import numpy as np
import pytest

from effloop.data.source.storage.checksum import crc32c, extended


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 12_287, 12_288, 12_289, 100_001])
def test_crc32c(size: int) -> None:
    """From one byte to several of the lanes that are computed at a time."""
    data = np.random.default_rng(size).bytes(size)
    first, rest = data[: size // 3], memoryview(data)[size // 3 :]
    assert crc32c(data) == crc32c(memoryview(data)) == google_crc32c.value(data)
    assert extended(crc32c(first), rest) == google_crc32c.value(data)


def test_a_view_of_larger_values() -> None:
    values = np.arange(24, dtype=np.uint16).reshape(4, 6)
    assert crc32c(values.data) == google_crc32c.value(values.tobytes())

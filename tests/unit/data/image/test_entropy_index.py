"""Building indexes: which files get one, and how large it is."""

import numpy as np
import pytest
from images import encode, photo
from jpegs import KINDS, by_opencv, picture, with_segment

from effloop.data.decode.base import DecodeConfig
from effloop.data.decode.common import PillowDecoder
from effloop.data.image.jpeg import build_index, matches
from effloop.errors import DataError

PIXELS = photo(240, 360)


@pytest.mark.parametrize("kind", KINDS)
def test_a_small_share_of_the_file(kind):
    data = KINDS[kind](picture(480, 640, np.random.default_rng(0)))
    found = build_index(data)
    if kind in ("worst", "optimised, plain", "optimised grey"):  # some 10 bytes of an MCU
        assert found is None or len(found) <= 0.03 * len(data)
    else:
        assert found is not None
        assert len(found) <= 0.03 * len(data)
        assert matches(data, found)
    assert build_index(memoryview(data)) == found


def _in_two_scans(data: bytes) -> bytes:
    """Says that the scan has the first component only; another scan would follow."""
    at = data.index(b"\xff\xda")
    return data[:at] + b"\xff\xda\0\x08\x01" + data[at + 5 : at + 7] + b"\0\x3f\0" + data[at + 14 :]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xd8\xff\xd9",
        encode(PIXELS, "PNG"),
        encode(PIXELS, "JPEG", progressive=True, quality=95),
        encode(PIXELS, "JPEG", "CMYK", quality=95),
        by_opencv(PIXELS, rst_interval=4),
        by_opencv(PIXELS) + b"\0",
        by_opencv(PIXELS) + by_opencv(PIXELS),
        by_opencv(PIXELS)[:-1],
        by_opencv(PIXELS)[:-900] + b"\xff\xd9",
        by_opencv(PIXELS)[:-2] + b"\0\xff\xd9",
        by_opencv(PIXELS).replace(b"\xff\xc0\0\x11\x08", b"\xff\xc0\0\x11\x0c"),
        by_opencv(PIXELS).replace(b"\xff\xc0", b"\xff\xc9"),
        _in_two_scans(by_opencv(PIXELS)),
        by_opencv(photo(8, 8)),
    ],
    ids=range(15),
)
def test_what_gets_none(data):
    assert build_index(data) is None


def _by_hand(size: int) -> bytes:
    """256 grey blocks, one of which has a coefficient of `size` bits, coded by tables of a few symbols."""
    dc, ac = {0: "0", 3: "10"}, {0: "0", 3: "10", 10: "11000000000", 11: "11000000001"}
    bits = ""
    for block in range(256):
        bits += dc[0] if block % 5 else dc[3] + "111"
        bits += ac[size] + f"{1022:0{size}b}" if block == 3 else ""
        bits += ac[0]
    bits += "1" * (-len(bits) % 8)
    scan = int(bits, 2).to_bytes(len(bits) // 8, "big").replace(b"\xff", b"\xff\0")
    tables = [bytes([0, 1, 1, *[0] * 14, *dc]), bytes([16, 1, 1, *[0] * 8, 2, *[0] * 5, *ac])]
    segments = [(0xFE, bytes(9000)), (0xDB, bytes([0, *[1] * 64])), (0xC0, b"\x08\0\x80\0\x80\1\1\x11\0")]
    segments += [*((0xC4, table) for table in tables), (0xDA, b"\1\1\0\0\x3f\0")]
    header = b"".join(bytes([0xFF, kind]) + (len(data) + 2).to_bytes(2, "big") + data for kind, data in segments)
    return b"\xff\xd8" + header + scan + b"\xff\xd9"


def _with_a_code_of_ones_only() -> bytes:
    """In the first table, which libjpeg refuses."""
    data = by_opencv(PIXELS)
    at = data.index(b"\xff\xc4") + 4
    counts = bytearray(data[at + 1 : at + 17])
    counts[8] += 1  # of 9 bits, the longest there
    return with_segment(data, 0xC4, data[at : at + 1] + counts + data[at + 17 : at + 29] + b"\x0c")


def _too_wide() -> bytes:
    """By four pixels, which its blocks have."""
    data = bytearray(encode(photo(8, 65500), "JPEG", "L"))
    at = data.index(b"\xff\xc0") + 7
    data[at : at + 2] = (65504).to_bytes(2, "big")
    return bytes(data)


@pytest.mark.parametrize(
    "data",
    [
        _too_wide(),
        with_segment(by_opencv(PIXELS), 0xDB, bytes([0, *[1] * 64, 0])),
        with_segment(by_opencv(PIXELS), 0xDB, bytes([16, *[1] * 64])),
        with_segment(by_opencv(PIXELS), 0xDB, bytes([4, *[1] * 64])),
        _with_a_code_of_ones_only(),
    ],
    ids=range(5),
)
def test_what_libjpeg_refuses_gets_none(data):
    with pytest.raises(DataError, match="is a damaged JPEG"):
        PillowDecoder(DecodeConfig()).decode(data)
    assert build_index(data) is None


def test_a_symbol_of_no_baseline_jpeg_is_not_taken_for_its_neighbour():
    for size in (10, 11):
        assert PillowDecoder(DecodeConfig()).decode(_by_hand(size)).shape == (128, 128, 3)
    assert build_index(_by_hand(10)) is not None
    assert build_index(_by_hand(11)) is None


def test_what_it_matches():
    data, other = by_opencv(PIXELS), by_opencv(photo(240, 360, seed=1))
    found = build_index(data)
    assert found is not None
    assert matches(data, found)
    assert matches(memoryview(data), memoryview(found))
    assert not matches(other, found)
    assert not matches(data, b"")
    assert not matches(b"", found)
    for at in range(0, len(data), 997):
        assert not matches(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :], found)
    for at in range(len(found)):
        assert not matches(data, found[:at] + bytes([found[at] ^ 128]) + found[at + 1 :])
        assert not matches(data, found[:at])

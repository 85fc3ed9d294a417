"""Crops of indexed JPEGs: the pixels that libjpeg-turbo decodes of the whole image inside the box, to the bit."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from jpegs import KINDS, Box, boxes, by_opencv, decode_part, picture, with_segment
from numpy.typing import NDArray

from effloop.data.decode import DecodeConfig, decoders
from effloop.data.decode.common import PlainDecoder
from effloop.data.image import jpeg as module
from effloop.data.image.jpeg import build_index
from effloop.data.image.orientation import with_orientation
from effloop.errors import DataError

SIZES = [(200, 272), (67, 53), (33, 176), (250, 7), (16, 16), (5, 300), (131, 129)]
"""(height, width); 53 pixels are 4 MCUs of 16, and 272 are 17, a prime number."""


@pytest.fixture(autouse=True)
def small_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose indexes take more than their share."""
    monkeypatch.setattr(module, "_SHARE", 2.0)


def indexed(data: bytes) -> bytes:
    found = build_index(data)
    assert found is not None
    return found


def build(**options: Any) -> PlainDecoder:
    decoder = decoders.build(DecodeConfig("turbojpeg", **options))
    assert isinstance(decoder, PlainDecoder)
    return decoder


def decode(
    decoder: PlainDecoder, data: bytes, found: bytes | None, box: Box, at_least: tuple[int, int] | None = None
) -> NDArray[np.uint8]:
    info = decoder.read_info(data)
    return decoder.decode_with_info(data, replace(info, index=found), box, at_least)


def decode_whole(data: bytes, **options: Any) -> NDArray[np.uint8]:
    """By libjpeg-turbo."""
    return build(region=False, **options).decode(data)


def inside(pixels: NDArray[np.uint8], box: Box) -> NDArray[np.uint8]:
    return pixels[box[0] : box[0] + box[2], box[1] : box[1] + box[3]]


@pytest.mark.parametrize("kind", KINDS)
def test_a_crop_is_cut_from_the_whole(kind):
    decoder, rng, decoded = build(), np.random.default_rng(7), 0
    for height, width in SIZES:
        data = KINDS[kind](picture(height, width, rng))
        found, whole = indexed(data), decode_whole(data)
        for box in boxes(height, width, 8, rng):
            np.testing.assert_array_equal(decode(decoder, data, found, box), inside(whole, box), str(box))
            if (pixels := decode_part(data, found, box)) is not None:
                decoded += 1
                np.testing.assert_array_equal(pixels, inside(whole, box), str(box))
    assert decoded > 50 or kind in ("4:1:1", "RGB")


@pytest.mark.parametrize("share", [0.015, 0.04])
@pytest.mark.parametrize("kind", ["4:2:0", "grey"])
def test_a_coarser_grid(kind, share, monkeypatch):
    decoder, rng = build(), np.random.default_rng(1)
    data = KINDS[kind](picture(240, 410, rng))
    whole, finest = decode_whole(data), indexed(data)
    monkeypatch.setattr(module, "_SHARE", share)
    found = indexed(data)
    assert len(found) <= share * len(data)
    assert len(found) < len(finest)
    for box in boxes(240, 410, 40, rng):
        np.testing.assert_array_equal(decode(decoder, data, found, box), inside(whole, box), str(box))


@pytest.mark.parametrize("orientation", [2, 5, 6, 8])
def test_turned_images(orientation):
    turning, rng = build(exif=True), np.random.default_rng(orientation)
    data = with_orientation(KINDS["4:2:0"](picture(200, 272, rng)), orientation)
    whole, found = decode_whole(data, exif=True), indexed(data)
    for box in boxes(*whole.shape[:2], 8, rng):
        np.testing.assert_array_equal(decode(turning, data, found, box), inside(whole, box))


@pytest.mark.parametrize("precision", range(4))  # libjpeg takes all but 0 for 16 bits
def test_the_last_quantization_table_counts(precision):
    rng, box = np.random.default_rng(precision), (9, 5, 40, 30)
    table = rng.integers(1, 256, 64).astype(">u2" if precision else "u1")
    plain = by_opencv(picture(67, 53, rng))
    data = with_segment(plain, 0xDB, bytes([precision << 4]) + table.tobytes())
    whole = decode_whole(data)
    assert (whole != decode_whole(plain)).any()
    np.testing.assert_array_equal(decode_part(data, indexed(data), box), inside(whole, box))


@pytest.mark.parametrize("factors", [0x12, 0x21, 0x22, 0x33])
def test_grey_of_any_factors(factors):
    data, box = bytearray(KINDS["grey"](picture(67, 53, np.random.default_rng(factors)))), (9, 5, 58, 48)
    data[data.index(b"\xff\xc0") + 11] = factors
    whole = decode_whole(bytes(data))
    np.testing.assert_array_equal(decode_part(bytes(data), indexed(bytes(data)), box), inside(whole, box))


@pytest.mark.parametrize("box", [(-1, 0, 9, 9), (0, -1, 9, 9), (195, 0, 9, 9), (0, 0, 9, 273), (-(2**63), 0, 9, 9)])
def test_boxes_outside_are_refused(box):
    data = KINDS["4:2:0"](picture(200, 272, np.random.default_rng(0)))
    assert decode_part(data, indexed(data), box) is None


def damages(data: bytes, count: int, rng: np.random.Generator) -> Iterator[bytes]:
    """One to three other bytes, some inserted, some left out, or the end."""
    for number in range(count):
        damaged, at = bytearray(data), int(rng.integers(0, len(data)))
        if number % 4 == 1:
            damaged[at:at] = rng.bytes(1 + number % 3)
        elif number % 4 == 2:
            del damaged[at : at + 1 + number % 3]
        elif number % 16 == 3:
            del damaged[at:]
        else:
            damaged[at] ^= int(rng.integers(1, 256))
        yield bytes(damaged)


def outcome(decoder: PlainDecoder, data: bytes, found: bytes | None, box: Box) -> bytes | str:
    try:
        return decode(decoder, data, found, box).tobytes()
    except (DataError, ValueError) as error:
        return str(error)


def check_damaged_indexes(kind: str, count: int, rng: np.random.Generator) -> None:
    """Whatever has happened to an index, the pixels are the same."""
    decoder = build()
    data = KINDS[kind](picture(120, 170, rng))
    found, whole = indexed(data), decode_whole(data)
    for damaged, box in zip(damages(found, count, rng), boxes(120, 170, count, rng)[7:], strict=True):
        np.testing.assert_array_equal(decode(decoder, data, damaged, box), inside(whole, box))


def check_damaged_files(kind: str, count: int, rng: np.random.Generator) -> None:
    """A file that has changed since is decoded, or refused, as if it had no index."""
    decoder = build()
    data = KINDS[kind](picture(120, 170, rng))
    found = indexed(data)
    for damaged, box in zip(damages(data, count, rng), boxes(120, 170, count, rng)[7:], strict=True):
        assert outcome(decoder, damaged, found, box) == outcome(decoder, damaged, None, box)


def check_indexes_of_damage(kind: str, count: int, rng: np.random.Generator) -> None:
    """An index made of a damaged file changes nothing of what the file gives as a whole; some can be made."""
    decoder, plain, made = build(), build(region=False), 0
    data = KINDS[kind](picture(120, 170, rng))
    for damaged, box in zip(damages(data, count, rng), boxes(120, 170, count, rng)[7:], strict=True):
        if (found := build_index(damaged)) is not None:
            made += 1
            assert outcome(decoder, damaged, found, box) == outcome(plain, damaged, None, box)
    assert made > 3 or kind not in ("4:2:0", "grey")


@pytest.mark.parametrize(
    ("kind", "turns"),
    [*((kind, 1) for kind in ("4:2:0", "grey", "optimised"))]
    + [pytest.param(kind, 6, marks=pytest.mark.nightly) for kind in KINDS],
)
def test_damage(kind, turns):
    rng = np.random.default_rng(5)
    for _ in range(turns):
        check_damaged_indexes(kind, 60, rng)
        check_damaged_files(kind, 60, rng)
        check_indexes_of_damage(kind, 60, rng)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", KINDS)
def test_many_crops(kind, monkeypatch):
    rng, decoder = np.random.default_rng(8), build()
    for number in range(100):
        height, width = (int(side) for side in rng.integers(1, 500, 2))
        data = KINDS[kind](picture(height, width, rng))
        monkeypatch.setattr(module, "_SHARE", (2.0, 0.2, 0.1, 0.05)[number % 4])
        entropy = build_index(data)
        whole = decode_whole(data)
        for box in boxes(height, width, 7, rng) if entropy else ():
            np.testing.assert_array_equal(decode(decoder, data, entropy, box), inside(whole, box), f"{number} {box}")

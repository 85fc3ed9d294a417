"""What every decoder has to do with a box: the pixels of the whole image inside it, to the bit."""

import itertools
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import cv2
import numpy as np
import pytest
from images import encode, photo
from jpegs import decode_part
from numpy.typing import NDArray
from plans import pairwise

from effloop.data.decode import DecodeConfig, Decoder, decoders
from effloop.data.image.header import read_header
from effloop.data.image.jpeg import Layout, read_layout, with_interval_lengths
from effloop.data.image.orientation import with_orientation
from effloop.data.image.pixels import resize_into
from effloop.errors import ConfigError, DataError

SIZES = [(67, 53), (128, 96), (33, 176), (200, 272), (16, 16), (1, 1), (250, 7)]
"""(height, width); 53 and 272 pixels are a prime number of MCUs, 4 and 17, at 16 pixels each."""
SAMPLINGS = ["4:4:4", "4:2:2", "4:2:0", "4:4:0", "grey"]


@cache
def jpeg(height: int, width: int, sampling: str, interval: int) -> bytes:
    """A photograph with these chroma samples and a restart marker every `interval` MCUs."""
    pixels = photo(height, width, seed=height)
    if sampling == "grey":
        return encode(pixels, "JPEG", "L", quality=90, restart_marker_blocks=interval)
    factors = {"4:4:4": 0x111111, "4:2:2": 0x211111, "4:2:0": 0x221111, "4:4:0": 0x121111}
    options = [cv2.IMWRITE_JPEG_SAMPLING_FACTOR, factors[sampling], cv2.IMWRITE_JPEG_RST_INTERVAL, interval]
    return cv2.imencode(".jpg", pixels, options)[1].tobytes()


def laid_out(data: bytes) -> Layout:
    layout = read_layout(data)
    assert layout is not None
    return layout


def lengths_at(layout: Layout) -> int:
    return layout.sos_at - 2 * layout.lengths


def indexed(data: bytes) -> bytes:
    """With the lengths of its intervals in it."""
    return with_interval_lengths(data)


def boxes(height: int, width: int, count: int = 12) -> list[tuple[int, int, int, int]]:
    """The whole, every corner and border, and some anywhere."""
    edges = [(0, 0, height, width), (0, 0, 1, 1), (height - 1, width - 1, 1, 1), (0, width - 1, height, 1)]
    edges += [(height - 1, 0, 1, width), (0, 0, (height + 1) // 2, width), (height // 2, 0, -(-height // 2), width)]
    rng = np.random.default_rng(height * width)
    for _ in range(count):
        top, left = rng.integers(0, height), rng.integers(0, width)
        edges.append((top, left, rng.integers(1, height - top + 1), rng.integers(1, width - left + 1)))
    return [tuple(int(number) for number in box) for box in edges]  # type: ignore[misc]


@pytest.fixture(params=decoders.names())
def decoder(request: pytest.FixtureRequest) -> Decoder:
    try:
        return decoders.build(DecodeConfig(request.param, region=True))
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(("sampling", "interval"), [*zip(itertools.cycle(SAMPLINGS), 2 * (0, 1, 2, 3, 4, 11, 17))])
def test_a_region_is_cut_from_the_whole(decoder, sampling, interval):
    for height, width in SIZES:
        plain = jpeg(height, width, sampling, interval)
        whole = decoders.build(replace(decoder.config, region=False)).decode(plain)
        assert whole.shape == (height, width, 3)
        for data in (plain, indexed(plain)):
            for box in boxes(height, width):
                top, left, h, w = box
                np.testing.assert_array_equal(
                    decoder.decode(data, box), whole[top : top + h, left : left + w], str(box)
                )


@pytest.mark.parametrize("interval", [0, 2])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_region_of_a_turned_image(decoder, orientation, interval):
    turning = decoders.build(replace(decoder.config, exif=True))  # type: ignore[attr-defined]
    data = with_orientation(indexed(jpeg(200, 272, "4:2:0", interval)), orientation)
    whole = turning.decode(data)
    assert whole.shape == ((200, 272, 3) if orientation < 5 else (272, 200, 3))
    for top, left, h, w in boxes(*whole.shape[:2]):
        np.testing.assert_array_equal(turning.decode(data, (top, left, h, w)), whole[top : top + h, left : left + w])


def with_damage(data: bytes, keep: set[int]) -> bytes:
    """The JPEG with every second bit flipped in all restart intervals but those with these numbers."""
    at, parts = laid_out(data).scan_at, []
    for number, part in enumerate(re.split(rb"(\xff[\xd0-\xd7])", data[at:-2])[::2]):
        flipped = bytes(byte ^ 0x55 for byte in part.replace(b"\xff\0", b"\1")).replace(b"\xff", b"\1")
        parts.append(part if number in keep else flipped)
    markers = [bytes([0xFF, 0xD0 + number % 8]) for number in range(len(parts) - 1)]
    return data[:at] + b"".join(itertools.chain(*zip(parts, [*markers, data[-2:]], strict=True)))


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_only_what_a_box_needs_is_decoded(decoder, sampling):
    data, box = jpeg(240, 288, sampling, 3), (96, 110, 32, 40)
    height = 16 if sampling in ("4:2:0", "4:4:0") else 8
    width = 3 * (16 if sampling in ("4:2:0", "4:2:2") else 8)  # of an interval
    rows = range(94 // height, -(-130 // height))  # interpolated chroma needs another sample on each side
    columns = range(108 // width, -(-152 // width))
    damaged = with_damage(data, {row * (288 // width) + column for row in rows for column in columns})
    assert decode_part(damaged, None, (0, 0, 240, 288)) is None
    np.testing.assert_array_equal(decode_part(damaged, None, box), decoder.decode(data, box))


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_lengths_of_the_intervals_stand_in_the_file(decoder, sampling):
    plain = jpeg(240, 288, sampling, 3)
    data = indexed(plain)
    layout = laid_out(data)
    assert layout.lengths == 1 + len(re.findall(rb"\xff[\xd0-\xd7]", plain[laid_out(plain).scan_at :]))
    assert len(data) == len(plain) + 12 + 2 * layout.lengths
    assert indexed(data) == data
    np.testing.assert_array_equal(decode_part(data, None, (9, 8, 99, 111)), decode_part(plain, None, (9, 8, 99, 111)))
    np.testing.assert_array_equal(decoder.decode(data), decoder.decode(plain))


def test_lengths_that_are_wrong_are_not_believed(decoder):
    plain = jpeg(240, 288, "4:2:0", 3)
    data, box = bytearray(indexed(plain)), (100, 110, 30, 40)
    at = lengths_at(laid_out(bytes(data)))
    data[at] += 1  # of the first interval, so that all the rest is shifted
    assert decode_part(bytes(data), None, box) is None
    data[at + 2] -= 1  # only intervals that the box doesn't need
    assert decode_part(bytes(data), None, box) is None
    np.testing.assert_array_equal(decoder.decode(bytes(data), box), decoder.decode(plain, box))


def lies(lengths: NDArray[np.uint16], rng: np.random.Generator) -> Iterator[NDArray[np.uint16]]:
    """Lengths of the same sum, whose intervals end in markers, though not in those that belong there."""
    moved = lengths.copy()  # eight intervals as one, so that the markers' numbers fit again, and eight of nothing
    moved[0], moved[1:8] = lengths[:8].sum(), 0
    yield moved
    yield np.roll(lengths, 8)
    yield lengths[::-1].copy()
    for _ in range(20):
        yield rng.permutation(lengths)
        at, by = rng.integers(0, len(lengths) - 1), rng.integers(-9, 9)
        changed = lengths.copy()
        changed[at] += by
        changed[at + 1] -= by
        yield changed


def test_lengths_that_lie_change_no_pixel(decoder):
    """Of a sound image: the whole is the same, and so is every region."""
    rng = np.random.default_rng(3)
    plain = jpeg(240, 288, "4:2:0", 3)
    layout, whole = laid_out(indexed(plain)), decoder.decode(plain)
    true = np.frombuffer(indexed(plain), "<u2", layout.lengths, lengths_at(layout))
    for lengths in lies(true, rng):
        data = bytearray(indexed(plain))
        data[lengths_at(layout) : layout.sos_at] = lengths.astype("<u2").tobytes()
        for top, left, h, w in boxes(240, 288, 3):
            found = decoder.decode(bytes(data), (top, left, h, w))
            np.testing.assert_array_equal(found, whole[top : top + h, left : left + w])


@pytest.mark.parametrize(
    "data",
    [
        encode(photo(), "JPEG", progressive=True, restart_marker_blocks=1),
        encode(photo(), "JPEG", "CMYK", restart_marker_blocks=1),
        encode(photo(), "PNG"),
        b"\xff\xd8\xff",
        b"\xff\xd8\xff\xda",
        b"",
    ],
)
def test_what_has_no_layout(data):
    assert read_layout(data) is None


def test_progressive_and_cmyk_are_decoded_whole(decoder):
    for options in ({"progressive": True}, {"mode": "CMYK"}):
        data = encode(photo(), "JPEG", restart_marker_blocks=1, **options)  # type: ignore[arg-type]
        np.testing.assert_array_equal(decoder.decode(data, (9, 8, 30, 20)), decoder.decode(data)[9:39, 8:28])


def test_markers_out_of_order_and_missing_ones_are_left_to_libjpeg(decoder):
    data = jpeg(64, 64, "4:2:0", 1)
    at = data.index(b"\xff\xd3")
    for damaged in (data[: at + 1] + b"\xd5" + data[at + 2 :], data[:at] + data[at + 2 :]):
        assert decode_part(damaged, None, (0, 0, 8, 8)) is None
        assert _outcome(decoder, damaged, (0, 0, 8, 8)) == _outcome(decoder, damaged, None)


def test_cut_files_are_refused_as_ever(decoder):
    for interval in (0, 1):
        data = jpeg(64, 64, "4:2:0", interval)[:-200]
        with pytest.raises(DataError, match=r"^is a truncated JPEG: ends after [\d,]+ bytes without its end marker$"):
            decoder.decode(data, (0, 0, 8, 8))


@pytest.mark.parametrize("factors", [0x00, 0x20, 0x02])
def test_blocks_of_no_size_are_damage(decoder, factors):
    for interval in (0, 1):
        data = bytearray(jpeg(200, 272, "4:2:0", interval))
        data[read_header(bytes(data)).sof_at + 11] = factors
        assert read_layout(bytes(data)) is None
        with pytest.raises(DataError, match="is a damaged JPEG"):
            decoder.decode(bytes(data), (9, 8, 30, 20))


def test_stray_markers_above_the_lower_edge_are_damage(decoder):
    """Where decoding the whole refuses them, decoding its top must, too."""
    plain = decoders.build(replace(decoder.config, region=False))  # type: ignore[attr-defined]
    data, rng = jpeg(200, 272, "4:2:0", 0), np.random.default_rng(0)
    refused = 0
    for at in rng.integers(laid_out(data).scan_at, len(data) - 400, 60).tolist():
        damaged = bytearray(data)
        damaged[at : at + 2] = 0xFF, int(rng.integers(1, 255))
        outcome = _outcome(plain, bytes(damaged), (0, 0, 150, 100))
        assert _outcome(decoder, bytes(damaged), (0, 0, 150, 100)) == outcome
        refused += isinstance(outcome, str)
    assert refused > 20


def test_a_narrow_right_edge(decoder):
    """libjpeg doesn't interpolate chroma of one or two samples."""
    for width in (*range(481, 486), *range(177, 183)):
        data = jpeg(40, width, "4:2:0", 1)
        whole = decoder.decode(data)
        for left in range(width - 6, width):
            np.testing.assert_array_equal(decoder.decode(data, (5, left, 30, width - left)), whole[5:35, left:])


@pytest.mark.parametrize("interval", [0, 1])
def test_damage_gives_pixels_or_a_line(decoder, interval):
    data = jpeg(64, 96, "4:2:0", interval)
    rng = np.random.default_rng(interval)
    for _ in range(200):
        damaged = bytearray(data)
        for at in rng.integers(2, len(data), rng.integers(1, 4)):
            damaged[at] = rng.integers(0, 256)
        outcome = _outcome(decoder, bytes(damaged), (10, 20, 30, 40))
        assert outcome == (30, 40, 3) or isinstance(outcome, str)


def _outcome(decoder: Decoder, data: bytes, box: tuple[int, int, int, int] | None) -> str | tuple[int, ...]:
    """The shape of a box's pixels, or the line that refuses them."""
    try:
        pixels = decoder.decode(data, box)
    except (DataError, ValueError) as error:
        if isinstance(error, ValueError) and "is not inside an image" not in str(error):
            raise
        return str(error)
    return pixels.shape if box else (8, 8, 3)


class TestDctScaling:
    """Permission to decode at a smaller scale: never smaller than what is wanted, and nearly the same picture."""

    @pytest.mark.parametrize(
        ("name", "sampling", "interval", "region"), pairwise(decoders.names(), SAMPLINGS, [0, 2], [True, False])
    )
    def test_nearly_the_same(self, name, sampling, interval, region):
        exact, scaled = (decoders.build(DecodeConfig(name, dct_scaling=on, region=region)) for on in (False, True))
        data = jpeg(410, 523, sampling, interval)
        for box, wanted in (((0, 0, 410, 523), (50, 60)), ((37, 41, 300, 401), (100, 100)), ((9, 8, 89, 77), (9, 9))):
            whole, region_ = exact.decode(data, box, wanted), scaled.decode(data, box, wanted)
            assert region_.shape[0] >= wanted[0]
            assert region_.shape[1] >= wanted[1]
            assert region_.size < whole.size / 3 or name in ("opencv", "pillow")
            one, other = np.empty((*wanted, 3), np.uint8), np.empty((*wanted, 3), np.uint8)
            resize_into(np.ascontiguousarray(whole), one)
            resize_into(np.ascontiguousarray(region_), other)
            assert np.abs(one.astype(float) - other).mean() < 4

    def test_not_below_what_is_wanted(self):
        scaled = decoders.build(DecodeConfig("turbojpeg", dct_scaling=True))
        data = jpeg(200, 272, "4:2:0", 0)
        np.testing.assert_array_equal(scaled.decode(data, (0, 0, 200, 272), (101, 100)), scaled.decode(data))
        np.testing.assert_array_equal(scaled.decode(data, (0, 0, 200, 272)), scaled.decode(data))
        assert scaled.decode(data, (0, 0, 200, 272), (100, 136)).shape == (100, 136, 3)
        for top in range(8):
            assert scaled.decode(data, (top, 0, 192, 272), (24, 24)).shape == (24, 34, 3)

import struct

import numpy as np
import pytest
from images import FORMATS, chunk, encode, exif, photo
from PIL import Image

from effloop.data.image.header import Header, extension, jpeg_sampling, pnm_header, pnm_pixels, read_header
from effloop.errors import DataError

PHOTO = photo()
SEEN_THROUGH = np.dstack([PHOTO, PHOTO[:, :, 0]])
JPEG = encode(PHOTO, "JPEG")


def segment(marker: int, payload: bytes) -> bytes:
    return bytes([0xFF, marker]) + struct.pack(">H", len(payload) + 2) + payload


def frame(marker: int, bits: int = 8, height: int = 5, width: int = 7, components: int = 3) -> bytes:
    """A JPEG that is nothing but a frame header."""
    payload = struct.pack(">BHHB", bits, height, width, components) + bytes(3 * components)
    return b"\xff\xd8" + segment(marker, payload) + b"\xff\xd9"


@pytest.mark.parametrize("mode", ["L", "RGB"])
@pytest.mark.parametrize("fmt", FORMATS)
def test_plain_images(fmt, mode):
    header = read_header(encode(PHOTO, fmt, mode))
    palette = fmt == "BMP" and mode == "L"  # a grey BMP is one of 256 colours
    assert header == Header(fmt, 67, 53, not palette, True)


@pytest.mark.parametrize(
    "data",
    [
        encode(PHOTO, "JPEG", "CMYK"),
        *(encode(PHOTO, "PNG", mode) for mode in ("1", "P", "LA", "RGBA", "I;16")),
        encode(PHOTO, "PNG", icc_profile=b"profile"),
        encode(PHOTO, "PNG", transparency=(0, 0, 0)),
        encode(SEEN_THROUGH, "WEBP"),
        encode(SEEN_THROUGH, "WEBP", lossless=True),
        encode(PHOTO, "BMP", "P"),
        encode(PHOTO, "BMP", "RGBA"),
    ],
)
def test_unusual_images(data):
    header = read_header(data)
    assert header == Header(header.format, 67, 53, False, True)


@pytest.mark.parametrize("lossless", [True, False])
def test_webp_whose_lengths_contradict_each_other_is_not_plain(lossless):
    data = bytearray(encode(PHOTO, "WEBP", lossless=lossless))
    assert read_header(data).plain
    data[16] ^= 0x40  # of the only chunk's length
    assert not read_header(data).plain


def test_frame_headers_of_jpegs():
    for marker in range(0xC0, 0xD0):
        if marker in (0xC4, 0xC8, 0xCC):  # tables
            tables = segment(marker, struct.pack(">BHHB", 8, 99, 99, 3))
            assert read_header(b"\xff\xd8" + tables + frame(0xC0)[2:]).height == 5
        else:
            assert read_header(frame(marker)) == Header("JPEG", 5, 7, marker in (0xC0, 0xC1, 0xC2), True)
    for bits, components, plain in ((8, 1, True), (8, 3, True), (8, 2, False), (8, 4, False), (12, 3, False)):
        assert read_header(frame(0xC1, bits=bits, components=components)).plain is plain


@pytest.mark.parametrize(
    "between", [b"\xff" * 5, b"junk", b"\xff\x00\x01", b"\xff\xd0", b"\xff\x01", b"\xff\xff\x00\xff"]
)
def test_between_segments(between):
    at = JPEG.index(b"\xff\xdb")
    assert read_header(JPEG[:at] + between + JPEG[at:]) == read_header(JPEG)


def test_thumbnail_in_exif_is_not_the_image():
    thumbnail = encode(photo(8, 8), "JPEG")
    header = read_header(encode(PHOTO, "JPEG", exif=exif(6) + thumbnail))
    assert (header.height, header.width) == (67, 53)


@pytest.mark.parametrize("fmt", FORMATS)
def test_complete_only_with_its_end(fmt):
    data = encode(PHOTO, fmt)
    for kind in (bytes, bytearray, memoryview):
        assert read_header(kind(data)).complete
    assert not read_header(data[:-1]).complete
    assert not read_header(data[: len(data) // 2 + 30]).complete


@pytest.mark.parametrize("fmt", FORMATS)
def test_cut_header(fmt):
    data = encode(PHOTO, fmt)
    for end in range(12, 18):
        with pytest.raises(DataError, match=f"is a truncated {fmt}: ends after {end} bytes, within its header"):
            read_header(data[:end])


@pytest.mark.parametrize(
    ("data", "line"),
    [
        (b"", r"is empty \(0 bytes\)"),
        (memoryview(b""), r"is empty \(0 bytes\)"),
        (b"<html>\n", r"is not an image that Pillow reads; starts with b'<html>\\n'"),
        (b"P6\n", "is a truncated PNM: ends after 3 bytes, within its header"),
        (b"P5\nbut this is just a text", "is a damaged PNM: no size in its first line"),
        (b"P5\n0 1\n255\n" + bytes(9), r"is a damaged PNM: its header says 1 x 0 pixels \(height x width\)"),
        (b"RIFF\0\0\0\0WAVEfmt ", r"is not an image .* starts with b'RIFF\\x00\\x00\\x00\\x00WAVE'"),
        (frame(0xC0, height=0), "is a damaged JPEG: its header says 0 x 7 pixels"),
        (JPEG[:2] + b"\xff\xd9", "is a truncated JPEG: ends after 4 bytes"),
        (JPEG[:2] + b"\xff\xda" + bytes(30), r"is a damaged JPEG: no frame header \(SOFn\)"),
        (JPEG[:2] + b"\xff\xe0\xff\xff" + bytes(300), "is a truncated JPEG: ends after 306 bytes"),
        (b"\x89PNG\r\n\x1a\n" + chunk(b"IDAT", bytes(30)), "is a damaged PNG: its first chunk is b'IDAT' of 30 bytes"),
        (b"RIFF\x20\0\0\0WEBPVP9 " + bytes(20), "is a damaged WEBP: no pixels' header in its first chunk, b'VP9 '"),
        (b"BM" + bytes(12) + struct.pack("<Iii", 40, -3, 5) + bytes(28), "is a damaged BMP: its header says 5 x -3"),
    ],
)
def test_refuses(data, line):
    with pytest.raises(DataError, match="^" + line) as caught:
        read_header(data)
    assert "\n" not in str(caught.value)


def test_bmp_from_the_top_down():
    data = bytearray(encode(PHOTO, "BMP"))
    struct.pack_into("<i", data, 22, -67)
    assert read_header(data) == Header("BMP", 67, 53, True, True)


def test_any_bytes_end_in_a_header_or_a_data_error():
    rng = np.random.default_rng(0)
    for fmt in FORMATS:
        whole = encode(photo(9, 8), fmt)
        for _ in range(300):
            data = bytearray(whole[: rng.integers(1, len(whole) + 1)])
            for at in rng.integers(0, len(data), 4):
                data[at] = rng.integers(256)
            try:
                read_header(data)
            except DataError as error:
                assert str(error).startswith("is ")  # noqa: PT017  most are taken


@pytest.mark.parametrize(("mode", "kind"), [("L", "pgm"), ("RGB", "ppm")])
def test_raw_pixels(mode, kind):
    data = encode(PHOTO, "PPM", mode)
    channels = 3 if mode == "RGB" else 1
    assert data[: len(data) - 67 * 53 * channels] == pnm_header(67, 53, channels)
    header = read_header(data)
    assert header == Header("PNM", 67, 53, True, True)
    assert extension(data) == kind
    wanted = np.asarray(Image.fromarray(PHOTO).convert(mode)).reshape(67, 53, channels)
    np.testing.assert_array_equal(pnm_pixels(data, header), wanted)
    assert not read_header(data[:-1]).complete
    assert not read_header(data + b"\n").complete


def test_raw_pixels_as_others_write_them():
    assert read_header(b"P5\n# by hand\n2 1\n255\nab") == Header("PNM", 1, 2, True, True)
    assert read_header(b"P6 2 1 65535\n" + bytes(12)) == Header("PNM", 1, 2, False, True)


@pytest.mark.parametrize(
    ("data", "kind"), [*((encode(PHOTO, fmt), fmt.lower()) for fmt in FORMATS if fmt != "JPEG"), (JPEG, "jpg")]
)
def test_extension(data, kind):
    assert extension(data) == kind


@pytest.mark.parametrize(("subsampling", "first"), [(0, (1, 1)), (1, (2, 1)), (2, (2, 2))])
def test_sampling_of_a_jpeg(subsampling, first):
    assert jpeg_sampling(encode(PHOTO, "JPEG", subsampling=subsampling)) == [first, (1, 1), (1, 1)]
    assert jpeg_sampling(encode(PHOTO, "JPEG", progressive=True, exif=exif(6))) == [(2, 2), (1, 1), (1, 1)]
    assert len(jpeg_sampling(encode(PHOTO, "JPEG", "L"))) == 1
    assert len(jpeg_sampling(encode(PHOTO, "JPEG", "CMYK"))) == 4


def test_sampling_that_is_cut():
    whole = encode(PHOTO, "JPEG")
    at = whole.index(b"\xff\xc0")
    for end in range(at, at + 18):
        with pytest.raises(DataError, match="is a truncated JPEG"):
            jpeg_sampling(whole[:end])

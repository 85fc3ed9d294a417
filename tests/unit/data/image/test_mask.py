import io
import struct
import zlib

import numpy as np
import pytest
from masked import mask_of
from numpy.typing import NDArray
from PIL import Image

from effloop.data.image.header import pnm_header
from effloop.data.image.mask import MaskFormat, check_size, decode_mask, encode_mask, mask_size, png_bytes, resize_mask
from effloop.errors import DataError

COLOURS = ((0, 0, 0), (255, 0, 7), (1, 2, 3))


def as_png(image: Image.Image, fmt: str = "PNG", **options: int) -> bytes:
    file = io.BytesIO()
    image.save(file, fmt, **options)
    return file.getvalue()


def palette(values: NDArray[np.uint8], bits: int) -> bytes:
    image = Image.fromarray(values)
    image.putpalette([(7 * value) % 256 for value in range(3 << bits)])
    return as_png(image, bits=bits)


def test_values_are_as_they_are_stored():
    generator = np.random.default_rng(0)
    for bits in (1, 2, 4, 8):
        values = generator.integers(0, 1 << bits, (37, 53), dtype=np.uint8)
        np.testing.assert_array_equal(decode_mask(palette(values, bits)), values)
    np.testing.assert_array_equal(decode_mask(as_png(Image.fromarray(values))), values)
    two = values > 99
    np.testing.assert_array_equal(decode_mask(as_png(Image.fromarray(two))), two)  # of 1 bit
    transparent = as_png(Image.fromarray(values), transparency=3)  # a chunk that decoders make a channel of
    np.testing.assert_array_equal(decode_mask(transparent), values)


@pytest.mark.parametrize("mode", ["RGB", "RGBA"])
def test_colours(mode):
    classes = np.random.default_rng(1).integers(0, 3, (9, 11))
    data = as_png(Image.fromarray(np.array(COLOURS, np.uint8)[classes]).convert(mode))
    np.testing.assert_array_equal(decode_mask(data, MaskFormat(colors=COLOURS)), classes)
    ignored = decode_mask(data, MaskFormat(colors=COLOURS[:2], ignored=COLOURS[2:]))
    np.testing.assert_array_equal(ignored, np.where(classes == 2, 255, classes))
    with pytest.raises(DataError, match=r"^has a mask with the colour 1 2 3 \(row \d+, column \d+\), which "):
        decode_mask(data, MaskFormat(colors=COLOURS[:2]))
    with pytest.raises(DataError, match=r"^has a mask in RGB, whose colours say no class; set data=masks data\.colors"):
        decode_mask(data)


def test_zero_may_be_what_is_not_counted():
    values = np.array([[0, 1, 150, 255]], np.uint8)
    assert decode_mask(png_bytes(values), MaskFormat(reduce_zero=True)).tolist() == [[255, 0, 149, 255]]
    table = (255, 7, *[3] * 254)
    assert decode_mask(png_bytes(values), MaskFormat(table=table)).tolist() == [[255, 7, 3, 3]]


def test_the_smallest_form_is_chosen():
    generator = np.random.default_rng(2)
    made = {
        b"P5": generator.integers(0, 256, (20, 30), dtype=np.uint8),
        b"EFFLRUNS": np.full((20, 30), 9, np.uint8),
        b"\x89PNG": mask_of(90, 70, 3),
    }
    for start, mask in made.items():
        data = encode_mask(mask)
        assert data.startswith(start)
        assert mask_size(data) == mask.shape
        np.testing.assert_array_equal(decode_mask(data), mask)


def test_resized_to_the_nearest_pixel():
    torch = pytest.importorskip("torch")
    mask = mask_of(50, 70, 4)
    for size in ((25, 35), (31, 17), (50, 70), (1, 1), (99, 140)):
        wanted = torch.nn.functional.interpolate(torch.from_numpy(mask)[None, None], size, mode="nearest-exact")
        np.testing.assert_array_equal(resize_mask(mask, *size), wanted[0, 0].numpy())


GREY = png_bytes(np.zeros((4, 5), np.uint8))


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "that is empty"),
        (b"text", "that is not an image|that is no image"),
        (as_png(Image.new("L", (5, 4)), "JPEG"), "in JPEG; allowed are PNG and PNM"),
        (GREY[:-20], "that is a truncated PNG"),
        (GREY[:45] + b"x" + GREY[46:], "that is a damaged PNG: its chunk b'IDAT' doesn't match its checksum"),
        (as_png(Image.fromarray(np.zeros((4, 5), np.uint16))), "that is a PNG of 16 bits; allowed are 1 to 8"),
        (as_png(Image.new("LA", (4, 5))), "that is a PNG in grey with alpha; allowed are"),
        (pnm_header(4, 5, 1) + bytes(19), "that is no whole PNM"),
        (b"P5\n5 4\n65535\n" + bytes(40), "that is no whole PNM of 8 bits: 53 bytes"),
        (pnm_header(1 << 15, 1 << 15, 1), r"of 32,768 x 32,768 pixels; allowed are"),
        (b"EFFLRUNS" + bytes([2, 0, 0, 0] * 2 + [1, 0, 0, 0, 9, 0, 0, 0, 1]), "that is damaged: its runs don't add up"),
    ],
)
def test_refused(data, says):
    with pytest.raises(DataError, match=f"^has a mask ({says})"):
        decode_mask(data)


@pytest.mark.parametrize("more", [1, 60])
def test_more_pixels_than_the_header_says_are_left_out(more):
    """Of a few rows, all of which are looked at for their filters."""
    chunks = {
        b"IHDR": struct.pack(">IIBBBBB", 5, 2, 8, 0, 0, 0, 0),
        b"IDAT": zlib.compress(bytes(12 + more)),
        b"IEND": b"",
    }
    data = b"\x89PNG\r\n\x1a\n"
    for kind, payload in chunks.items():
        data += struct.pack(">I", len(payload)) + kind + payload + struct.pack(">I", zlib.crc32(kind + payload))
    assert decode_mask(data).tolist() == [[0] * 5] * 2


def test_sizes_that_differ():
    with pytest.raises(DataError, match=r"^has a mask of 4 x 5 pixels \(.*\), the image has 5 x 3; .* same size$"):
        check_size((4, 5), 5, 3)
    with pytest.raises(DataError, match=r"decode\.exif=true or false, as the mask was drawn"):
        check_size((4, 5), 5, 4)

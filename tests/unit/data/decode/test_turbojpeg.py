from dataclasses import replace

import numpy as np
import pytest
from images import FORMATS, encode, photo
from jpegs import KINDS, Box, Pixels, boxes, by_opencv, by_pillow, decode_part, picture

from effloop.data.decode import DecodeConfig, common, turbojpeg
from effloop.data.decode.base import Resizes
from effloop.data.decode.common import PillowDecoder
from effloop.data.decode.opencv import OpenCVDecoder
from effloop.data.decode.turbojpeg import AutoDecoder, TurboJPEGDecoder
from effloop.data.image.encoded import EncodedImages
from effloop.data.image.header import Header, read_header
from effloop.data.image.jpeg import build_index
from effloop.data.image.pixels import resize_into
from effloop.errors import DataError

simplejpeg = pytest.importorskip("simplejpeg")

PHOTO = photo()


def test_what_libjpeg_warns_about_is_left_to_pillow():
    data = bytearray(encode(PHOTO, "JPEG"))
    at = data.index(b"\xff\xda") + 60
    data[at : at + 30] = b"\x11" * 30
    decoder = TurboJPEGDecoder(DecodeConfig("turbojpeg"))
    assert decoder._compiled(data, read_header(data), (0, 0, *PHOTO.shape[:2]), None) is None
    np.testing.assert_array_equal(decoder.decode(data), PillowDecoder(DecodeConfig("pillow")).decode(data))


def test_auto_takes_the_fastest(capfd):
    for fmt in FORMATS:
        data = encode(PHOTO, fmt)
        other = turbojpeg.TurboJPEGDecoder if fmt == "JPEG" else OpenCVDecoder
        np.testing.assert_array_equal(
            AutoDecoder(DecodeConfig("auto")).decode(data), other(DecodeConfig("turbojpeg")).decode(data)
        )
    assert capfd.readouterr() == ("", "")


# JPEGs decoded by the C parts: the pixels of simplejpeg to the bit, or nothing.

if not turbojpeg.use_libjpeg():
    pytest.skip("Pillow brings no libjpeg-turbo", allow_module_level=True)

MORE = {
    "progressive": by_pillow(progressive=True, quality=80),
    "progressive grey": by_pillow(mode="L", progressive=True),
    "restarts": by_pillow(restart_marker_blocks=2, quality=85),
    "restarts that don't end with rows": by_pillow(restart_marker_blocks=7, quality=85),
}
SIZES = [(200, 272), (67, 53), (17, 130), (8, 8), (1, 1)]


def _without(data: bytes, kind: int) -> bytes:
    """The JPEG without the segments of a kind."""
    kept, at = data[:2], 2
    while data[at + 1] != 0xDA:
        end = at + 2 + int.from_bytes(data[at + 2 : at + 4], "big")
        kept, at = kept + data[at:end] * (data[at + 1] != kind), end
    return kept + data[at:]


@pytest.mark.parametrize("kind", [0xC4, 0xDB], ids=["Huffman", "quantization"])
def test_tables_of_the_image_before_are_forgotten(kind):
    decoder = TurboJPEGDecoder(DecodeConfig("turbojpeg"))
    plain = by_opencv(picture(64, 64, np.random.default_rng(0)))
    outcomes = set()
    for before in (plain, by_opencv(picture(64, 64, np.random.default_rng(1)), quality=30, optimize=1)):
        decoder.decode(before)
        try:
            outcomes.add(decoder.decode(_without(plain, kind)).tobytes())
        except DataError:
            outcomes.add(b"refused")
    assert outcomes == {b"refused" if kind == 0xDB else decoder.decode(plain).tobytes()}


@pytest.mark.parametrize("factor", [1, 2])
def test_damage_that_only_libjpeg_accepts_is_decoded_by_it(factor):
    """It doesn't warn of coefficients past the end of a block, for instance."""
    rng, box = np.random.default_rng(0), (0, 0, 64, 64)
    plain, accepted = by_opencv(picture(64, 64, rng), quality=60), 0
    least, small = (64 // factor, 64 // factor), (0, 0, 64 // factor, 64 // factor)
    for _ in range(4000):
        damaged = bytearray(plain)
        damaged[rng.integers(plain.index(b"\xff\xda") + 14, len(plain) - 2)] ^= 1 << int(rng.integers(8))
        if decode_part(bytes(damaged), None, small, factor=factor) is not None:
            continue
        header, reference = read_header(bytes(damaged)), DecodeConfig("turbojpeg", dct_scaling=True, region=False)
        wanted = TurboJPEGDecoder(reference)._compiled(bytes(damaged), header, box, least)
        np.testing.assert_array_equal(by_c(bytes(damaged), header, box, least), wanted)
        accepted += wanted is not None
    assert accepted


def test_a_run_of_images_with_indexes_and_without():
    """Those without are decoded several at a time, each as if it were alone, whatever the others are."""
    rng, decoder = np.random.default_rng(0), TurboJPEGDecoder(DecodeConfig("turbojpeg"))
    kinds = ["4:2:0", "4:4:4", "grey", "progressive", "4:2:2", "restarts", "damaged", "RGB", "4:4:0", "4:2:0"]
    images = [(KINDS | MORE).get(kind, KINDS["4:2:0"])(picture(200, 272, rng)) for kind in kinds]
    damaged = kinds.index("damaged")
    images[damaged] = images[damaged][:2000] + b"\xff\xd3" + images[damaged][2000:]
    encoded = EncodedImages.of(images)
    headers = decoder.read_infos(encoded)
    found = [build_index(data) if number % 3 == 1 else None for number, data in enumerate(images)]
    headers.indexes = EncodedImages.of([each or b"" for each in found])
    boxes = np.array([(number, 2 * number, 180, 200) for number in range(len(images))])
    flips, out = np.arange(len(images)) % 2 == 1, np.zeros((len(images), 96, 96, 3), np.uint8)
    done = decoder.decode_resized(encoded, headers, Resizes(boxes, flips, None, out))
    assert done.tolist() == [kind not in ("damaged", "RGB") for kind in kinds]  # which are left to Python
    for number in np.flatnonzero(done):
        top, left, height, width = boxes[number]
        expected = np.empty((96, 96, 3), np.uint8)
        resize_into(
            decoder.decode(images[number])[top : top + height, left : left + width], expected, bool(flips[number])
        )
        np.testing.assert_array_equal(out[number], expected, kinds[number])


def by_c(data: bytes, header: Header, box: Box, at_least: tuple[int, int] | None, channels: int = 3) -> Pixels | None:
    return TurboJPEGDecoder(DecodeConfig("turbojpeg", dct_scaling=True), channels)._compiled(
        data, header, box, at_least
    )


@pytest.mark.parametrize(
    ("kind", "channels"), [*((kind, 3) for kind in [*KINDS, *MORE]), ("4:2:0", 1), ("progressive", 1)]
)
def test_every_box_is_simplejpegs(kind, channels):
    rng, space = np.random.default_rng(0), "RGB" if channels == 3 else "GRAY"
    for size in SIZES:
        data = (KINDS | MORE)[kind](picture(*size, rng))
        header = read_header(data)
        for shown in (header, replace(header, index=build_index(data))):
            for box in boxes(*size, 5, rng):
                for least in (None, (max(1, box[2] // 3), max(1, box[3] // 3))):
                    got = by_c(data, shown, box, least, channels)
                    if got is None:
                        assert kind == "RGB" or (least and max(size) < 32)
                    else:
                        factor = common._scale_factor(box, least) if least else 1
                        rows, columns = (-(-side // factor) for side in size)
                        few = {"min_height": rows, "min_width": columns, "min_factor": factor} if factor > 1 else {}
                        top, left, height, width = common._scaled_box(box, factor)
                        wanted = simplejpeg.decode_jpeg(data, space, **few)[top : top + height, left : left + width]
                        np.testing.assert_array_equal(got, wanted, f"{size} {box} {least}")

"""What `convert` does to one image."""

import io
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from images import encode, exif, photo
from PIL import Image, JpegImagePlugin
from plans import line

from effloop.convert.reencode import Recipe, Recode, auto_interval, is_grey, shrink
from effloop.data.decode import decoders
from effloop.data.image.header import read_header
from effloop.data.image.jpeg import read_layout
from effloop.errors import DataError

DECODER = decoders.build(decoders["auto"].config(name="auto", exif=False))
UPRIGHT = decoders.build(decoders["auto"].config(name="auto"))
LARGE = photo(333, 250)
GREY = LARGE[:, :, 0]


def recode(data: bytes, **recipe: Any) -> bytes:
    return Recode(Recipe(**recipe), DECODER)(data)


def opened(data: bytes) -> JpegImagePlugin.JpegImageFile:
    image = Image.open(io.BytesIO(data))
    assert isinstance(image, JpegImagePlugin.JpegImageFile)
    return image


def psnr(one: bytes, other: bytes) -> float:
    difference = DECODER.decode(one).astype(float) - DECODER.decode(other)
    return float(10 * np.log10(255**2 / (difference**2).mean()))


def markers(jpeg: bytes) -> tuple[int, int, int]:
    """(MCUs between restart markers, as the DRI segment says; restart markers that are there; SOF marker)."""
    at, interval, frame = 2, 0, 0
    while jpeg[at + 1] != 0xDA:
        marker, length = jpeg[at + 1], int.from_bytes(jpeg[at + 2 : at + 4], "big")
        if marker == 0xDD:
            (interval,) = struct.unpack_from(">H", jpeg, at + 4)
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            frame = marker
        at += 2 + length
    scan = np.frombuffer(jpeg, np.uint8)[at:]
    behind = scan[1:][scan[:-1] == 0xFF]
    return interval, int(((behind >= 0xD0) & (behind <= 0xD7)).sum()), frame


class TestJpeg:
    def test_quality_and_restart_markers(self):
        jpeg = recode(encode(LARGE, "PNG"), quality=90)
        columns, rows = 16, 21  # of 16 x 16 pixels, for 250 x 333
        assert markers(jpeg) == (2, columns * rows // 2 - 1, 0xC0)
        image = opened(jpeg)
        assert (image.size, image.mode) == ((250, 333), "RGB")
        assert JpegImagePlugin.get_sampling(image) == 2  # 4:2:0
        assert image.quantization == opened(encode(LARGE, "JPEG", quality=90)).quantization

    def test_colours_are_kept(self):
        for fmt in ("PNG", "BMP"):
            assert psnr(recode(encode(LARGE, fmt), quality=95), encode(LARGE, "PNG")) > 28

    def test_optimised(self):
        plain = encode(DECODER.decode(encode(LARGE, "PNG")), "JPEG", quality=90, subsampling=2)
        assert len(recode(encode(LARGE, "PNG"), restart="none")) < len(plain)

    @pytest.mark.parametrize(("restart", "interval"), [("auto", 2), ("none", 0), (1, 1), (3, 2), (500, 16)])
    def test_restart(self, restart, interval):
        found, count, _ = markers(recode(encode(LARGE, "PNG"), restart=restart))
        assert found == interval
        assert count == (16 * 21 // interval - 1 if interval else 0)

    def test_small_images_are_made_anew_too(self):
        original = encode(photo(40, 64), "JPEG", quality=90)
        jpeg = recode(original, max_side=500)
        assert markers(jpeg) == (2, 5, 0xC0)
        assert opened(jpeg).size == (64, 40)

    def test_progressive_becomes_baseline(self):
        progressive = encode(LARGE, "JPEG", quality=90, progressive=True)
        assert markers(progressive)[2] == 0xC2
        assert recode(progressive) == recode(encode(LARGE, "JPEG", quality=90))

    def test_cmyk_becomes_rgb(self):
        cmyk = encode(LARGE, "JPEG", mode="CMYK", quality=95)
        jpeg = recode(cmyk, quality=95)
        assert opened(jpeg).mode == "RGB"
        assert psnr(jpeg, cmyk) > 28

    @pytest.mark.parametrize("quality", [90, "source"])
    def test_metadata_is_dropped_but_for_the_orientation(self, quality):
        block = Image.Exif()
        block[0x0112], block[0x010F] = 6, "a maker"
        jpeg = recode(encode(LARGE, "JPEG", exif=block), quality=quality)
        assert opened(jpeg).size == (250, 333)
        assert dict(opened(jpeg).getexif()) == {0x0112: 6}
        layout = read_layout(jpeg)
        assert layout is not None
        assert layout.lengths
        assert dict(opened(recode(encode(LARGE, "JPEG"))).getexif()) == {}

    @pytest.mark.parametrize("payload", ["jpeg", "raw"])
    def test_what_is_turned_is_not_turned_again(self, payload):
        data = encode(LARGE, "JPEG", exif=exif(6), quality=99)
        again = Recode(Recipe(payload=payload, quality=99), UPRIGHT)(data)
        assert DECODER.size(again) == UPRIGHT.size(again) == UPRIGHT.size(data) == (250, 333)
        assert np.abs(UPRIGHT.decode(again).astype(int) - UPRIGHT.decode(data)).mean() < 2

    def test_too_large(self):
        wide = encode(np.zeros((1, 65_501, 3), np.uint8), "PNG")
        wanted = (
            "is too large for a JPEG: 1 x 65501 (height x width); allowed are 65,500 pixels a side: "
            "set max_side or payload=raw"
        )
        with pytest.raises(DataError, match=line(wanted)):
            recode(wide)
        assert opened(recode(wide, max_side=65_500)).size == (65_500, 1)

    def test_damaged(self):
        with pytest.raises(DataError, match=r"^is a truncated JPEG: ends after 3,000 bytes"):
            recode(encode(LARGE, "JPEG")[:3000])


class TestGrey:
    @pytest.mark.parametrize("fmt", ["JPEG", "PNG"])
    @pytest.mark.parametrize("quality", [90, "source"])
    def test_stays_grey(self, fmt, quality):
        jpeg = recode(encode(GREY, fmt), quality=quality)
        assert opened(jpeg).mode == "L"
        assert markers(jpeg) == (4, 32 * 42 // 4 - 1, 0xC0)  # an MCU is 8 x 8 pixels
        assert psnr(jpeg, encode(GREY, fmt)) > 36

    def test_to_rgb(self):
        jpeg = recode(encode(GREY, "PNG"), color="rgb")
        assert opened(jpeg).mode == "RGB"
        assert psnr(jpeg, encode(GREY, "PNG")) > 36

    @pytest.mark.parametrize("quality", [90, "source"])
    def test_from_rgb(self, quality):
        original = encode(LARGE, "JPEG", quality=90)
        jpeg = recode(original, color="gray", quality=quality)
        assert opened(jpeg).mode == "L"
        wanted = np.asarray(Image.open(io.BytesIO(original)).convert("L"), float)
        assert np.abs(DECODER.decode(jpeg)[:, :, 0] - wanted).mean() < 4

    def test_what_is_grey(self):
        for data, wanted in (
            (encode(GREY, "JPEG"), True),
            (encode(GREY, "PNG"), True),
            (encode(GREY, "PNG", mode="LA"), True),
            (encode(GREY, "PNG", mode="P"), False),
            (encode(LARGE, "PNG"), False),
            (encode(LARGE, "JPEG"), False),
            (encode(GREY, "BMP"), False),
            (encode(GREY, "WEBP"), False),
            (encode(GREY, "PPM"), True),
            (encode(LARGE, "PPM"), False),
        ):
            assert is_grey(data, read_header(data)) is wanted


class TestRaw:
    def test_pixels_are_those_of_training(self):
        original = encode(LARGE, "JPEG")
        raw = recode(original, payload="raw")
        assert raw[:15] == b"P6\n250 333\n255\n"
        np.testing.assert_array_equal(DECODER.decode(raw), DECODER.decode(original))

    def test_grey_is_a_third(self):
        raw = recode(encode(GREY, "PNG"), payload="raw")
        assert raw == b"P5\n250 333\n255\n" + GREY.tobytes()

    def test_recipe_says_nothing_of_jpeg(self):
        assert Recipe(payload="raw", max_side=9).about() == {"payload": "raw", "max_side": 9, "color": None}


class TestSource:
    @pytest.mark.parametrize(("subsampling", "interval"), [(0, 4), (1, 2), (2, 2)])
    def test_tables_and_subsampling_are_kept(self, subsampling, interval):
        original = encode(LARGE, "JPEG", quality=83, subsampling=subsampling)
        jpeg = recode(original, quality="source")
        assert opened(jpeg).quantization == opened(original).quantization
        assert JpegImagePlugin.get_sampling(opened(jpeg)) == subsampling
        assert markers(jpeg)[0] == interval
        assert psnr(jpeg, original) > 42

    def test_scaled(self):
        original = encode(LARGE, "JPEG", quality=83, subsampling=0)
        jpeg = recode(original, quality="source", max_side=160)
        assert opened(jpeg).quantization == opened(original).quantization
        assert JpegImagePlugin.get_sampling(opened(jpeg)) == 0
        assert opened(jpeg).size == (120, 160)

    def test_without_tables(self):
        for data in (encode(LARGE, "PNG"), encode(LARGE, "JPEG", mode="CMYK")):
            assert recode(data, quality="source") == recode(data, quality=95)

    def test_noise_at_the_finest_tables(self):
        noise = np.random.default_rng(0).integers(0, 256, (64, 80, 3), dtype=np.uint8)
        original = encode(noise, "JPEG", quality=100, subsampling=0)
        assert psnr(recode(original, quality="source"), original) > 42


class TestShrink:
    @pytest.mark.parametrize(
        ("shape", "max_side", "wanted"),
        [
            ((333, 250), None, (333, 250)),
            ((333, 250), 333, (333, 250)),
            ((333, 250), 400, (333, 250)),
            ((333, 250), 100, (100, 75)),
            ((250, 333), 100, (75, 100)),
            ((375, 500), 256, (192, 256)),
            ((1000, 3), 100, (100, 1)),
        ],
    )
    def test_size(self, shape, max_side, wanted):
        assert shrink(photo(*shape), max_side).shape == (*wanted, 3)

    def test_as_pillow_does(self):
        wanted = Image.fromarray(LARGE).resize((75, 100), Image.Resampling.BICUBIC)
        assert np.abs(shrink(LARGE, 100).astype(int) - np.asarray(wanted)).mean() < 0.3

    def test_read_only_pixels(self):
        pixels = LARGE.copy()
        pixels.flags.writeable = False
        np.testing.assert_array_equal(shrink(pixels, 100), shrink(LARGE, 100))


@pytest.mark.parametrize(
    ("columns", "mcu_width", "wanted"),
    [
        *((32, 16, 2), (9, 16, 3), (25, 16, 5), (49, 16, 7), (31, 16, 1), (1, 16, 1), (11, 16, 1)),
        *((63, 8, 7), (64, 8, 4), (61, 8, 61), (46, 8, 23), (3, 8, 3)),
    ],
)
def test_auto_interval(columns, mcu_width, wanted):
    assert auto_interval(columns, mcu_width) == wanted


@pytest.mark.parametrize("recipe", [Recipe(max_side=100), Recipe(payload="raw"), Recipe(quality="source")])
def test_in_threads_the_same(recipe):
    images = [encode(photo(120 + n, 150, seed=n), "JPEG") for n in range(8)]
    made = Recode(recipe, DECODER)
    wanted = [made(data) for data in images]
    together = threading.Barrier(4)

    def all_of_them(_: int) -> list[bytes]:
        together.wait()
        return [made(data) for data in images]

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(all_of_them, range(4))) == [wanted] * 4

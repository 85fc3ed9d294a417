import numpy as np
import pytest
from images import encode, photo, png
from numpy.typing import NDArray

from effloop.data.decode import DecodeConfig
from effloop.data.decode.common import PillowDecoder, PlainDecoder, decode_with_pillow
from effloop.data.image.header import Encoded, Header, read_header
from effloop.errors import DataError

PHOTO = photo()


class Wrong(PlainDecoder):
    """Answers, but not with this image."""

    asked = 0

    def fast(self, data: Encoded, header: Header) -> NDArray[np.uint8] | None:
        self.asked += 1
        return np.zeros((header.width, header.height, 3), np.uint8)


@pytest.fixture
def wrong() -> Wrong:
    return Wrong(DecodeConfig("wrong"))


def test_pixels_of_another_size_are_not_believed(wrong):
    np.testing.assert_array_equal(wrong.decode(encode(PHOTO, "PNG")), PHOTO)
    assert wrong.asked == 1


@pytest.mark.parametrize("data", [encode(PHOTO, "PNG", "RGBA"), encode(PHOTO, "PNG") + b"more"])
def test_fast_decoders_see_only_plain_and_complete_images(wrong, data):
    np.testing.assert_array_equal(wrong.decode(data), PHOTO)
    assert wrong.asked == 0


def test_header_and_pixels_that_contradict_each_other():
    data = encode(PHOTO, "PNG")
    header = read_header(data)
    other = Header(header.format, 50, 50, header.plain, header.complete)
    with pytest.raises(DataError, match=r"its header says 50 x 50 .* its pixels are 67 x 53"):
        decode_with_pillow(data, other)


@pytest.fixture
def decoder() -> PillowDecoder:
    return PillowDecoder(DecodeConfig("pillow"))


def test_truncated_pngs(decoder):
    data = png(53, 67, 8, 2, PHOTO.tobytes())  # one chunk of pixels, then 12 bytes of IEND
    with pytest.raises(DataError, match=f"ends after {len(data) - 500:,} bytes without its end marker"):
        decoder.decode(data[:-500])
    np.testing.assert_array_equal(decoder.decode(data[:-12]), PHOTO)  # the pixels are all there


def test_bad_checksum_in_the_header(decoder):
    data = bytearray(encode(PHOTO, "PNG"))
    data[29] ^= 1
    with pytest.raises(DataError, match=r"is a damaged PNG: .*checksum"):
        decoder.decode(data)


@pytest.mark.parametrize(
    ("raised", "wanted", "says"),
    [(RecursionError("over\nlines"), DataError, "^is a damaged PNG: over$"), (MemoryError("no"), MemoryError, "^no$")],
)
def test_whatever_pillow_raises_is_a_data_error_but_for_no_memory(decoder, monkeypatch, raised, wanted, says):
    def fail(*_: object) -> None:
        raise raised

    monkeypatch.setattr("PIL.PngImagePlugin.PngStream.chunk_IHDR", fail)
    with pytest.raises(wanted, match=says):
        decoder.decode(encode(PHOTO, "PNG"))

from __future__ import annotations

import numpy as np
import pytest
from images import encode, photo, png

from effloop.data.decode import DecodeConfig
from effloop.data.decode.pillow import PillowDecoder
from effloop.errors import DataError

PHOTO = photo()


@pytest.fixture
def decoder() -> PillowDecoder:
    return PillowDecoder(DecodeConfig("pillow"))


def test_truncated_pngs(decoder: PillowDecoder) -> None:
    data = png(53, 67, 8, 2, PHOTO.tobytes())  # one chunk of pixels, then 12 bytes of IEND
    with pytest.raises(DataError, match=f"ends after {len(data) - 500:,} bytes without its end marker"):
        decoder.decode(data[:-500])
    np.testing.assert_array_equal(decoder.decode(data[:-12]), PHOTO)  # the pixels are all there


def test_bad_checksum_in_the_header(decoder: PillowDecoder) -> None:
    data = bytearray(encode(PHOTO, "PNG"))
    data[29] ^= 1
    with pytest.raises(DataError, match=r"is a damaged PNG: .*checksum"):
        decoder.decode(data)


@pytest.mark.parametrize(
    ("raised", "wanted", "says"),
    [(RecursionError("over\nlines"), DataError, "^is a damaged PNG: over$"), (MemoryError("no"), MemoryError, "^no$")],
)
def test_whatever_pillow_raises_is_a_data_error_but_for_no_memory(
    decoder: PillowDecoder, monkeypatch: pytest.MonkeyPatch, raised: Exception, wanted: type[Exception], says: str
) -> None:
    def fail(*_: object) -> None:
        raise raised

    monkeypatch.setattr("PIL.PngImagePlugin.PngStream.chunk_IHDR", fail)
    with pytest.raises(wanted, match=says):
        decoder.decode(encode(PHOTO, "PNG"))

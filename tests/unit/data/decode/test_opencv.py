import contextlib
import sys

import numpy as np
import pytest
from images import FORMATS, encode, exif, photo, png

from effloop.data.decode import DecodeConfig
from effloop.data.decode.opencv import OpenCVDecoder, jpeg_markers_valid, png_checksums_valid
from effloop.data.image.header import read_header
from effloop.errors import ConfigError, DataError

cv2 = pytest.importorskip("cv2")

PHOTO = photo()
JPEG = encode(PHOTO, "JPEG")


@pytest.fixture
def decoder() -> OpenCVDecoder:
    return OpenCVDecoder(DecodeConfig("opencv"))


@pytest.mark.parametrize("fmt", FORMATS)
def test_is_fast_for_every_plain_format(decoder, fmt):
    data = encode(PHOTO, fmt)
    pixels = decoder.fast(data, read_header(data))
    assert pixels is not None
    np.testing.assert_array_equal(pixels, decoder.decode(data))


def test_runs_no_threads_of_its_own():
    cv2.setNumThreads(2)
    OpenCVDecoder(DecodeConfig("opencv"))
    assert cv2.getNumThreads() == 1


def test_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cv2", None)
    with pytest.raises(ConfigError, match=r"decode=opencv needs .* pip install 'opencv-python-headless'"):
        OpenCVDecoder(DecodeConfig("opencv"))


@pytest.mark.parametrize("fmt", FORMATS)
def test_whole_and_cut_files_make_no_noise(decoder, fmt, capfd):
    data = encode(PHOTO, fmt)
    for end in range(len(data), 60, -97):
        with contextlib.suppress(DataError):
            decoder.decode(data[:end])
    assert capfd.readouterr() == ("", "")


def test_stray_markers_are_seen_and_sound_ones_are_none():
    for options in (
        {"progressive": True},
        {"restart_marker_blocks": 2},
        {"exif": exif(6) + JPEG},
        {"comment": b"\xff\xd8"},
    ):
        assert jpeg_markers_valid(encode(PHOTO, "JPEG", **options))
    at = JPEG.index(b"\xff\xda") + 200
    for marker in (0xD8, 0xC0, 0xC6, 0x02, 0xBF, 0xF7):
        assert not jpeg_markers_valid(JPEG[:at] + bytes([0xFF, marker]) + JPEG[at + 2 :])
    assert not jpeg_markers_valid(JPEG[:300])  # it ends before its pixels
    assert not jpeg_markers_valid(JPEG[:300] + b"\xff\xd9")


def test_every_damaged_byte_of_a_png_is_seen():
    data = png(4, 3, 8, 2, bytes(36))
    for at in range(8, len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 0x10
        assert not png_checksums_valid(damaged), f"byte {at}"

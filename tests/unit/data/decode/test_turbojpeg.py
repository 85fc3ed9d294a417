from __future__ import annotations

import sys

import numpy as np
import pytest
from images import FORMATS, encode, photo

from effloop.data.decode.pillow import PillowConfig, PillowDecoder
from effloop.data.decode.turbojpeg import TurboJPEGConfig, TurboJPEGDecoder
from effloop.data.image.header import read_header
from effloop.errors import ConfigError

pytest.importorskip("simplejpeg")

PHOTO = photo()


@pytest.mark.parametrize("fmt", FORMATS)
def test_is_fast_for_jpeg_only(fmt: str) -> None:
    data = encode(PHOTO, fmt)
    pixels = TurboJPEGDecoder(TurboJPEGConfig()).fast(data, read_header(data))
    assert (pixels is not None) == (fmt == "JPEG")


def test_what_libjpeg_warns_about_is_left_to_pillow() -> None:
    data = bytearray(encode(PHOTO, "JPEG"))
    at = data.index(b"\xff\xda") + 60
    data[at : at + 30] = b"\x11" * 30
    decoder = TurboJPEGDecoder(TurboJPEGConfig())
    assert decoder.fast(data, read_header(data)) is None
    np.testing.assert_array_equal(decoder.decode(data), PillowDecoder(PillowConfig()).decode(data))


def test_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "simplejpeg", None)
    with pytest.raises(ConfigError, match=r"decode=turbojpeg needs .* pip install 'simplejpeg'"):
        TurboJPEGDecoder(TurboJPEGConfig())

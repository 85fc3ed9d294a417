"""Decoding JPEGs with libjpeg-turbo, from the package simplejpeg."""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from effloop.data.decode.base import DecodeConfig, decoders
from effloop.data.decode.common import PlainDecoder
from effloop.data.decode.run import decode_box
from effloop.data.image.header import Encoded, Header, read_header
from effloop.data.image.libjpeg import use_libjpeg
from effloop.errors import optional_package


@dataclass
class TurboJPEGConfig(DecodeConfig):
    """`decode=turbojpeg`."""

    name: str = "turbojpeg"


@decoders.register("turbojpeg", TurboJPEGConfig)
class TurboJPEGDecoder(PlainDecoder):
    """libjpeg-turbo by simplejpeg: the fastest for JPEG; other formats go to Pillow.

    Images that libjpeg warns about are left to Pillow, too.
    """

    def __init__(self, config: TurboJPEGConfig, channels: int = 3) -> None:
        super().__init__(config, channels)
        self._colorspace = "RGB" if channels == 3 else "GRAY"
        self._simplejpeg = optional_package("simplejpeg", "decode=turbojpeg", "simplejpeg")
        own = type(self).fast is TurboJPEGDecoder.fast  # a subclass may give other pixels
        self.has_libjpeg = own and use_libjpeg() and _agree(self._colorspace)

    def fast(self, data: Encoded, header: Header) -> NDArray[np.uint8] | None:
        if header.format != "JPEG":
            return None
        return self._decode(data, strict=True)

    def fast_truncated(self, data: Encoded, header: Header) -> NDArray[np.uint8] | None:
        return self._decode(data, strict=False)

    def fast_scaled(self, data: Encoded, header: Header, factor: int, *, truncated: bool) -> NDArray[np.uint8] | None:
        height, width = -(-header.height // factor), -(-header.width // factor)
        return self._decode(data, strict=not truncated, min_height=height, min_width=width, min_factor=factor)

    def _decode(self, data: Encoded, **options: Any) -> NDArray[np.uint8] | None:
        try:
            return cast(NDArray[np.uint8], self._simplejpeg.decode_jpeg(data, self._colorspace, **options))
        except ValueError:
            return None


_SAMPLINGS = ("444", "422", "420", "440", "411", "Gray")


@functools.cache
def _agree(colorspace: str) -> bool:
    """Whether Pillow's libjpeg-turbo and simplejpeg's own give the same pixels of a small image; 1 ms, once."""
    simplejpeg = importlib.import_module("simplejpeg")
    pixels = np.random.default_rng(0).integers(0, 256, (10, 13, 3), np.uint8).repeat(5, axis=0).repeat(5, axis=1)
    for sampling in _SAMPLINGS:
        grey = sampling == "Gray"
        image = np.ascontiguousarray(pixels[:, :, : 1 if grey else 3])
        data = simplejpeg.encode_jpeg(image, 90, "GRAY" if grey else "RGB", sampling)
        whole = simplejpeg.decode_jpeg(data, colorspace)
        for top, left, height, width in (0, 0, 50, 65), (20, 33, 9, 10):
            out = np.empty((height, width, whole.shape[2]), np.uint8)
            done = decode_box(data, read_header(data), (top, left, height, width), out, 1, 0)
            if not done or not np.array_equal(out, whole[top : top + height, left : left + width]):
                return False
    return True

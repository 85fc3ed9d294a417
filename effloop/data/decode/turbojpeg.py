"""Decoding JPEGs with libjpeg-turbo, from the package simplejpeg."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from effloop.data.decode.base import DecodeConfig, decoders
from effloop.data.decode.common import PlainDecoder
from effloop.data.image.header import Encoded, Header
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

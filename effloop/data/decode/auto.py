"""The fastest decoders that are installed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from effloop.data.decode.base import DecodeConfig, decoders
from effloop.data.decode.common import PlainDecoder
from effloop.data.decode.opencv import OpenCVConfig, OpenCVDecoder
from effloop.data.decode.pillow import PillowDecoder
from effloop.data.decode.turbojpeg import TurboJPEGConfig, TurboJPEGDecoder
from effloop.data.image.header import Encoded, Header
from effloop.errors import ConfigError


@dataclass
class AutoConfig(DecodeConfig):
    """`decode=auto`."""

    name: str = "auto"


@decoders.register("auto", AutoConfig)
class AutoDecoder(PlainDecoder):
    """The fastest that is installed: for JPEG turbojpeg, else opencv, else pillow; for others opencv, else pillow.

    Attributes:
        jpeg: the decoder that JPEGs go to.
        other: the decoder that PNG, WebP and BMP go to.
    """

    jpeg: PlainDecoder
    other: PlainDecoder

    def __init__(self, config: AutoConfig, channels: int = 3) -> None:
        super().__init__(config, channels)
        try:
            self.other = OpenCVDecoder(OpenCVConfig(), channels)
        except (ConfigError, ImportError):  # not installed, or a system library is missing
            self.other = PillowDecoder(config, channels)
        try:
            self.jpeg = TurboJPEGDecoder(TurboJPEGConfig(), channels)
        except (ConfigError, ImportError):
            self.jpeg = self.other
        self.decodes_truncated = self.jpeg.decodes_truncated
        self.has_libjpeg = self.jpeg.has_libjpeg and type(self).fast is AutoDecoder.fast  # a subclass may do more

    def fast(self, data: Encoded, header: Header) -> NDArray[np.uint8] | None:
        return (self.jpeg if header.format == "JPEG" else self.other).fast(data, header)

    def fast_scaled(self, data: Encoded, header: Header, factor: int, *, truncated: bool) -> NDArray[np.uint8] | None:
        return self.jpeg.fast_scaled(data, header, factor, truncated=truncated)

    def fast_truncated(self, data: Encoded, header: Header) -> NDArray[np.uint8] | None:
        return self.jpeg.fast_truncated(data, header)

"""Decoding with Pillow."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from effloop.data.decode.base import DecodeConfig, decoders
from effloop.data.decode.common import PlainDecoder
from effloop.data.image.header import Encoded, Header
from effloop.errors import DataError


@decoders.register("pillow", DecodeConfig)
class PillowDecoder(PlainDecoder):
    """Pillow: every format, the reference for all others, always installed."""

    def fast(self, data: Encoded, header: Header) -> NDArray[np.uint8] | None:
        try:
            return self.by_pillow(data, header)
        except DataError:
            return None  # of a part of an image: the whole one is decoded next

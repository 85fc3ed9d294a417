"""Decoding with Pillow."""

from effloop.data.decode.base import DecodeConfig, decoders
from effloop.data.decode.common import PlainDecoder


@decoders.register("pillow", DecodeConfig)
class PillowDecoder(PlainDecoder):
    """Pillow: every format, the reference for all others, always installed."""

"""Decoding by Pillow."""

from __future__ import annotations

from dataclasses import dataclass

from effloop.data.decode.base import DecodeConfig, decoders
from effloop.data.decode.common import PlainDecoder


@dataclass
class PillowConfig(DecodeConfig):
    """`decode=pillow`."""

    name: str = "pillow"


@decoders.register("pillow", PillowConfig)
class PillowDecoder(PlainDecoder):
    """Pillow: every format, the reference for all others, always installed."""

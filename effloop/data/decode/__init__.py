"""Decoders: encoded bytes and a box -> (height, width, 3) uint8 RGB, or (height, width, 1) grey."""

from effloop.data.decode.base import Box, DecodeConfig, Decoder, decoders

__all__ = ["Box", "DecodeConfig", "Decoder", "decoders"]

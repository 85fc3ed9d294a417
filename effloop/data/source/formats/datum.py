"""Caffe's `Datum`, a protobuf message with an image and its label (caffe/src/caffe/proto/caffe.proto):

    Datum {int32 channels = 1, height = 2, width = 3; bytes data = 4; int32 label = 5; repeated float float_data = 6;
           bool encoded = 7}

Encoded, `data` is an image file; otherwise it is uint8 pixels, (channels, height, width), colours as B, G, R.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from effloop.data.image.header import pnm_header
from effloop.data.source.formats.protobuf import Message, fields, varint
from effloop.errors import DataError

_CHANNELS, _HEIGHT, _WIDTH, _LABEL, _ENCODED = (number << 3 for number in (1, 2, 3, 5, 7))
_DATA, _FLOATS = 4 << 3 | 2, {6 << 3 | 2, 6 << 3 | 5}
_LARGEST = 1 << 31


class Datum(NamedTuple):
    """An image at `data[offset : offset + size]`; `shape` is (channels, height, width) of raw pixels."""

    label: int
    offset: int
    size: int
    encoded: bool
    shape: tuple[int, int, int]

    def pnm_size(self) -> int:
        """Bytes of `pnm`."""
        channels, height, width = self.shape
        return len(pnm_header(height, width, channels)) + self.size

    def pnm(self, data: Message) -> bytes:
        """The image that raw pixels are: PNM, grey or RGB."""
        channels, height, width = self.shape
        planes = np.frombuffer(data, np.uint8, self.size, self.offset).reshape(self.shape)
        return pnm_header(height, width, channels) + planes[::-1].transpose(1, 2, 0).tobytes()


def read_datum(data: Message, start: int, end: int, *, until_data: bool = False) -> Datum:
    """The message `data[start:end]`.

    Args:
        data: holds it.
        start: its first byte.
        end: where it ends.
        until_data: whether to read only up to the pixels, where the end isn't known; the label is then 0.

    Raises:
        DataError: none, or without an image; the message doesn't say where.
    """
    numbers = dict.fromkeys((_CHANNELS, _HEIGHT, _WIDTH, _LABEL, _ENCODED), 0)
    span = None
    for tag, first, stop in fields(data, start, end):
        if tag in numbers:
            numbers[tag] = varint(data, first, stop)[0]
        elif tag in _FLOATS:
            raise DataError(
                "is a Datum of floats (float_data); images of bytes are read: write them as uint8 or encoded"
            )
        elif tag == _DATA:
            span = first, stop
            if until_data:
                break
    if span is None:
        raise DataError("is a Datum without data, or none; write the image into it")
    found = Datum(
        _signed(numbers[_LABEL]),
        span[0],
        span[1] - span[0],
        bool(numbers[_ENCODED]),
        (numbers[_CHANNELS], numbers[_HEIGHT], numbers[_WIDTH]),
    )
    channels, height, width = found.shape
    if not found.encoded and (channels not in (1, 3) or not height or channels * height * width != found.size):
        raise DataError(
            f"is a Datum of {found.size:,} bytes for {channels} x {height} x {width} (channels x height x width); "
            "allowed are images of 1 or 3 channels, or encoded=true"
        )
    return found


def _signed(number: int) -> int:
    return number - (number >> 63 << 64)

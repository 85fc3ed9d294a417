"""Entropy indexes, compared with what they are for: a crop decoded with one has the pixels of the whole image."""

from __future__ import annotations

import functools
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from effloop.data.decode import Decoder, decoders
from effloop.data.image.entropy import build_index
from effloop.data.image.header import Encoded
from effloop.errors import DataError

EVERY = 16
"""One in so many images is compared while indexes are built: at 27 KB it takes 0.33 ms an image, for 0.29 without, and
1.6 where all are compared."""


def build_compared(data: Encoded, number: int) -> tuple[bytes | None, bool | None]:
    """Build the index of an image, and compare it if the image's number is a multiple of `EVERY`.

    Args:
        data: any file.
        number: of the image in its split; chooses, so that the same files get the same indexes in every run.

    Returns:
        The index, or None if the image can't have one or it gives other pixels; and whether it does, None if it wasn't
        compared.
    """
    index = build_index(data)
    differs = None if index is None or number % EVERY else crop_differs(data, index)
    return None if differs else index, differs


def crop_differs(data: Encoded, index: Encoded) -> bool | None:
    """Whether a crop by an index has other pixels than the whole image, which is decoded; None if it can't be."""
    decoder = _decoder()
    try:
        return differs_from(decoder.decode(data), decoder, data, index)
    except DataError:  # damaged or too large: it is refused where it is used
        return None


def differs_from(whole: NDArray[np.uint8], decoder: Decoder, data: Encoded, index: Encoded) -> bool:
    """Whether a crop by an index has other pixels than the whole image.

    The crop is an eighth of the image's width and all of its height, which takes a state of every row of MCUs; where
    it lies depends on the file's bytes.

    Args:
        whole: (H, W, C) uint8, the image decoded by the same decoder.
        decoder: decodes the crop.
        data: the file.
        index: that belongs to these bytes.

    Raises:
        DataError: the crop can't be decoded.
    """
    height, width = whole.shape[:2]
    columns = -(-width // 8)
    left = zlib.crc32(data) % (width - columns + 1)
    info = decoder.with_index(decoder.read_info(data), index)
    crop = decoder.decode_with_info(data, info, (0, left, height, columns))
    return not np.array_equal(crop, whole[:, left : left + columns])


def compared_line(compared: int, refused: int) -> str:
    """How many indexes were compared, and how many of them differed and were left out."""
    line = f"of {compared:,} a crop was compared with the whole image, {refused:,} differed"
    return f"{line} and have no index: please report that as a bug" if refused else line


@functools.cache
def _decoder() -> Decoder:
    config: Any = decoders["auto"].config
    return decoders.build(config())

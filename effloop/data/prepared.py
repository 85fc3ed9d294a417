"""Samples between reading and decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from effloop.data.augment.base import Draws
from effloop.data.decode.base import ImageInfo
from effloop.data.image.encoded import EncodedImages, Headers

Read = tuple[EncodedImages, Sequence[ImageInfo]]
"""N encoded images, and what the decoder read from each header."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """N samples that are read and drawn, but not decoded yet.

    Attributes:
        ids: (N,) the samples.
        encoded: their encoded images.
        infos: what the decoder read from each header; `Headers` of all usual images, whose columns C code takes.
        draws: their crops, flips and keys.
    """

    ids: NDArray[np.int64]
    encoded: EncodedImages
    infos: Sequence[ImageInfo]
    draws: Draws


def joined(parts: Sequence[Read]) -> Read:
    """What was read run by run, as if at once."""
    infos = [part[1] for part in parts]
    headers = [each for each in infos if isinstance(each, Headers)]
    together = Headers.joined(headers) if len(headers) == len(infos) else list(chain.from_iterable(infos))
    return EncodedImages.joined([part[0] for part in parts]), together


def sizes_of(infos: Sequence[ImageInfo]) -> NDArray[np.int64]:
    """(N, 2) height and width of images."""
    if isinstance(infos, Headers):
        return infos.sizes
    return np.array([(image.height, image.width) for image in infos], np.int64)

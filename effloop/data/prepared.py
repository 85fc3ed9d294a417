"""Samples between reading and decoding."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from effloop.data.augment.base import Draws
from effloop.data.decode.base import ImageInfo
from effloop.data.image.header import Encoded


@dataclass(frozen=True, slots=True)
class Prepared:
    """N samples that are read and drawn, but not decoded yet.

    Attributes:
        ids: (N,) the samples.
        encoded: their encoded images.
        infos: what the decoder read from each header.
        draws: their crops, flips and keys.
    """

    ids: NDArray[np.int64]
    encoded: list[Encoded]
    infos: list[ImageInfo]
    draws: Draws

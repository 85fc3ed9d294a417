"""Images that are odd."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def measure(thumbnails: NDArray[np.uint8]) -> NDArray[np.float32]:
    """What odd images are found by: (n, SIDE, SIDE, 3) uint8 thumbnails -> (n, 8) float32."""
    found = np.zeros((len(thumbnails), 8), np.float32)
    found[:, 0], found[:, 1] = thumbnails.mean(axis=(1, 2, 3)), thumbnails.std(axis=(1, 2, 3))
    return found

"""Native mirroring, from left to right and upside down."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from effloop.data.augment.operation import Image, Keys, Sizes, Touch, check_probability, chosen, operation, to_device
from effloop.data.image.resize import mirror, overturn


@operation
class RandomHorizontalFlip(Touch):
    """Left and right turned about.

    Args:
        p: how probable that is.
    """

    def __init__(self, p: float = 0.5) -> None:
        self.p = check_probability("p", p)

    def draw(self, keys: Keys, sizes: Sizes) -> NDArray[np.bool_]:
        del sizes
        return chosen(keys, self.p)

    def one(self, image: Image, drawn: NDArray[np.bool_], row: int) -> None:
        if drawn[row]:
            mirror(image)

    def batch(self, images: Tensor, drawn: NDArray[np.bool_]) -> Tensor:
        return images.flip(3).where(to_device(drawn, images).view(-1, 1, 1, 1), images)


@operation
class RandomVerticalFlip(Touch):
    """Top and bottom turned about.

    Args:
        p: how probable that is.
    """

    def __init__(self, p: float = 0.5) -> None:
        self.p = check_probability("p", p)

    def draw(self, keys: Keys, sizes: Sizes) -> NDArray[np.bool_]:
        del sizes
        return chosen(keys, self.p)

    def one(self, image: Image, drawn: NDArray[np.bool_], row: int) -> None:
        if drawn[row]:
            overturn(image)

    def batch(self, images: Tensor, drawn: NDArray[np.bool_]) -> Tensor:
        return images.flip(2).where(to_device(drawn, images).view(-1, 1, 1, 1), images)

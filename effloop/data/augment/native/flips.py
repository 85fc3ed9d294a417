"""Native horizontal and vertical flips."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from effloop.data.augment.operation import (
    Image,
    Keys,
    PixelOperation,
    Sizes,
    bernoulli,
    check_probability,
    operation,
    to_device,
)
from effloop.data.image.nearest import Mask
from effloop.data.image.resize import hflip, vflip


class _RandomFlip(PixelOperation):
    """Flips an image with probability `p`.

    Args:
        p: probability of a flip.
    """

    any_channels = True
    takes_masks = True
    _dim: ClassVar[int]  # of (N, 3, H, W)

    def __init__(self, p: float = 0.5) -> None:
        self.p = check_probability("p", p)

    def draw(self, keys: Keys, sizes: Sizes) -> NDArray[np.bool_]:
        del sizes
        return bernoulli(keys, self.p)

    def apply_inplace(self, image: Image, drawn: NDArray[np.bool_], row: int) -> None:
        if drawn[row]:
            (hflip if self._dim == 3 else vflip)(image)

    def apply_batch(self, images: Tensor, drawn: NDArray[np.bool_]) -> Tensor:
        return images.flip(self._dim).where(to_device(drawn, images).view(-1, 1, 1, 1), images)

    def apply_mask(self, mask: Mask, drawn: NDArray[np.bool_], row: int) -> Mask:
        if not drawn[row]:
            return mask
        return mask[:, ::-1] if self._dim == 3 else mask[::-1]

    def apply_mask_batch(self, masks: Tensor, drawn: NDArray[np.bool_]) -> Tensor:
        return masks.flip(self._dim - 1).where(to_device(drawn, masks).view(-1, 1, 1), masks)


@operation
class RandomHorizontalFlip(_RandomFlip):
    """Horizontal flip; `p` is its probability."""

    _dim = 3


@operation
class RandomVerticalFlip(_RandomFlip):
    """Vertical flip; `p` is its probability."""

    _dim = 2

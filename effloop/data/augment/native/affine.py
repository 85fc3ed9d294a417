"""RandomRotation and RandomAffine, with torchvision's distributions and pixels."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from effloop.data.augment.native.geometry import (
    Matrices,
    Sampling,
    inverse_matrices,
    warp,
    warp_mask,
    warp_masks,
    warp_one,
)
from effloop.data.augment.operation import (
    RATIOS,
    BadParameterError,
    Image,
    Keys,
    PixelOperation,
    Sizes,
    check_number,
    check_range,
    operation,
)
from effloop.data.image.nearest import Mask
from effloop.data.random import uniforms


class _Warp(PixelOperation):
    """Draws one matrix for each image."""

    takes_masks = True
    _sampling: Sampling

    @abstractmethod
    def draw(self, keys: Keys, sizes: Sizes) -> Matrices:
        """(N, 2, 3) float32, `inverse_matrices`."""

    def apply_inplace(self, image: Image, drawn: Matrices, row: int) -> None:
        warp_one(image, drawn[row], self._sampling)

    def apply_batch(self, images: Tensor, drawn: Matrices) -> Tensor:
        return warp(images, drawn, self._sampling)

    def apply_mask(self, mask: Mask, drawn: Matrices, row: int) -> Mask:
        return warp_mask(mask, drawn[row])

    def apply_mask_batch(self, masks: Tensor, drawn: Matrices) -> Tensor:
        return warp_masks(masks, drawn)


@operation
class RandomRotation(_Warp):
    """Rotation by a uniform angle about the centre; what was outside is filled.

    Args:
        degrees: [smallest, largest], counter-clockwise; a number is [-number, number].
        interpolation: `nearest` or `bilinear`.
        fill: a level of 0..255, or three.
    """

    def __init__(self, degrees: Any, interpolation: str = "nearest", fill: Any = 0) -> None:
        self._degrees = _angles("degrees", degrees)
        self._sampling = Sampling.of(interpolation, fill)

    def draw(self, keys: Keys, sizes: Sizes) -> Matrices:
        return inverse_matrices(angle=-(_between(self._degrees, uniforms(keys, 1)[:, 0]) % 360))


@operation
class RandomAffine(_Warp):
    """Rotation, translation, scaling and shear, each uniform; what was outside is filled.

    Args:
        degrees: [smallest, largest], clockwise; a number is [-number, number].
        translate: largest shift in either direction, as a share of the width and of the height.
        scale: [smallest, largest], 0.001 to 1,000.
        shear: [smallest, largest] in degrees along x, two more along y; a number is [-number, number] along x.
        interpolation: `nearest` or `bilinear`.
        fill: a level of 0..255, or three.
    """

    def __init__(
        self,
        degrees: Any,
        translate: Any = None,
        scale: Any = None,
        shear: Any = None,
        interpolation: str = "nearest",
        fill: Any = 0,
    ) -> None:
        self._degrees = _angles("degrees", degrees)
        self._translate = _shares(translate)
        self._scale = (1.0, 1.0) if scale is None else check_range("scale", scale, *RATIOS)
        self._shear_x, self._shear_y = _shears(shear)
        self._sampling = Sampling.of(interpolation, fill)

    def draw(self, keys: Keys, sizes: Sizes) -> Matrices:
        angle, move_x, move_y, scale, shear_x, shear_y = uniforms(keys, 6).T
        reach = np.array(self._translate) * sizes[:, ::-1]
        return inverse_matrices(
            angle=_between(self._degrees, angle),
            translate=np.rint(reach * (2 * np.stack((move_x, move_y), axis=1) - 1)),
            scale=_between(self._scale, scale),
            shear=np.stack((_between(self._shear_x, shear_x), _between(self._shear_y, shear_y)), axis=1),
        )


def _between(bounds: tuple[float, float], numbers: NDArray[np.float64]) -> NDArray[np.float64]:
    return bounds[0] + (bounds[1] - bounds[0]) * numbers


def _angles(name: str, value: object) -> tuple[float, float]:
    if isinstance(value, Sequence):
        return check_range(name, value, -360, 360)
    largest = check_number(name, value, 0, 360)
    return -largest, largest


def _shares(translate: object) -> tuple[float, float]:
    if translate is None:
        return 0.0, 0.0
    pair = list(translate) if isinstance(translate, Sequence) and not isinstance(translate, str) else []
    if len(pair) != 2 or not all(type(share) in (int, float) and 0 <= share <= 1 for share in pair):
        raise BadParameterError(f"translate: {translate} is not allowed; set [of the width, of the height], 0 to 1")
    return float(pair[0]), float(pair[1])


def _shears(shear: object) -> tuple[tuple[float, float], tuple[float, float]]:
    if shear is None:
        return (0.0, 0.0), (0.0, 0.0)
    if isinstance(shear, Sequence) and len(shear) == 4:
        return _angles("shear", shear[:2]), _angles("shear", shear[2:])
    return _angles("shear", shear), (0.0, 0.0)

"""RandAugment and TrivialAugmentWide: random operations of a list, with torchvision's distributions and pixels.

Draws are made on the host. On a batch, images with the same operation are processed together.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from effloop.data.augment.native import host, kernels
from effloop.data.augment.native.affine import (
    Matrices,
    Sampling,
    inverse_matrices,
    warp,
    warp_mask,
    warp_masks,
    warp_one,
)
from effloop.data.augment.operation import Image, Keys, PixelOperation, Sizes, check_whole, operation, to_device
from effloop.data.image.mask import Mask
from effloop.data.random import uniforms
from effloop.lazy import Tensor, torch

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

_TABLE = (
    ("Identity", "", 0),
    ("ShearX", "", 0),
    ("ShearY", "", 0),
    ("TranslateX", "", 0),
    ("TranslateY", "", 0),
    ("Rotate", "", 0),
    ("Brightness", "brightness", 1),
    ("Color", "saturation", 2),
    ("Contrast", "contrast", 2),
    ("Sharpness", "sharpness", 2),
    ("Posterize", "posterize", 1),
    ("Solarize", "solarize", 1),
    ("AutoContrast", "autocontrast", 0),
    ("Equalize", "equalize", 0),
)
"""torchvision's name of each operation of both policies; the function in `host` and in `kernels`, but for the five
warps; and how many it takes of the level and 1 - level."""

NAMES = tuple(name for name, _, _ in _TABLE)
"""`PolicyDraws.choice` is an index of this list."""

_SHEAR_X, _SHEAR_Y, _MOVE_X, _MOVE_Y, _ROTATE = range(1, 6)
_BLENDS = range(6, 10)  # their factor is 1 + magnitude
_SOLARIZE = 11
_SIGNED = 9  # 1 to 9 have a random sign
_MOST_BINS = 1000  # torchvision's is 31; tables are cached by operation and image size


@dataclass(frozen=True)
class PolicyDraws:
    """What was drawn for N images, K operations each, in order."""

    choice: Ints  # (N, K) indices of NAMES
    magnitude: Floats  # (N, K) torchvision's, with its sign; 0 for operations without one
    matrix: Matrices  # (N, K, 2, 3) float32 of `inverse_matrices`, for warps
    level: Floats  # (N, K) float64, the argument of the operation's function: factor, bits or threshold


class _Policy(PixelOperation):
    """Applies random operations of random magnitude; subclasses draw them."""

    takes_masks = True
    _sampling: Sampling

    @abstractmethod
    def _chosen(self, keys: Keys) -> tuple[Ints, Ints, NDArray[np.bool_]]:
        """(N, K) each: operation, bin of its magnitude, whether it is negative."""

    @abstractmethod
    def _magnitudes(self, choice: Ints, bins: Ints, sizes: Sizes) -> Floats:
        """(N, K) magnitudes without sign."""

    def draw(self, keys: Keys, sizes: Sizes) -> PolicyDraws:
        choice, bins, negative = self._chosen(keys)
        magnitude = self._magnitudes(choice, bins, sizes)
        magnitude[negative & (choice >= 1) & (choice <= _SIGNED)] *= -1
        level = np.where(np.isin(choice, _BLENDS), 1 + magnitude, magnitude)
        level[choice == _SOLARIZE] *= 255
        return PolicyDraws(choice, magnitude, _matrices(choice, magnitude, sizes), level)

    def apply_inplace(self, image: Image, drawn: PolicyDraws, row: int) -> None:
        for step, choice in enumerate(drawn.choice[row].tolist()):
            _, function, count = _TABLE[choice]
            if function:
                level = float(drawn.level[row, step])
                getattr(host, function)(image, *(level, 1 - level)[:count])
            elif choice:
                warp_one(image, drawn.matrix[row, step], self._sampling)

    def apply_batch(self, images: Tensor, drawn: PolicyDraws) -> Tensor:
        for step in range(drawn.choice.shape[1]):
            images = self._step(images, drawn.choice[:, step], drawn.matrix[:, step], drawn.level[:, step])
        return images

    def apply_mask(self, mask: Mask, drawn: PolicyDraws, row: int) -> Mask:
        for step in np.flatnonzero(_warps(drawn.choice[row])).tolist():
            mask = warp_mask(mask, drawn.matrix[row, step])
        return mask

    def apply_mask_batch(self, masks: Tensor, drawn: PolicyDraws) -> Tensor:
        for step in range(drawn.choice.shape[1]):
            if len(some := np.flatnonzero(_warps(drawn.choice[:, step]))):
                rows = to_device(some, masks)
                masks = masks.index_copy(0, rows, warp_masks(masks.index_select(0, rows), drawn.matrix[some, step]))
        return masks

    def _step(self, images: Tensor, choice: Ints, matrix: Matrices, level: Floats) -> Tensor:
        """Apply one operation to each image: sort images by operation, apply each to its slice, restore the order."""
        kind = np.where(_warps(choice), _SHEAR_X, choice)
        order = np.argsort(kind, kind="stable")
        # By two gathers: on a CPU index_copy_ takes 140 µs per image, a gather 10.
        there, back = to_device(np.stack([order, np.argsort(order)]), images)
        levels = to_device(np.stack([level[order], 1 - level[order]]).astype(np.float32), images)
        pixels = images.permute(0, 2, 3, 1).index_select(0, there)
        sorted_ = pixels.permute(0, 3, 1, 2)
        kinds, starts = np.unique(kind[order], return_index=True)
        for which, start, end in zip(kinds.tolist(), starts, np.append(starts, len(order))[1:], strict=True):
            group = sorted_[start:end]
            if which == _SHEAR_X:
                group.copy_(warp(group, matrix[order[start:end]], self._sampling))
            elif which:
                _, function, count = _TABLE[which]
                group.copy_(getattr(kernels, function)(group, *levels[:count, start:end]))
        return pixels.index_select(0, back).permute(0, 3, 1, 2)


@operation
class RandAugment(_Policy):
    """`num_ops` of 14 operations, uniform with replacement, all of one magnitude (Cubuk et al. 2019).

    Args:
        num_ops: operations per image, at most 14.
        magnitude: from 0, which does nothing, to num_magnitude_bins - 1.
        num_magnitude_bins: number of magnitudes, 2 to 1,000.
        interpolation: `nearest` or `bilinear`, for the five warps.
        fill: of pixels from outside: a level of 0..255, three of them, or None; None differs for `bilinear` only.
    """

    def __init__(
        self,
        num_ops: int = 2,
        magnitude: int = 9,
        num_magnitude_bins: int = 31,
        interpolation: str = "nearest",
        fill: Any = 0,
    ) -> None:
        self._count = check_whole("num_ops", num_ops, 0, len(NAMES))
        self._bins = check_whole("num_magnitude_bins", num_magnitude_bins, 2, _MOST_BINS)
        self._bin = check_whole("magnitude", magnitude, 0, self._bins - 1)
        self._sampling = Sampling.of(interpolation, fill)

    def _chosen(self, keys: Keys) -> tuple[Ints, Ints, NDArray[np.bool_]]:
        numbers = uniforms(keys, 2 * self._count)
        choice = _uniform_index(len(NAMES), numbers[:, ::2])
        return choice, np.full_like(choice, self._bin), numbers[:, 1::2] < 0.5

    def _magnitudes(self, choice: Ints, bins: Ints, sizes: Sizes) -> Floats:
        magnitude = _table(self._bins, 0.3, 0.0, 30.0, 0.9, 4)[choice, bins]
        for move, sides in ((_MOVE_Y, sizes[:, 0]), (_MOVE_X, sizes[:, 1])):
            for side in np.unique(sides).tolist():
                here = (choice == move) & (sides == side)[:, None]
                magnitude[here] = _ramp(150.0 / 331.0 * side, self._bins)[self._bin]
        return magnitude


@operation
class TrivialAugmentWide(_Policy):
    """One of 14 operations, of uniform magnitude (Müller and Hutter 2021).

    Args:
        num_magnitude_bins: number of magnitudes, 2 to 1,000.
        interpolation: `nearest` or `bilinear`, for the five warps.
        fill: as RandAugment's.
    """

    def __init__(self, num_magnitude_bins: int = 31, interpolation: str = "nearest", fill: Any = 0) -> None:
        self._bins = check_whole("num_magnitude_bins", num_magnitude_bins, 2, _MOST_BINS)
        self._sampling = Sampling.of(interpolation, fill)

    def _chosen(self, keys: Keys) -> tuple[Ints, Ints, NDArray[np.bool_]]:
        numbers = uniforms(keys, 3)
        choice, bins = _uniform_index(len(NAMES), numbers[:, :1]), _uniform_index(self._bins, numbers[:, 1:2])
        return choice, bins, numbers[:, 2:] < 0.5

    def _magnitudes(self, choice: Ints, bins: Ints, sizes: Sizes) -> Floats:
        return _table(self._bins, 0.99, 32.0, 135.0, 0.99, 6)[choice, bins]


def _warps(choice: Ints) -> NDArray[np.bool_]:
    """Which operations move pixels."""
    found: NDArray[np.bool_] = (choice >= _SHEAR_X) & (choice <= _ROTATE)
    return found


def _uniform_index(count: int, numbers: Floats) -> Ints:
    return (count * numbers).astype(np.int64)


@functools.lru_cache(4096)
def _ramp(most: float, bins: int) -> Floats:
    return torch.linspace(0.0, most, bins).double().numpy()  # in float32, as in torchvision


@functools.cache
def _table(bins: int, shear: float, move: float, turn: float, blend: float, bits: int) -> Floats:
    """(14, bins): each operation's magnitudes, up to its largest."""
    nothing = np.zeros(bins)
    posterize = (8 - (torch.arange(bins) / ((bins - 1) / bits))).round().double().numpy()
    solarize = torch.linspace(1.0, 0.0, bins).double().numpy()
    ramps = [_ramp(most, bins) for most in (shear, shear, move, move, turn, blend, blend, blend, blend)]
    return np.stack([nothing, *ramps, posterize, solarize, nothing, nothing])


def _matrices(choice: Ints, magnitude: Floats, sizes: Sizes) -> Matrices:
    """(N, K, 2, 3) of `inverse_matrices`, with torchvision's parameters for the five warps."""
    flat, amount = choice.ravel(), magnitude.ravel()
    size = np.repeat(sizes[:, ::-1], choice.shape[1], axis=0)
    shear, translate = np.zeros((2, len(flat), 2))
    for column, (sheared, moved) in enumerate(((_SHEAR_X, _MOVE_X), (_SHEAR_Y, _MOVE_Y))):
        shear[:, column] = np.where(flat == sheared, np.degrees(np.arctan(amount)), 0)
        translate[:, column] = np.where(flat == moved, np.trunc(amount), 0)
    # Shears keep the top left corner in place, the others the centre.
    centre = np.where(((flat == _SHEAR_X) | (flat == _SHEAR_Y))[:, None], -0.5 * size, 0)
    angle = np.where(flat == _ROTATE, -(amount % 360), 0)
    return inverse_matrices(angle, translate, 1.0, shear, centre).reshape(*choice.shape, 2, 3)

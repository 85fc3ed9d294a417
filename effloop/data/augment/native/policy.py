"""torchvision's policies: random operations of one table, with its distributions and pixels; `timm_policy` has timm's.

Draws are made on the host. On a batch, images with the same operation are processed together.
"""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from effloop.data.augment.native import affine, host, kernels
from effloop.data.augment.operation import Image, Keys, PixelOperation, Sizes, bad, check_whole, operation, to_device
from effloop.data.image.mask import Mask
from effloop.data.random import uniforms
from effloop.lazy import Tensor, torch

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

_TABLE = (
    *((name, "", 0) for name in ("Identity", "ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate")),
    ("Brightness", "brightness", 1),
    ("Color", "saturation", 2),
    ("Contrast", "contrast", 2),
    ("Sharpness", "sharpness", 2),
    ("Posterize", "posterize", 1),
    ("Solarize", "solarize", 1),
    ("AutoContrast", "autocontrast", 0),
    ("Equalize", "equalize", 0),
    ("Invert", "invert", 0),
    ("SolarizeAdd", "solarize_add", 1),
    ("GaussianBlur", "blur", 1),
    ("Grayscale", "grayscale", 0),
    ("Hue", "hue", 1),
)
"""All policies' operations: torchvision's name, or timm's; the function in `host` and in `kernels`, but for the five
warps; and how many it takes of the level and 1 - level."""

NAMES = tuple(name for name, _, _ in _TABLE)  # `PolicyDraws.choice` is an index of this list

_SHEAR_X, _SHEAR_Y, _MOVE_X, _MOVE_Y, _ROTATE = range(1, 6)
_BLENDS = range(6, 10)  # their factor is 1 + magnitude
_SOLARIZE = 11
_SIGNED = 9  # 1 to 9 have a random sign
_COUNT = 14  # of RandAugment's and TrivialAugmentWide's, the first in the table
_MOST_BINS = 1000  # torchvision's is 31; tables are cached by operation and image size


@dataclass(frozen=True)
class PolicyDraws:
    """What was drawn for N images, K operations each, in order."""

    choice: Ints  # (N, K) indices of NAMES
    # (N, K): a shear, pixels to the right or down, degrees counter-clockwise; else the argument of the operation's
    # function: factor, bits, threshold, sigma
    level: Floats
    matrix: affine.Matrices  # (N, K, 2, 3) of `inverse_matrices`, for warps
    sampling: Ints  # (N, K) indices of the policy's `samplings`
    # (N, 1 + chains) float32, sum 1: shares of the image itself and of what chains of K / chains operations make of it
    shares: NDArray[np.float32] | None = None


class Policy(PixelOperation):
    """Applies random operations; subclasses draw them.

    Attributes:
        samplings: of warps, one or two.
    """

    takes_masks = True
    samplings: tuple[affine.Sampling, ...] = ()

    def apply_inplace(self, image: Image, drawn: PolicyDraws, row: int) -> None:
        steps = np.arange(drawn.choice.shape[1])
        if drawn.shares is None:
            self._apply_steps(image, drawn, row, steps)
            return
        share, *others = drawn.shares[row]
        mixed = image * share
        for other, chain in zip(others, steps.reshape(len(others), -1), strict=True):
            changed = image.copy()
            self._apply_steps(changed, drawn, row, chain)
            mixed += changed * other
        np.copyto(image, mixed, casting="unsafe")

    def _apply_steps(self, image: Image, drawn: PolicyDraws, row: int, steps: Ints) -> None:
        for step in steps.tolist():
            choice = int(drawn.choice[row, step])
            _, function, count = _TABLE[choice]
            if function:
                level = float(drawn.level[row, step])
                getattr(host, function)(image, *(level, 1 - level)[:count])
            elif choice:
                affine.warp_one(image, drawn.matrix[row, step], self.samplings[drawn.sampling[row, step]])

    def apply_batch(self, images: Tensor, drawn: PolicyDraws) -> Tensor:
        steps = np.arange(drawn.choice.shape[1])
        if drawn.shares is None:
            return self._batch_steps(images, drawn, steps)
        shares = to_device(drawn.shares.T, images)[..., None, None, None]
        mixed = images * shares[0]
        for share, chain in zip(shares[1:], steps.reshape(len(shares) - 1, -1), strict=True):
            mixed += self._batch_steps(images, drawn, chain) * share
        return mixed.to(torch.uint8)

    def _batch_steps(self, images: Tensor, drawn: PolicyDraws, steps: Ints) -> Tensor:
        for step in steps.tolist():
            if drawn.choice[:, step].any():
                images = self._step(images, drawn, step)
        return images

    def apply_mask(self, mask: Mask, drawn: PolicyDraws, row: int) -> Mask:
        for step in np.flatnonzero(_warps(drawn.choice[row])).tolist():
            mask = affine.warp_mask(mask, drawn.matrix[row, step])
        return mask

    def apply_mask_batch(self, masks: Tensor, drawn: PolicyDraws) -> Tensor:
        for step in range(drawn.choice.shape[1]):
            if len(some := np.flatnonzero(_warps(drawn.choice[:, step]))):
                rows = to_device(some, masks)
                warped = affine.warp_masks(masks.index_select(0, rows), drawn.matrix[some, step])
                masks = masks.index_copy(0, rows, warped)
        return masks

    def _step(self, images: Tensor, drawn: PolicyDraws, step: int) -> Tensor:
        """Apply one operation to each image: sort images by operation, apply each to its slice, restore the order."""
        choice, level = drawn.choice[:, step], drawn.level[:, step]
        kind = np.where(_warps(choice), _SHEAR_X + drawn.sampling[:, step], choice)
        order = np.argsort(kind, kind="stable")
        # By two gathers: on a CPU index_copy_ takes 140 µs per image, a gather 10.
        there, back = to_device(np.stack([order, np.argsort(order)]), images)
        levels = to_device(np.stack([level[order], 1 - level[order]]).astype(np.float32), images)
        pixels = images.permute(0, 2, 3, 1).index_select(0, there)
        sorted_ = pixels.permute(0, 3, 1, 2)
        kinds, starts = np.unique(kind[order], return_index=True)
        for which, start, end in zip(kinds.tolist(), starts, np.append(starts, len(order))[1:], strict=True):
            group = sorted_[start:end]
            _, function, count = _TABLE[which]
            if function:
                group.copy_(getattr(kernels, function)(group, *levels[:count, start:end]))
            elif which:
                sampling = self.samplings[which - _SHEAR_X]
                group.copy_(affine.warp(group, drawn.matrix[order[start:end], step], sampling))
        return pixels.index_select(0, back).permute(0, 3, 1, 2)


@dataclass(frozen=True)
class _Space:
    """torchvision's magnitudes: `bins` of each operation, from nothing to the most."""

    bins: int
    shear: float = 0.3
    move: float = 150.0 / 331.0  # of the side; from 1 on in pixels
    turn: float = 30.0
    blend: float = 0.9
    bits: tuple[int, int] = (8, 4)  # the most and the fewest

    def draws(self, choice: Ints, bins: Ints, negative: Bools, sizes: Sizes, shares: Any = None) -> PolicyDraws:
        """From (N, K) operations, bins of their magnitudes, and signs."""
        level = _table(self)[choice, bins]
        for move, sides in ((_MOVE_Y, sizes[:, 0]), (_MOVE_X, sizes[:, 1])):
            for side in np.unique(sides).tolist():
                here = (choice == move) & (sides == side)[:, None]
                level[here] = _ramp(self.move if self.move >= 1 else self.move * side, self.bins)[bins[here]]
        level[negative & (choice >= 1) & (choice <= _SIGNED)] *= -1
        level = np.where(np.isin(choice, _BLENDS), 1 + level, level)
        level[choice == _SOLARIZE] *= 255
        level = np.where((choice == _MOVE_X) | (choice == _MOVE_Y), np.trunc(level), level)
        return draws(choice, level, sizes, shares=shares)


@operation
class RandAugment(Policy):
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
        self._count = check_whole("num_ops", num_ops, 0, _COUNT)
        self._space = _Space(check_whole("num_magnitude_bins", num_magnitude_bins, 2, _MOST_BINS))
        self._bin = check_whole("magnitude", magnitude, 0, num_magnitude_bins - 1)
        self.samplings = (affine.Sampling.of(interpolation, fill),)

    def draw(self, keys: Keys, sizes: Sizes) -> PolicyDraws:
        numbers = uniforms(keys, 2 * self._count)
        choice = uniform_index(_COUNT, numbers[:, ::2])
        return self._space.draws(choice, np.full_like(choice, self._bin), numbers[:, 1::2] < 0.5, sizes)


@operation
class TrivialAugmentWide(Policy):
    """One of 14 operations, of uniform magnitude (Müller and Hutter 2021).

    Args:
        num_magnitude_bins: number of magnitudes, 2 to 1,000.
        interpolation: `nearest` or `bilinear`, for the five warps.
        fill: as RandAugment's.
    """

    def __init__(self, num_magnitude_bins: int = 31, interpolation: str = "nearest", fill: Any = 0) -> None:
        bins = check_whole("num_magnitude_bins", num_magnitude_bins, 2, _MOST_BINS)
        self._space = _Space(bins, 0.99, 32.0, 135.0, 0.99, (8, 2))
        self.samplings = (affine.Sampling.of(interpolation, fill),)

    def draw(self, keys: Keys, sizes: Sizes) -> PolicyDraws:
        numbers = uniforms(keys, 3)
        choice, bins = uniform_index(_COUNT, numbers[:, :1]), uniform_index(self._space.bins, numbers[:, 1:2])
        return self._space.draws(choice, bins, numbers[:, 2:] < 0.5, sizes)


@operation
class AutoAugment(Policy):
    """One of 25 pairs of operations, each with its probability and magnitude (Cubuk et al. 2018).

    Args:
        policy: `imagenet`, `cifar10` or `svhn`.
        interpolation: `nearest` or `bilinear`, for the five warps.
        fill: as RandAugment's.
    """

    def __init__(self, policy: str = "imagenet", interpolation: str = "nearest", fill: Any = None) -> None:
        if policy not in (allowed := ("imagenet", "cifar10", "svhn")):
            raise bad("policy", policy, ", ".join(allowed))
        library = importlib.import_module("torchvision.transforms")
        pairs = library.AutoAugment(library.AutoAugmentPolicy(policy)).policies
        self._choice = np.array([[NAMES.index(name) for name, _, _ in pair] for pair in pairs])
        self._p = np.array([[p for _, p, _ in pair] for pair in pairs])
        self._bins = np.array([[magnitude or 0 for _, _, magnitude in pair] for pair in pairs])
        self.samplings = (affine.Sampling.of(interpolation, fill),)

    def draw(self, keys: Keys, sizes: Sizes) -> PolicyDraws:
        numbers = uniforms(keys, 5)
        pair = uniform_index(len(self._p), numbers[:, 0])
        choice = np.where(numbers[:, 1:3] < self._p[pair], self._choice[pair], 0)
        return _Space(10).draws(choice, self._bins[pair], numbers[:, 3:] < 0.5, sizes)


@operation
class AugMix(Policy):
    """The image mixed with what chains of operations make of it, by random shares (Hendrycks et al. 2020).

    torchvision's with alpha = 1, which all recipes have: shares are uniform.

    Args:
        severity: the magnitude is uniform from 0 to severity - 1 tenths; 1 to 10.
        mixture_width: number of chains, 1 to 10.
        chain_depth: operations in each, at most 10; -1 is 1, 2 or 3 at random.
        all_ops: whether brightness, contrast, colour and sharpness are among them.
        interpolation: `nearest` or `bilinear`, for the five warps.
        fill: as RandAugment's.
    """

    takes_masks = False  # a pixel is of several classes

    def __init__(
        self,
        severity: int = 3,
        mixture_width: int = 3,
        chain_depth: int = -1,
        all_ops: bool = True,
        interpolation: str = "bilinear",
        fill: Any = None,
    ) -> None:
        self._severity = check_whole("severity", severity, 1, 10)
        self._width = check_whole("mixture_width", mixture_width, 1, 10)
        self._depth = check_whole("chain_depth", chain_depth, -1, 10)
        self._choices = np.array([choice for choice in range(1, _COUNT) if all_ops or choice not in _BLENDS])
        self.samplings = (affine.Sampling.of(interpolation, fill),)

    def draw(self, keys: Keys, sizes: Sizes) -> PolicyDraws:
        shares, within, numbers = mixture(keys, self._width, self._depth, 3)
        choice = np.where(within, self._choices[uniform_index(len(self._choices), numbers[..., 0])], 0)
        bins = uniform_index(self._severity, numbers[..., 1])
        return _Space(10, move=1 / 3, bits=(4, 0)).draws(choice, bins, numbers[..., 2] < 0.5, sizes, shares)


def mixture(keys: Keys, width: int, depth: int, count: int) -> tuple[NDArray[np.float32], Bools, Floats]:
    """AugMix with alpha = 1: (N, 1 + width) shares, (N, K) which of K operations are done, (N, K, count) numbers."""
    most = depth if depth > 0 else 3
    numbers = uniforms(keys, 1 + 2 * width + width * most * count)
    mixed, parts, lengths = numbers[:, :1], -np.log1p(-numbers[:, 1 : 1 + width].copy()), numbers[:, 1 + width :]
    shares = np.concatenate([1 - mixed, mixed * parts / parts.sum(1, keepdims=True)], axis=1).astype(np.float32)
    end = uniform_index(3, lengths[:, :width]) + 1 if depth < 1 else np.full((len(keys), width), depth)
    within = (np.arange(most) < end[..., None]).reshape(len(keys), -1)
    return shares, within, numbers[:, 1 + 2 * width :].reshape(len(keys), width * most, count)


def _warps(choice: Ints) -> Bools:
    """Which operations move pixels."""
    found: Bools = (choice >= _SHEAR_X) & (choice <= _ROTATE)
    return found


def uniform_index(count: int, numbers: Floats) -> Ints:
    """Numbers in [0, 1) -> indices below `count`."""
    return (count * numbers).astype(np.int64)


@functools.lru_cache(4096)
def _ramp(most: float, bins: int) -> Floats:
    return torch.linspace(0.0, most, bins).double().numpy()  # in float32, as in torchvision


@functools.cache
def _table(space: _Space) -> Floats:
    """(19, bins): each operation's magnitudes, up to its largest."""
    bins, (most, fewest) = space.bins, space.bits
    nothing = np.zeros(bins)
    posterize = (most - (torch.arange(bins) / ((bins - 1) / (most - fewest)))).round().double().numpy()
    solarize = torch.linspace(1.0, 0.0, bins).double().numpy()
    ramps = [_ramp(largest, bins) for largest in (space.shear, space.shear, 0.0, 0.0, space.turn, *[space.blend] * 4)]
    return np.stack([nothing, *ramps, posterize, solarize, *[nothing] * (len(NAMES) - 12)])


def draws(
    choice: Ints, level: Floats, sizes: Sizes, sampling: Ints | None = None, shares: NDArray[np.float32] | None = None
) -> PolicyDraws:
    """The draws of (N, K) operations and levels for images of (N, 2) sizes, with their matrices."""
    moves = _warps(choice)
    kind, amount, size = choice[moves], level[moves], sizes[np.nonzero(moves)[0], ::-1]
    shear, translate = np.zeros((2, len(kind), 2))
    for column, (sheared, moved) in enumerate(((_SHEAR_X, _MOVE_X), (_SHEAR_Y, _MOVE_Y))):
        shear[:, column] = np.where(kind == sheared, np.degrees(np.arctan(amount)), 0)
        translate[:, column] = np.where(kind == moved, amount, 0)
    # Shears keep the top left corner in place, the others the centre.
    centre = np.where(((kind == _SHEAR_X) | (kind == _SHEAR_Y))[:, None], -0.5 * size, 0)
    angle = np.where(kind == _ROTATE, -(amount % 360), 0)
    matrix = np.zeros((*choice.shape, 2, 3))
    matrix[moves] = affine.inverse_matrices(angle, translate, 1.0, shear, centre)
    return PolicyDraws(choice, level, matrix, np.zeros_like(choice) if sampling is None else sampling, shares)

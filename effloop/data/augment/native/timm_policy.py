"""timm's policies, and DeiT III's. timm reads its spelling; operations are drawn and applied here, as timm's are.

Warps have Pillow's pixels, on the host to the bit; other operations are within a level of Pillow's, which rounds luma
where torchvision, as `kernels` and `host`, truncates it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
from PIL.Image import Resampling

from effloop.data.augment.native.affine import Sampling
from effloop.data.augment.native.policy import NAMES, Floats, Policy, PolicyDraws, draws, mixture, uniform_index
from effloop.data.augment.operation import Keys, Sizes, bad, check_levels, operation
from effloop.data.random import uniforms
from effloop.errors import optional_package

Level = Callable[[Floats, Floats], Floats]


def _signed(most: float) -> Level:
    return lambda share, number: np.where(number > 0.5, -1, 1) * (share * most)


_BLENDS = ("Color", "Contrast", "Brightness", "Sharpness")
_LEVELS: dict[str, tuple[str, Level]] = {
    **{name: (name, lambda share, _: 0 * share) for name in ("AutoContrast", "Equalize", "Invert")},
    **{name: (name, lambda share, _: share * 1.8 + 0.1) for name in _BLENDS},
    **{f"{name}Increasing": (name, lambda share, at: np.maximum(0.1, 1 + _signed(0.9)(share, at))) for name in _BLENDS},
    "Rotate": ("Rotate", _signed(30.0)),
    "ShearX": ("ShearX", _signed(0.3)),
    "ShearY": ("ShearY", _signed(0.3)),
    "TranslateXRel": ("TranslateX", _signed(-1.0)),  # to the left, as a share of the farthest
    "TranslateYRel": ("TranslateY", _signed(-1.0)),
    "Posterize": ("Posterize", lambda share, _: np.minimum(8, np.trunc(share * 4))),
    "PosterizeIncreasing": ("Posterize", lambda share, _: np.maximum(0, 4 - np.trunc(share * 4))),
    "PosterizeOriginal": ("Posterize", lambda share, _: np.minimum(8, np.trunc(share * 4) + 4)),
    "Solarize": ("Solarize", lambda share, _: np.minimum(256, np.trunc(share * 256))),
    "SolarizeIncreasing": ("Solarize", lambda share, _: 256 - np.minimum(256, np.trunc(share * 256))),
    "SolarizeAdd": ("SolarizeAdd", lambda share, _: np.minimum(128, np.trunc(share * 110))),
    "Desaturate": ("Color", lambda share, _: 0.5 - 0.5 * np.minimum(1, share)),
    "GaussianBlur": ("GaussianBlur", lambda share, _: np.minimum(2, 0.1 + 1.9 * share)),
    "GaussianBlurRand": ("GaussianBlur", lambda share, at: 0.1 + (2 * np.minimum(1, share) - 0.1) * at),
}
"""timm's operations (timm/data/auto_augment.py): the name in `policy`, and the level of magnitudes in tenths and of
numbers in [0, 1)."""

_SPELLING = re.compile(
    r"rand(-(m|n|mmax|inc)\d{1,2}|-(p|mstd)\d+(\.\d+)?|-t(3aw?|weights))*|augmix(-[mdb]\d{1,2}|-w[1-9]|-mstd\d+(\.\d+)?)*"
    r"|((original|v0)r?|3a)(-mstd\d+(\.\d+)?)?"
)
_FILTERS = {"bilinear": [Resampling.BILINEAR], "bicubic": [Resampling.BICUBIC]}
_FILTERS["random"] = _FILTERS["bilinear"] + _FILTERS["bicubic"]
_NUMBERS = 6  # random ones for an operation: which, whether, sign, two for noise, filter


@operation
class TimmAutoAugment(Policy):
    """timm's RandAugment, AutoAugment, AugMix or 3-Augment, in timm's spelling, such as rand-m9-mstd0.5-inc1.

    Args:
        config: `rand` and any of `-m9` (magnitude, of 10), `-n2` (operations), `-p0.5` (probability of each),
            `-mstd0.5` (deviation of the magnitude; above 100 it is uniform), `-mmax10`, `-inc1` (all grow with the
            magnitude), `-t3a`, `-t3aw`, `-tweights` (other operations); `augmix` and any of `-m3`, `-w3` (chains),
            `-d2` (their length), `-mstd0.5`; or `original`, `originalr`, `v0`, `v0r`, `3a`, and maybe `-mstd0.5`.
        interpolation: of warps: `bilinear`, `bicubic`, or `random`, one of the two; timm takes the crop's.
        fill: of pixels from outside: a whole level from 0 to 255, or three; ImageNet's mean.
    """

    def __init__(self, config: str, interpolation: str = "random", fill: Any = (124, 116, 104)) -> None:
        if interpolation not in _FILTERS:
            raise bad("interpolation", interpolation, ", ".join(_FILTERS))
        levels = check_levels("fill", fill)
        self.samplings = tuple(Sampling(fill=levels, pillow=each) for each in _FILTERS[interpolation])
        if not _SPELLING.fullmatch(str(config)):  # timm passes over some of what it doesn't know
            raise bad("config", config, "timm's spelling, such as rand-m9-mstd0.5-inc1")
        timm: Any = optional_package("timm.data.auto_augment", "op: TimmAutoAugment", "effloop[timm]")
        makers = {"rand": timm.rand_augment_transform, "augmix": timm.augment_and_mix_transform}
        theirs = makers.get(config.partition("-")[0], timm.auto_augment_transform)(config, {})
        self._width, self._depth = getattr(theirs, "width", 0), getattr(theirs, "depth", 0)
        self.takes_masks = not self._width
        # AutoAugment draws a row; RandAugment single operations, without replacement where they have weights.
        rows = getattr(theirs, "policy", None) or [[op] for op in theirs.ops]
        self._in_row, self._weights = hasattr(theirs, "policy"), getattr(theirs, "choice_weights", None)
        self._count = getattr(theirs, "num_layers", len(rows[0]))
        if self._weights is not None and self._count > len(rows):
            raise bad("config", config, f"at most -n{len(rows)}, as none of its operations is drawn twice")
        ops = [op for row in rows for op in row]
        self._names, self._std, self._most = [op.name for op in ops], ops[0].magnitude_std, ops[0].magnitude_max or 10
        self._p, self._m = np.array([(op.prob, op.magnitude) for op in ops]).T

    def draw(self, keys: Keys, sizes: Sizes) -> PolicyDraws:
        shares, within, all_ = None, np.ones((), np.bool_), len(self._names)
        if self._width:
            shares, within, numbers = mixture(keys, self._width, self._depth, _NUMBERS)
        else:
            flat = uniforms(keys, all_ + self._count * _NUMBERS)
            first, numbers = flat[:, :all_].copy(), flat[:, all_:].reshape(len(keys), self._count, _NUMBERS)
        which, whether, at, near, turn, cubic = np.moveaxis(numbers, -1, 0).copy()
        pick = uniform_index(all_, which)
        if self._in_row:
            pick = self._count * uniform_index(all_ // self._count, first[:, :1]) + np.arange(self._count)
        elif self._weights is not None:  # Efraimidis and Spirakis 2006, "Weighted random sampling with a reservoir"
            pick = (-np.log1p(-first) / self._weights).argsort(1)[:, : self._count]
        magnitude = self._m[pick]
        if self._std == np.inf:
            magnitude = magnitude * near
        elif self._std:
            magnitude = magnitude + self._std * np.sqrt(-2 * np.log1p(-near)) * np.cos(2 * np.pi * turn)
        share = magnitude.clip(0, self._most) / 10
        done = within & (whether < self._p[pick])
        choice, level = np.zeros(pick.shape, np.int64), np.zeros(pick.shape)
        for place in np.unique(pick).tolist():
            here, (name, of) = done & (pick == place), _LEVELS[self._names[place]]
            choice[here], level[here] = NAMES.index(name), of(share[here], at[here])
        farthest = 0.3 if self._width else 0.45  # timm's translate_pct
        for name, side in (("TranslateX", sizes[:, 1:]), ("TranslateY", sizes[:, :1])):
            level = np.where(choice == NAMES.index(name), level * farthest * side, level)
        return draws(choice, level, sizes, uniform_index(len(self.samplings), cubic), shares)


@operation
class ThreeAugment(Policy):
    """Grey, solarised from 128 on, or blurred by a sigma of 0.1 to 2 pixels, each as often (Touvron et al. 2022).

    As in facebookresearch/deit/augment.py.
    """

    def draw(self, keys: Keys, sizes: Sizes) -> PolicyDraws:
        which, sigma = np.split(uniforms(keys, 2), 2, axis=1)
        place = uniform_index(3, which)
        choice = np.array([NAMES.index(name) for name in ("Grayscale", "Solarize", "GaussianBlur")])[place]
        level = np.choose(place, [0 * sigma, 0 * sigma + 128, 0.1 + 1.9 * sigma])
        return draws(choice, level, sizes)

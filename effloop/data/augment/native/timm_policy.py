"""timm's policies in timm's spelling: its operations, probabilities, magnitudes and noise (timm/data/auto_augment.py).

Warps have Pillow's pixels, on the host to the bit. Colours have torchvision's, as those of all policies here, within 1
level of Pillow's, which rounds luma where torchvision truncates it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
from PIL.Image import Resampling

from effloop.data.augment.native.affine import Sampling
from effloop.data.augment.native.policy import (
    MOVE_X,
    MOVE_Y,
    NAMES,
    Floats,
    Policy,
    PolicyDraws,
    matrices,
    mixture,
    torchvisions_pairs,
    uniform_index,
)
from effloop.data.augment.operation import Keys, Sizes, bad, check_levels, operation
from effloop.data.random import uniforms

_SETS = {
    "": "1 AutoContrast Equalize Invert Rotate Posterize Solarize SolarizeAdd Color Contrast Brightness Sharpness "
    "ShearX ShearY TranslateXRel TranslateYRel",
    "augmix": "1 AutoContrast ColorIncreasing ContrastIncreasing BrightnessIncreasing SharpnessIncreasing Equalize "
    "Rotate PosterizeIncreasing SolarizeIncreasing ShearX ShearY TranslateXRel TranslateYRel",
    "3a": "1 SolarizeIncreasing Desaturate GaussianBlur",
    "3aw": "6 SolarizeIncreasing Desaturate GaussianBlur 3 Rotate 2 ShearX ShearY 1 PosterizeIncreasing AutoContrast "
    "ColorIncreasing SharpnessIncreasing ContrastIncreasing BrightnessIncreasing Equalize Invert",
    "weights": "3 Rotate 2 ShearX ShearY 1 TranslateXRel TranslateYRel .25 ColorIncreasing SharpnessIncreasing "
    "AutoContrast .05 SolarizeIncreasing SolarizeAdd ContrastIncreasing BrightnessIncreasing Equalize "
    "PosterizeIncreasing Invert",
}
"""Operations of RandAugment by its `t`, and of AugMix: each weight before those that have it."""

_V0 = """\
Equalize .8 1 ShearY .8 4, Color .4 9 Equalize .6 3, Color .4 1 Rotate .6 8, Solarize .8 3 Equalize .4 7,
Solarize .4 2 Solarize .6 2, Color .2 0 Equalize .8 8, Equalize .4 8 SolarizeAdd .8 3, ShearX .2 9 Rotate .6 8,
Color .6 1 Equalize 1 2, Invert .4 9 Rotate .6 0, Equalize 1 9 ShearY .6 3, Color .4 7 Equalize .6 0,
Posterize .4 6 AutoContrast .4 7, Solarize .6 8 Color .6 9, Solarize .2 4 Rotate .8 9, Rotate 1 7 TranslateYRel .8 9,
ShearX 0 0 Solarize .8 4, ShearY .8 0 Color .6 4, Color 1 0 Rotate .6 2, Equalize .8 4 Equalize 0 8,
Equalize 1 4 AutoContrast .6 2, ShearY .4 7 SolarizeAdd .6 7, Posterize .8 2 Solarize .6 10,
Solarize .6 8 Equalize .6 1, Color .8 6 Rotate .4 5
"""
"""AutoAugment's policy of TensorFlow's EfficientNet: name, probability and magnitude of two operations in a row."""

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
    "PosterizeOriginal": ("Posterize", lambda share, _: np.trunc(share * 4) + 4),
    "Solarize": ("Solarize", lambda share, _: np.minimum(256, np.trunc(share * 256))),
    "SolarizeIncreasing": ("Solarize", lambda share, _: 256 - np.minimum(256, np.trunc(share * 256))),
    "SolarizeAdd": ("SolarizeAdd", lambda share, _: np.minimum(128, np.trunc(share * 110))),
    "Desaturate": ("Color", lambda share, _: 0.5 - 0.5 * np.minimum(1, share)),
    "GaussianBlur": ("GaussianBlur", lambda share, _: np.minimum(2, 0.1 + 1.9 * share)),
    "GaussianBlurRand": ("GaussianBlur", lambda share, at: 0.1 + (2 * np.minimum(1, share) - 0.1) * at),
}
"""timm's operations: the name in `policy`, and the level there of magnitudes in tenths and numbers in [0, 1)."""

_KEYS: dict[str, dict[str, float]] = {
    "rand": {"m": 10, "n": 2, "p": 0.5, "mstd": 0, "mmax": 0, "inc": 0},
    "augmix": {"m": 3, "w": 3, "d": 0, "a": 1, "b": 0, "mstd": np.inf},
    **{name: {"mstd": 0} for name in ("original", "originalr", "v0", "v0r", "3a")},
}
"""What may follow each policy's name, and timm's defaults."""

_MOST = {"m": 100, "n": 14, "p": 1, "mmax": 100, "inc": 1, "w": 10, "d": 10, "a": 1, "b": 1}
_FILTERS: dict[str, tuple[Resampling, ...]] = {"bilinear": (Resampling.BILINEAR,), "bicubic": (Resampling.BICUBIC,)}
_FILTERS["random"] = (Resampling.BILINEAR, Resampling.BICUBIC)
_NUMBERS = 6  # random ones for an operation: which, whether, sign, two for noise, filter


@operation
class TimmAutoAugment(Policy):
    """timm's RandAugment, AutoAugment, AugMix and 3-Augment in timm's spelling, such as rand-m9-mstd0.5-inc1.

    Magnitudes are tenths: normal about `m` with deviation `mstd`, or uniform from 0 to `m` where that is `inf` (which
    timm passes over) or, of `rand`, above 100; then at least 0 and at most `mmax`, by default 10.

    Args:
        config: `rand` and any of `-m9` (magnitude; else 10), `-n2` (operations), `-p0.5` (probability of each),
            `-mstd0.5`, `-mmax10`, `-inc1` (all grow with the magnitude), and `-t3a`, `-t3aw` or `-tweights` (other sets
            of operations); `augmix` and any of `-m3`, `-w3` (chains), `-d2` (operations in each; else 1 to 3) and
            `-mstd0.5` (else inf); or `original`, `originalr`, `v0`, `v0r` or `3a`, and maybe `-mstd0.5`.
        interpolation: of warps: `bilinear`, `bicubic`, or `random`, one of the two each time. timm takes the crop's,
            which is random by default.
        fill: of pixels from outside: a whole level from 0 to 255, or three; ImageNet's mean.
    """

    def __init__(self, config: str, interpolation: str = "random", fill: Any = (124, 116, 104)) -> None:
        self._kind, values, among = _parsed(config)
        self._std, self._most = values["mstd"], values.get("mmax") or 10
        self._width, self._depth = int(values.get("w", 0)), int(values.get("d", 0))
        self.takes_masks = not self._width
        self._reach = 0.3 if self._width else 0.45  # of translations; timm's translate_pct
        self._weights: Floats | None = None
        if "m" in values:
            weights = _weights("augmix" if self._width else among, bool(values.get("inc")))
            self._count = int(values.get("n", 0))
            self._weights = np.array([*weights.values()]) if len({*weights.values()}) > 1 else None
            rows = [(name, values.get("p", 1.0), values["m"]) for name in weights]
        else:
            self._count = 1 if self._kind == "3a" else 2
            rows = _pairs(self._kind)
        self._names = [name for name, _, _ in rows]
        self._p, self._m = np.array([row[1:] for row in rows]).T
        if interpolation not in _FILTERS:
            raise bad("interpolation", interpolation, "random, bilinear or bicubic")
        levels = check_levels("fill", fill)
        self.samplings = tuple(Sampling(fill=levels, pillow=each) for each in _FILTERS[interpolation])

    def draw(self, keys: Keys, sizes: Sizes) -> PolicyDraws:
        shares, within, all_ = None, np.ones((), np.bool_), len(self._names)
        if self._width:
            shares, within, numbers = mixture(keys, self._width, self._depth, _NUMBERS)
        else:
            flat = uniforms(keys, all_ + self._count * _NUMBERS)
            first, numbers = flat[:, :all_].copy(), flat[:, all_:].reshape(len(keys), self._count, _NUMBERS)
        which, whether, at, near, turn, cubic = np.moveaxis(numbers, -1, 0).copy()
        if self._weights is not None:  # without replacement (Efraimidis and Spirakis 2006)
            pick = (-np.log1p(-first) / self._weights).argsort(1)[:, : self._count]
        elif self._kind in ("rand", "augmix"):
            pick = uniform_index(all_, which)
        else:
            pick = self._count * uniform_index(all_ // self._count, first[:, :1]) + np.arange(self._count)
        magnitude = self._m[pick]
        if self._std == np.inf:
            magnitude = magnitude * near
        elif self._std:
            magnitude = magnitude + self._std * np.sqrt(-2 * np.log1p(-near)) * np.cos(2 * np.pi * turn)
        share = magnitude.clip(0, self._most) / 10
        done = within & (whether < self._p[pick])
        choice, level = np.zeros(pick.shape, np.int64), np.zeros(pick.shape)
        for place in np.unique(pick).tolist():
            here = done & (pick == place)
            name, of = _LEVELS[self._names[place]]
            choice[here], level[here] = NAMES.index(name), of(share[here], at[here])
        for move, sides in ((MOVE_X, sizes[:, 1:]), (MOVE_Y, sizes[:, :1])):
            level = np.where(choice == move, level * self._reach * sides, level)
        sampling = uniform_index(len(self.samplings), cubic)
        return PolicyDraws(choice, level, matrices(choice, level, sizes), sampling, shares)


@operation
class ThreeAugment(TimmAutoAugment):
    """Grey, solarised from 128 on, or blurred by a sigma of 0.1 to 2 pixels, each as often (Touvron et al. 2022).

    As in facebookresearch/deit/augment.py, and as timm's `3a`.
    """

    def __init__(self) -> None:
        super().__init__("3a")


def _parsed(config: object) -> tuple[str, dict[str, float], str]:
    """A policy's name, its values and its set of operations."""
    kind, *sections = str(config).split("-")
    if kind not in _KEYS:
        raise bad("config", config, f"one of {', '.join(_KEYS)}, and what it may have, as rand-m9-mstd0.5-inc1")
    values, among = dict(_KEYS[kind]), ""
    for section in sections:
        found = re.fullmatch(r"([a-z]+)(\d+(?:\.\d+)?|(?<=std)inf)", section)
        key, value = (found[1], float(found[2])) if found else ("", 0.0)
        whole = key in ("p", "mstd") or value.is_integer()
        if kind == "rand" and section[:1] == "t" and section[1:] in _SETS:
            among = section[1:]
        elif key in values and whole and (key != "a" or value) and value <= _MOST.get(key, np.inf):
            values[key] = np.inf if kind == "rand" and key == "mstd" and value > 100 else value
        else:
            takes = ", ".join(f"{key} up to {_MOST[key]}" if key in _MOST else key for key in values)
            takes += "; t3a, t3aw or tweights" if kind == "rand" else ""
            raise bad("config", config, f"instead of {section!r} what {kind} has: {takes}")
    return kind, values, among


def _weights(among: str, increasing: bool) -> dict[str, float]:
    """{name: weight} of a set of operations."""
    weights, weight = {}, 0.0
    for word in _SETS[among].split():
        if word[0].isalpha():
            grows = not among and increasing and f"{word}Increasing" in _LEVELS
            weights[f"{word}Increasing" if grows else word] = weight
        else:
            weight = float(word)
    return weights


def _pairs(kind: str) -> list[tuple[str, float, float]]:
    """Name, probability and magnitude of each operation of a policy, one sub-policy after the other."""
    if kind == "3a":
        return [("Solarize", 1, 5), ("Desaturate", 1, 10), ("GaussianBlurRand", 1, 10)]
    if kind.startswith("v0"):
        words = _V0.replace(",", " ").split()
        rows = [(name, float(p), float(m)) for name, p, m in zip(words[::3], words[1::3], words[2::3], strict=True)]
    else:
        rows = [(name, p, m or 0) for pair in torchvisions_pairs("imagenet") for name, p, m in pair]
    posterize = {"original": "PosterizeOriginal", "v0": "Posterize"}.get(kind, "PosterizeIncreasing")
    return [(posterize if name == "Posterize" else name, p, m) for name, p, m in rows]

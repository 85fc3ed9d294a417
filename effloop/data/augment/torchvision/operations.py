"""Which of torchvision's operations a recipe may name, and which values their parameters take.

torchvision's own constructors leave much unchecked, and some of it shows only when it is drawn.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from effloop.data.augment import recipe
from effloop.data.augment.native.frames import check_size
from effloop.data.augment.operation import BadParameterError, check_number, check_probability, check_range
from effloop.errors import ConfigError
from effloop.registry import choices

Check = Callable[[str, Any], Any]
"""(name, value) -> what torchvision takes for it."""

_FRAMES = "CenterCrop Pad RandomCrop RandomResize RandomResizedCrop RandomShortestSize RandomZoomOut Resize ScaleJitter"
_WARPS = (
    "ElasticTransform RandomAffine RandomHorizontalFlip RandomPerspective RandomRotation RandomVerticalFlip Identity"
)
_COLOURS = (
    "ColorJitter Grayscale RGB RandomAdjustSharpness RandomAutocontrast RandomChannelPermutation RandomEqualize "
    "RandomGrayscale RandomInvert RandomPhotometricDistort RandomPosterize RandomSolarize"
)
_OTHERS = "GaussianBlur GaussianNoise RandomErasing"
_POLICIES = "AugMix AutoAugment RandAugment TrivialAugmentWide"
_CONTAINERS = "RandomApply RandomChoice RandomOrder"

NAMES = tuple(sorted(" ".join([_FRAMES, _WARPS, _COLOURS, _OTHERS, _POLICIES, _CONTAINERS]).split()))
"""torchvision.transforms.v2's classes that make one (3, h, w) uint8 image of another. Not JPEG, which is deprecated
since 0.29 and not there on a GPU."""

_LEFT_OUT = {"inplace"}  # it would write into what may be a source's own memory


def operations(library: Any, size: int) -> dict[str, Maker]:
    """All that recipes may name.

    Args:
        library: torchvision.transforms.v2.
        size: `image_size`, for nested operations that need a size and aren't given one.
    """
    found: dict[str, Maker] = {}
    for name in NAMES:
        if hasattr(library, name):  # some are younger than the oldest torchvision that is supported
            found[name] = Maker(library, name, found, size)
    return found


@dataclass(frozen=True)
class Maker:
    """Makes an operation of torchvision's from a recipe's values, each of them checked.

    Attributes:
        library: torchvision.transforms.v2.
        name: of the operation.
        siblings: all of them, for those that hold others.
        size: `image_size`.
    """

    library: Any
    name: str
    siblings: Mapping[str, Maker]
    size: int

    @property
    def __signature__(self) -> inspect.Signature:
        signature = inspect.signature(getattr(self.library, self.name))
        return signature.replace(parameters=[p for p in signature.parameters.values() if p.name not in _LEFT_OUT])

    def __call__(self, **parameters: Any) -> Any:
        """The operation.

        Raises:
            BadParameterError: a value that it can't take.
            TypeError, ValueError: the same, found by torchvision.
        """
        if self.name == "Grayscale":
            parameters = {"num_output_channels": 3, **parameters}
        kind = getattr(self.library, self.name)
        values = {name: self._checked(name, value) for name, value in parameters.items()}
        _check_together(values)
        return kind(**values)

    def _checked(self, name: str, value: Any) -> Any:
        if name == "transforms":
            return self._nested(value)
        if name == "policy":
            policies = {policy.value: policy for policy in self.library.AutoAugmentPolicy}
            return policies[_one_of(policies)(name, value)]
        if name == "interpolation":
            frame = self.name in _FRAMES.split()
            return self.library.InterpolationMode(_one_of(_FRAME_FILTERS if frame else _WARP_FILTERS)(name, value))
        check = _OF_ONE.get((self.name, name)) or _OF_ALL.get(name)
        return check(name, value) if check else value

    def _nested(self, given: Any) -> list[Any]:
        """{label: {op: NAME, parameter: value}} -> operations."""
        entries = given if isinstance(given, Mapping) else {}
        kept = {f"transforms.{label}": (label, entry) for label, entry in entries.items() if entry is not None}
        if not kept:
            raise BadParameterError("transforms: it has none; write {LABEL: {op: NAME, PARAMETER: VALUE}, ...}")
        try:
            named = {where: recipe.named(*entry, where) for where, entry in kept.items()}
            return [recipe.make(*entry, self.siblings, where, self.size) for where, entry in named.items()]
        except ConfigError as error:  # the line gets what is around it in front
            raise BadParameterError(str(error)) from error


def always(made: Any) -> Any:
    """The same operation, done whatever its p is."""
    changed = copy.copy(made)
    changed.p = 1.0
    return changed


def _check_together(values: Mapping[str, Any]) -> None:
    """Refuse values that don't fit each other.

    Raises:
        BadParameterError: two don't.
    """
    mode, fill = values.get("padding_mode", "constant"), values.get("fill", 0)
    if mode != "constant" and isinstance(fill, list):
        raise BadParameterError(f"fill: {fill} is not allowed with padding_mode={mode}; set padding_mode=constant")
    bins, magnitude = values.get("num_magnitude_bins", 31), values.get("magnitude", 9)
    if magnitude >= bins:
        raise BadParameterError(f"magnitude: {magnitude} is not allowed; set one of 0 to {bins - 1}")


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise BadParameterError(f"{name}: {value} is not allowed; set true or false")
    return value


def _one_of(allowed: Sequence[str] | Mapping[str, Any]) -> Check:
    def check(name: str, value: Any) -> Any:
        if value not in list(allowed):
            raise BadParameterError(f"{name}: {value} is not allowed; {choices(str(value), allowed)}")
        return value

    return check


def _whole(low: int, high: float = math.inf) -> Check:
    def check(name: str, value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            bound = f"from {low} to {high}" if high < math.inf else f"of at least {low}"
            raise BadParameterError(f"{name}: {value} is not allowed; set a whole number {bound}")
        return value

    return check


def _number(low: float, high: float = math.inf) -> Check:
    return partial(check_number, low=low, high=high)


def _between(low: float, high: float = math.inf, *, above: bool = False) -> Check:
    """[smallest, largest]"""
    return partial(check_range, low=low, high=high, above=above)


def _number_or_range(number: Check, pair: Check) -> Check:
    return lambda name, value: (pair if isinstance(value, list | tuple) else number)(name, value)


def _list_of(check: Check, *lengths: int) -> Check:
    def checked(name: str, value: Any) -> list[Any]:
        if not isinstance(value, list | tuple) or (lengths and len(value) not in lengths):
            count = " or ".join(map(str, lengths))
            raise BadParameterError(f"{name}: {value} is not allowed; set a list" + (f" of {count}" if count else ""))
        return [check(name, item) for item in value]

    return checked


def _one_or_list(check: Check, *lengths: int) -> Check:
    several = _list_of(check, *lengths)
    return lambda name, value: (several if isinstance(value, list | tuple) else check)(name, value)


def _or_none(check: Check) -> Check:
    return lambda name, value: None if value is None else check(name, value)


def _side(name: str, value: Any) -> Any:
    """Pixels, or [height, width]."""
    check_size(name, value)
    return value


def _above(low: float, high: float = math.inf) -> Check:
    def check(name: str, value: Any) -> Any:
        if check_number(name, value, low, high) == low:
            raise BadParameterError(f"{name}: {value} is not allowed; set a number above {low:g}")
        return value

    return check


def _depth(name: str, value: Any) -> Any:
    if value == 0:
        raise BadParameterError(f"{name}: 0 is not allowed; set a whole number above 0, or -1 to draw it")
    return _whole(-1, 16)(name, value)


def _weights(name: str, value: Any) -> Any:
    if not sum(_list_of(_number(0))(name, value)):
        raise BadParameterError(f"{name}: {value} is not allowed; set at least one number above 0")
    return value


_FRAME_FILTERS = ("bilinear", "nearest", "nearest-exact", "bicubic")  # the others aren't on every device
_WARP_FILTERS = ("nearest", "bilinear")
_ANY, _POSITIVE = _number(-math.inf), _between(0, above=True)
_FACTORS, _HUES = _between(0), _between(-0.5, 0.5)

_OF_ALL: Mapping[str, Check] = {
    "all_ops": _flag,
    "alpha": _one_or_list(_number(0), 1, 2),
    "antialias": _flag,
    "bits": _whole(0, 8),
    "center": _or_none(_list_of(_ANY, 2)),
    "chain_depth": _depth,
    "clip": _flag,
    "degrees": _number_or_range(_number(0), _between(-math.inf)),
    "expand": _flag,
    "fill": _or_none(_one_or_list(_number(0, 255), 3)),
    "kernel_size": _one_or_list(_whole(1), 2),
    "magnitude": _whole(0),
    "max_size": _or_none(_whole(1)),
    "mean": _number(-1, 1),
    "mixture_width": _whole(1, 16),
    "num_magnitude_bins": _whole(2, 1000),
    "num_ops": _whole(0, 14),
    "num_output_channels": _whole(3, 3),
    "p": check_probability,
    "pad_if_needed": _flag,
    "padding": _or_none(_one_or_list(_whole(0), 1, 2, 4)),
    "padding_mode": _one_of(("constant", "edge", "reflect", "symmetric")),
    "ratio": _POSITIVE,
    "severity": _whole(1, 10),
    "sharpness_factor": _number(0),
    "shear": _or_none(_one_or_list(_ANY, 2, 4)),
    "side_range": _between(1),
    "sigma": _one_or_list(_number(0, 1e4), 1, 2),
    "size": _side,
    "target_size": _list_of(_whole(1), 2),
    "threshold": _number(0, 255),
    "translate": _or_none(_list_of(_number(0, 1), 2)),
    "scale_range": _POSITIVE,
    "value": _one_or_list(_number(0, 255), 3),  # `random` is of numbers that an image of bytes has no place for
}

_OF_ONE: Mapping[tuple[str, str], Check] = {
    ("AugMix", "alpha"): _above(0),
    ("GaussianBlur", "sigma"): _number_or_range(_above(0, 1e4), _between(0, 1e4, above=True)),
    ("GaussianNoise", "sigma"): _number(0, 1e4),
    ("RandomAffine", "scale"): _or_none(_POSITIVE),
    ("RandomChoice", "p"): _or_none(_weights),
    ("RandomErasing", "scale"): _between(0, 1),
    ("RandomResize", "max_size"): _whole(1),
    ("RandomResize", "min_size"): _whole(1),
    ("RandomResizedCrop", "scale"): _between(0, 1, above=True),
    ("RandomShortestSize", "min_size"): _one_or_list(_whole(1)),
    ("Resize", "size"): _or_none(_side),
    **{
        (kind, name): _or_none(_number_or_range(number, pair)) if kind == "ColorJitter" else pair
        for kind in ("ColorJitter", "RandomPhotometricDistort")
        for name, number, pair in (
            ("brightness", _number(0), _FACTORS),
            ("contrast", _number(0), _FACTORS),
            ("saturation", _number(0), _FACTORS),
            ("hue", _number(0, 0.5), _HUES),
        )
    },
}

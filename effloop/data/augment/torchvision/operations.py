"""Which of torchvision's operations a recipe may name, and how they are built from its values.

Values are checked against torchvision's own annotations, then by building the operation and running it on black images;
only what neither of them refuses is checked here.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Number
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

import torch
from torch import Tensor

from effloop.batch import ImageSize
from effloop.data.augment import recipe
from effloop.data.augment.parameters import (
    MOST_SIDE,
    RATIOS,
    BadParameterError,
    check_number,
    check_probability,
    check_range,
    check_size,
    check_whole,
)
from effloop.data.image.resize import readable
from effloop.errors import ConfigError
from effloop.registry import choices

_RESIZING = (
    "CenterCrop Pad RandomCrop RandomResize RandomResizedCrop RandomShortestSize RandomZoomOut Resize ScaleJitter"
)
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

LEAVES_MASKS = frozenset(f"{_COLOURS} {_OTHERS}".split())
"""Operations on an image alone: its mask stays as it is. Erasing, too: what is under the box has to be guessed."""

IMAGES_ALONE = frozenset(_POLICIES.split())
"""Operations that refuse a mask, though they move pixels."""

NAMES = tuple(sorted(" ".join([_RESIZING, _WARPS, _COLOURS, _OTHERS, _POLICIES, _CONTAINERS]).split()))
"""Classes of torchvision.transforms.v2 that map a (3, h, w) uint8 image to another. Not JPEG, which is deprecated since
0.29 and doesn't run on a GPU."""

_RESIZE_FILTERS = ("bilinear", "nearest", "nearest-exact", "bicubic")  # the others aren't on every device
_WARP_FILTERS = ("nearest", "bilinear")
_LEFT_OUT = {"inplace"}  # it would write into memory that may be the source's


def operations(library: Any, size: ImageSize) -> dict[str, OperationFactory]:
    """The operations that recipes may name.

    Args:
        library: torchvision.transforms.v2.
        size: `image_size`, the default of nested operations that need a size.
    """
    found: dict[str, OperationFactory] = {}
    for name in NAMES:
        if hasattr(library, name):  # some are missing in the oldest supported torchvision
            found[name] = OperationFactory(library, name, found, size)
    return found


@dataclass(frozen=True)
class OperationFactory:
    """Builds a torchvision operation from a recipe's values, and checks these.

    Attributes:
        library: torchvision.transforms.v2.
        name: of the operation.
        siblings: all factories by name, for containers.
        size: `image_size`.
    """

    library: Any
    name: str
    siblings: Mapping[str, OperationFactory]
    size: ImageSize

    @property
    def __signature__(self) -> inspect.Signature:
        signature = inspect.signature(getattr(self.library, self.name))
        return signature.replace(parameters=[p for p in signature.parameters.values() if p.name not in _LEFT_OUT])

    def __call__(self, **parameters: Any) -> Any:
        """Build the operation.

        Raises:
            BadParameterError: a parameter has a value that is not allowed.
            TypeError, ValueError: as raised by torchvision.
        """
        if self.name == "Grayscale":
            parameters = {"num_output_channels": 3, **parameters}
        values = {name: self._checked(name, value) for name, value in parameters.items()}
        fill = self.__signature__.parameters.get("fill")
        if fill is not None:
            values["fill"] = {"others": values.get("fill", fill.default), mask_type(): 0}  # `as_mask` inverts
        return getattr(self.library, self.name)(**values)

    def _checked(self, name: str, value: Any) -> Any:
        """A parameter's value, as torchvision takes it."""
        if name == "transforms":
            return self._nested(value)
        if name == "policy":
            policies = {policy.value: policy for policy in self.library.AutoAugmentPolicy}
            return policies[_one_of(policies, name, value)]
        if name == "interpolation":
            allowed = _RESIZE_FILTERS if self.name in _RESIZING.split() else _WARP_FILTERS
            return self.library.InterpolationMode(_one_of(allowed, name, value))
        check = _CHECKS.get((self.name, name)) or _CHECKS.get(name)
        if check is not None and value is not None:
            return check(name, value)
        annotation = self.__signature__.parameters[name].annotation
        try:
            return _converted(value, annotation)
        except TypeError:
            expected = inspect.formatannotation(annotation).replace("collections.abc.", "")
            raise BadParameterError(
                f"{name}: {value} is not allowed; {self.name} takes {expected}, at most {MOST_SIDE}"
            ) from None

    def _nested(self, given: Any) -> list[Any]:
        """{label: {op: NAME, parameter: value}} -> operations."""
        entries = given if isinstance(given, Mapping) else {}
        kept = {f"transforms.{label}": (label, entry) for label, entry in entries.items() if entry is not None}
        if not kept:
            raise BadParameterError("transforms: it has none; write {LABEL: {op: NAME, PARAMETER: VALUE}, ...}")
        try:
            named = {where: recipe.split_entry(*entry, where) for where, entry in kept.items()}
            return [recipe.build_operation(*entry, self.siblings, where, self.size) for where, entry in named.items()]
        except ConfigError as error:  # the container's own location is put in front
            raise BadParameterError(str(error)) from error


def mask_type() -> Any:
    """Torchvision's class of masks."""
    return importlib.import_module("torchvision.tv_tensors").Mask


def as_mask(mask: Any) -> Any:
    """(h, w) uint8, a tensor or an array -> a mask of torchvision's, 255 less each value.

    What lies outside of an image, which torchvision makes 0, is `IGNORED` so: some operations have no other fill.
    """
    return mask_type()(~(mask if isinstance(mask, Tensor) else torch.from_numpy(readable(mask))))


def from_mask(mask: Any) -> Tensor:
    """A mask of torchvision's, as `as_mask` made it -> (h, w) uint8."""
    found: Tensor = ~mask.as_subclass(Tensor)
    return found


def names_in(op: Any) -> Iterator[str]:
    """Names of an operation and of those inside of it."""
    yield type(op).__name__
    for each in getattr(op, "transforms", ()):
        yield from names_in(each)


def always(op: Any) -> Any:
    """The same operation with a probability of 1."""
    changed = copy.copy(op)
    changed.p = 1.0
    return changed


def _converted(value: Any, annotation: Any) -> Any:
    """A value of YAML as an annotation has it: a whole number for a float becomes one, a list may stand for a tuple.

    Raises:
        TypeError: it is of another type, infinite, NaN, or a whole number too large for pixels.
    """
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        for each in inner:
            try:
                return _converted(value, each)
            except TypeError:
                continue
        raise TypeError
    sequence = isinstance(origin or annotation, type) and issubclass(origin or annotation, Sequence)
    if sequence and annotation is not str:
        if not isinstance(value, list | tuple):
            raise TypeError
        return [_converted(item, inner[0]) for item in value] if inner else value
    if annotation in (float, Number) and type(value) in (int, float) and abs(value) < math.inf:
        return float(value) if annotation is float else value
    if annotation in (float, Number) or (annotation in (int, bool, NoneType) and type(value) is not annotation):
        raise TypeError
    if type(value) is int and value > MOST_SIDE:  # of pixels, for which there is no memory
        raise TypeError
    return value


def _one_of(allowed: Sequence[str] | Mapping[str, Any], name: str, value: Any) -> Any:
    if value not in list(allowed):
        raise BadParameterError(f"{name}: {value} is not allowed; {choices(str(value), allowed)}")
    return value


def _numbers(name: str, value: Any, low: float, high: float) -> Any:
    """A number, or a list of them, each from `low` to `high`."""
    several = isinstance(value, list | tuple)
    return [check_number(name, each, low, high) for each in value] if several else check_number(name, value, low, high)


def _size(name: str, value: Any) -> Any:
    check_size(name, value)
    return value


# What torchvision takes without an error, though nobody means it, or though it would take all memory or time.
_CHECKS: Mapping[str | tuple[str, str], Callable[[str, Any], Any]] = {
    "chain_depth": partial(check_whole, low=-1, high=100),
    "fill": partial(_numbers, low=0, high=255),
    "magnitude": partial(check_whole, low=0, high=999),
    "mixture_width": partial(check_whole, low=1, high=100),
    "num_magnitude_bins": partial(check_whole, low=2, high=1000),
    "num_ops": partial(check_whole, low=0, high=100),
    "p": check_probability,
    "size": _size,
    "value": partial(_numbers, low=0, high=255),  # "random" draws floats that uint8 has no room for
    ("AugMix", "alpha"): partial(check_number, low=RATIOS[0], high=RATIOS[1]),
    ("ElasticTransform", "sigma"): partial(_numbers, low=0, high=1e4),  # the kernel has 8 * sigma pixels
    ("RandomChoice", "p"): lambda _, weights: weights,
    ("RandomResizedCrop", "scale"): partial(check_range, low=0, high=1, above=True),
}

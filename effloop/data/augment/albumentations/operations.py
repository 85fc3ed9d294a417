"""Which of Albumentations' transforms a recipe may name, how its parameters are checked, and one in each thread."""

from __future__ import annotations

import inspect
import math
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from effloop.data.augment import recipe
from effloop.data.augment.albumentations.bounds import check_bounds
from effloop.data.augment.albumentations.generators import Generators
from effloop.data.augment.framing import Image
from effloop.data.augment.operation import BadParameterError, check_probability
from effloop.errors import ConfigError, optional_package
from effloop.registry import choices

CONTAINERS = ("OneOf", "RandomOrder", "Sequential", "SomeOf")
"""These have `transforms`, {label: {op: NAME, ...}}, out of the same set."""

LEFT_OUT = {
    "AdditiveNoise": "draws from OpenCV's generator",
    "GaussNoise": "draws from OpenCV's generator",
    "RGBShift": "seeds OpenCV's generator; ColorJitter and HueSaturationValue don't",
    "FromFloat": "takes or gives no uint8",
    "Normalize": "takes or gives no uint8",
    "ToFloat": "takes or gives no uint8",
    "ToRGB": "takes no RGB",
    "Lambda": "runs any code",
    "AtLeastOneBBoxRandomCrop": "needs boxes",
    "BBoxSafeRandomCrop": "needs boxes",
    "RandomCropNearBBox": "needs boxes",
    "RandomSizedBBoxSafeCrop": "needs boxes",
    "ConstrainedCoarseDropout": "needs a mask or boxes",
    "CropNonEmptyMaskIfExists": "needs a mask",
    "MaskDropout": "needs a mask",
    "FDA": "needs other images",
    "HistogramMatching": "needs other images",
    "Mosaic": "needs other images",
    "OverlayElements": "needs other images",
    "PixelDistributionAdaptation": "needs other images",
    "TextImage": "needs texts and a font",
    "FrequencyMasking": "is XYMasking",
    "PiecewiseAffine": "takes seconds; ElasticTransform is quick",
    "ShiftScaleRotate": "is Affine",
    "TimeMasking": "is XYMasking",
    "TimeReverse": "is HorizontalFlip",
}
"""Transforms of images that no recipe may name, and why."""


def library() -> Any:
    """The package `albumentations`, imported now: 0.8 s.

    Without the variable its import would ask the network for a newer version; that took 2 s more.

    Raises:
        ConfigError: it isn't installed.
    """
    os.environ["NO_ALBUMENTATIONS_UPDATE"] = "1"
    package = optional_package("albumentations", "augment=albumentations", "effloop[albumentations]")
    # EffLoop brings the threads, and OpenCV's own don't survive a fork.
    optional_package("cv2", "augment=albumentations", "opencv-python-headless").setNumThreads(0)
    return package


def names() -> list[str]:
    """The transforms that a recipe may name: public, of one RGB image, of no volume, and none that is left out."""
    package, found = library(), []
    bases = (package.ImageOnlyTransform, package.DualTransform)
    for name, kind in vars(package).items():
        if inspect.isclass(kind) and issubclass(kind, bases) and not issubclass(kind, package.Transform3D):
            found += [name] if kind not in bases and name not in LEFT_OUT else []
    return sorted([*found, *CONTAINERS])


class Made:
    """A transform of the library, as many times as there are threads that use it. Picklable.

    It keeps its generators and what it drew last in itself, so no two threads may have the same.

    Args:
        name: of the transform.
        parameters: its own, checked; `transforms` of a container are {label: Made}.
        always: it is done whatever its probability is.
    """

    def __init__(self, name: str, parameters: dict[str, Any], *, always: bool = False) -> None:
        self.name, self.parameters, self.always = name, parameters, always
        self._threads = threading.local()

    def __reduce__(self) -> tuple[Any, ...]:
        return Made, (self.name, self.parameters)

    def new(self) -> Any:
        """Another of the same."""
        parameters = dict(self.parameters)
        if self.name in CONTAINERS:
            parameters["transforms"] = [made.new() for made in parameters["transforms"].values()]
        return getattr(library(), self.name)(**parameters)

    def seeded(self, key: int) -> Any:
        """This thread's, set to the random numbers of a key; 1.1 µs, where the library's `set_random_seed` takes 13."""
        try:
            transform, generators = self._threads.own
        except AttributeError:
            transform, generators = self._threads.own = self.new(), Generators()
            transform.set_random_state(generators.numpy, generators.python)
        generators.seed(key)
        return transform

    def __call__(self, key: int, image: Image) -> Image:
        """Do it to an image, or by chance not.

        Args:
            key: of the random numbers, from 0 to 2**64 - 1.
            image: (H, W, 3) uint8; isn't written.

        Returns:
            (h, w, 3) uint8; maybe the same array.

        Raises:
            ValueError, TypeError, RuntimeError: the library fails, or gives something else.
        """
        locked = image.view()
        locked.flags.writeable = False
        try:
            result = self.seeded(key)(image=locked, force_apply=self.always)["image"]
        except (ValueError, TypeError, RuntimeError, MemoryError):
            raise
        except Exception as error:  # OpenCV's and the library's own are of no kind
            raise ValueError(f"{type(error).__name__}: {error}") from error
        if result.dtype != np.uint8 or result.shape[2:] != (3,):
            raise ValueError(f"it gives {result.dtype} of shape {result.shape}, and a recipe's images are uint8 RGB")
        return result  # type: ignore[no-any-return]


def operations(size: int) -> Mapping[str, Callable[..., Made]]:
    """What a recipe may name, as `recipe.read` takes it.

    Args:
        size: `image_size`.

    Raises:
        ConfigError: the package isn't installed.
    """
    offered: dict[str, Callable[..., Made]] = {}
    for name in names():
        offered[name] = _Container(name, offered, size) if name in CONTAINERS else _Factory(name)
    return offered


class _Factory:
    """Makes a transform of the parameters that a recipe gives, if the library takes them as they are."""

    def __init__(self, name: str) -> None:
        self.name, self.kind = name, getattr(library(), name)
        self.__signature__ = inspect.signature(self.kind)

    def __call__(self, **given: Any) -> Made:
        if isinstance(given.get("size"), int):
            given["size"] = [given["size"], given["size"]]
        parameters = {name: _flags(name, value) for name, value in given.items()}
        for name, value in parameters.items():
            _check_finite(name, value)
        check_bounds(self.name, given)
        self._check(given, parameters)
        with _warnings_are_errors():
            self.kind(**parameters)
        return Made(self.name, parameters)

    def _check(self, given: Mapping[str, Any], parameters: dict[str, Any]) -> None:
        """Ask the library's own schema.

        Raises:
            BadParameterError: it refuses one of them, or would take another value for it.
            ValueError: it refuses all of them together.
        """
        pydantic = optional_package("pydantic", "augment=albumentations", "effloop[albumentations]")
        defaults = {
            name: value.default
            for name, value in self.__signature__.parameters.items()
            if value.default is not value.empty
        }
        try:
            with _warnings_are_errors():
                taken = self.kind.InitSchema(**(defaults | parameters), strict=True).model_dump()
        except pydantic.ValidationError as error:
            raise _line(error.errors(include_url=False), given) from error
        for name, value in parameters.items():
            if name in taken and _differs(value, taken[name]):
                raise BadParameterError(f"{name}: {given[name]} is not allowed; {self.name} would take {taken[name]}")


class _Container:
    """Makes a container of transforms."""

    def __init__(self, name: str, offered: Mapping[str, Callable[..., Made]], size: int) -> None:
        self.name, self.offered, self.size = name, offered, size
        self.__signature__ = inspect.signature(getattr(library(), name))

    def __call__(self, transforms: object = None, **parameters: Any) -> Made:
        if not isinstance(transforms, Mapping):
            raise BadParameterError(f"transforms: {transforms} is not allowed; write {{LABEL: {{op: NAME, ...}}, ...}}")
        inside = {label: self._inside(label, given) for label, given in transforms.items() if given is not None}
        if not sum(made.new().p for made in inside.values()):
            raise BadParameterError("transforms: none of them is ever done; set the p of one above 0")
        if "p" in parameters:
            check_probability("p", parameters["p"])
        _check_count(parameters, len(inside))
        return Made(self.name, {**parameters, "transforms": inside})

    def _inside(self, label: str, given: Any) -> Made:
        where = f"transforms.{label}"
        try:
            return recipe.make(*recipe.named(label, given, where), self.offered, where, self.size)
        except ConfigError as error:
            raise BadParameterError(str(error)) from error


def _check_count(parameters: Mapping[str, Any], most: int) -> None:
    """Of SomeOf and RandomOrder, whose parameters the library doesn't check.

    Raises:
        BadParameterError: one isn't allowed.
    """
    count, replace = parameters.get("n", 1), parameters.get("replace", False)
    if not isinstance(replace, bool):
        raise BadParameterError(f"replace: {replace} is not allowed; set true or false")
    if not isinstance(count, int) or isinstance(count, bool) or count < 1 or (count > most and not replace):
        bound = "of at least 1" if replace else f"from 1 to {most}, the number of its transforms, or replace=true"
        raise BadParameterError(f"n: {count} is not allowed; set a number {bound}")


@contextmanager
def _warnings_are_errors() -> Iterator[None]:
    """The library warns of what it doesn't take as it is. Around what is built, in one thread."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        try:
            yield
        except UserWarning as warning:
            raise ValueError(str(warning).rstrip(".")) from warning


def _line(failures: list[Any], given: Mapping[str, Any]) -> ValueError:
    """Pydantic's list of failures -> the first parameter's, in one line."""
    name = next((str(failure["loc"][0]) for failure in failures if failure["loc"]), "")
    some = [failure for failure in failures if not name or failure["loc"][:1] == (name,)]
    reasons = " or ".join(dict.fromkeys(failure["msg"].removeprefix("Value error, ") for failure in some))
    reasons = reasons.replace("Input should", "it should")
    if not name:
        return ValueError(reasons)
    if name not in given:
        return BadParameterError(f"{name}: isn't set, and has no default; set it")
    return BadParameterError(f"{name}: {given[name]} is not allowed; {reasons}")


def _flags(name: str, value: Any) -> Any:
    """OpenCV's numbers may be given by their names: INTER_LINEAR, BORDER_REFLECT_101.

    Raises:
        BadParameterError: it has no such name.
    """
    if isinstance(value, Mapping):
        return {key: _flags(name, inner) for key, inner in value.items()}
    kind = "INTER_" if "interpolation" in name else "BORDER_" if "border_mode" in name else None
    if kind is None or not isinstance(value, str):
        return value
    cv2 = optional_package("cv2", "augment=albumentations", "opencv-python-headless")
    if not value.startswith(kind) or not hasattr(cv2, value):
        have = choices(value, sorted(flag for flag in dir(cv2) if flag.startswith(kind)))
        raise BadParameterError(f"{name}: OpenCV has no '{value}'; {have}")
    return getattr(cv2, value)


def _check_finite(name: str, value: Any) -> None:
    inside = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    for inner in inside:
        _check_finite(name, inner)
    if isinstance(value, float) and not math.isfinite(value):
        raise BadParameterError(f"{name}: {value} is not allowed; set a finite number")


def _differs(given: Any, taken: Any) -> bool:
    """Whether the library would take another number, or a number for what is none; a range for a number is fine."""
    if isinstance(given, Mapping):
        return isinstance(taken, Mapping) and any(_differs(given[key], taken[key]) for key in given if key in taken)
    if isinstance(given, list | tuple):
        pairs = zip(given, taken, strict=True) if isinstance(taken, list | tuple) and len(taken) == len(given) else ()
        return any(_differs(one, other) for one, other in pairs)
    if isinstance(taken, bool) or isinstance(given, bool):
        return isinstance(taken, int | float) and given is not taken
    return isinstance(taken, int | float) and taken != given

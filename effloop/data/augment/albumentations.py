"""Recipes of Albumentations' operations, on the host, each image with random numbers of its key."""

from __future__ import annotations

import inspect
import os
import random
import threading
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from effloop.batch import ImageSize
from effloop.data.augment.base import Augment, RecipeConfig, augments
from effloop.data.augment.library import LibraryOperation, Masked, build
from effloop.data.augment.operation import BadParameterError, Image, check_number
from effloop.data.image.mask import IGNORED, Mask
from effloop.errors import optional_package
from effloop.registry import choices

CONTAINERS = ("OneOf", "RandomOrder", "Sequential", "SomeOf")
"""These have `transforms`, {label: {op: NAME, ...}}, of the same set."""

_LEFT_OUT = (
    "AdditiveNoise GaussNoise RGBShift "  # draw from OpenCV's generator, or seed it
    "FromFloat Normalize ToFloat ToRGB "  # take or give no uint8 RGB
    "Lambda "  # runs any code
    "AtLeastOneBBoxRandomCrop BBoxSafeRandomCrop RandomCropNearBBox RandomSizedBBoxSafeCrop "  # need boxes
    "ConstrainedCoarseDropout CropNonEmptyMaskIfExists MaskDropout "  # need a mask
    "FDA HistogramMatching Mosaic OverlayElements PixelDistributionAdaptation "  # need other images
    "TextImage "  # needs texts and a font
    "PiecewiseAffine "  # takes seconds; ElasticTransform is quick
    "FrequencyMasking ShiftScaleRotate TimeMasking TimeReverse"  # are XYMasking, Affine or HorizontalFlip
)
LEFT_OUT = frozenset(_LEFT_OUT.split())  # image transforms that recipes may not name


def library() -> Any:
    """Import the package `albumentations`, which takes 0.8 s.

    Without the variable the import looks for a newer version on the network, which took 2 s more.
    """
    os.environ["NO_ALBUMENTATIONS_UPDATE"] = "1"
    package = optional_package("albumentations", "augment=albumentations", "effloop[albumentations]")
    # EffLoop has its own threads, and OpenCV's don't survive a fork.
    optional_package("cv2", "augment=albumentations", "opencv-python-headless").setNumThreads(0)
    return package


def names() -> list[str]:
    """The transforms that recipes may name: all public ones of one RGB image, without LEFT_OUT and volumes."""
    package, found = library(), []
    bases = (package.ImageOnlyTransform, package.DualTransform)
    for name, kind in vars(package).items():
        if inspect.isclass(kind) and issubclass(kind, bases) and not issubclass(kind, package.Transform3D):
            found += [name] if kind not in bases and name not in LEFT_OUT else []
    return sorted([*found, *CONTAINERS])


class KeyedTransform(LibraryOperation):
    """A transform of the library, with one instance per thread, seeded by a key for each image. Picklable.

    An instance holds its generators and its last draws, so threads can't share it. `transforms` of a container's
    parameters are {label: KeyedTransform}.
    """

    def __init__(self, name: str, parameters: dict[str, Any]) -> None:
        self.name, self.parameters = name, parameters
        self.is_crop = name in ("RandomResizedCrop", "RandomSizedCrop")
        self._threads = threading.local()

    def __reduce__(self) -> tuple[Any, ...]:
        return KeyedTransform, (self.name, self.parameters)

    def new(self) -> Any:
        """A new instance."""
        parameters = dict(self.parameters)
        if self.name in CONTAINERS:
            parameters["transforms"] = [made.new() for made in parameters["transforms"].values()]
        return getattr(library(), self.name)(**parameters)

    def seeded(self, key: int) -> Any:
        """This thread's instance, seeded by a key in 1.1 µs; the library's `set_random_seed` takes 13."""
        try:
            transform, generators = self._threads.own
        except AttributeError:
            transform, generators = self._threads.own = self.new(), Generators()
            transform.set_random_state(generators.numpy, generators.python)
        generators.seed(key)
        return transform

    @property
    def without_masks(self) -> str:
        if self.name in CONTAINERS:
            return next(filter(None, (each.without_masks for each in self.parameters["transforms"].values())), "")
        made = self.seeded(0)
        leaves_masks = isinstance(made, library().ImageOnlyTransform)
        return "" if leaves_masks or "mask" in made.available_keys else self.name

    def with_masks(self) -> KeyedTransform:
        """The same; what it fills outside of an image is `IGNORED` in a mask, unless its parameters say otherwise."""
        parameters = dict(self.parameters)
        if self.name in CONTAINERS:
            parameters["transforms"] = {label: each.with_masks() for label, each in parameters["transforms"].items()}
        else:
            fill = inspect.signature(getattr(library(), self.name)).parameters.get("fill_mask")
            if fill is not None and fill.default is not None:  # None leaves masks as they are where images are filled
                parameters.setdefault("fill_mask", IGNORED)
        return KeyedTransform(self.name, parameters)

    @property
    def probability(self) -> float:
        return float(self.seeded(0).p)

    def box(self, key: int, height: int, width: int) -> tuple[int, int, int, int]:
        drawn = self.seeded(key).get_params_dependent_on_data({"shape": (height, width, 3)}, {})
        left, top, right, bottom = drawn["crop_coords"]
        return top, left, bottom - top, right - left

    def resize(self, region: Image, mask: Mask | None = None) -> Masked:
        made, (height, width) = self.seeded(0), region.shape[:2]
        resized: Image = made.apply(region, crop_coords=(0, 0, width, height))
        if mask is None:
            return resized, None
        return resized, made.apply_to_mask(mask, crop_coords=(0, 0, *mask.shape[::-1]))

    def __call__(self, key: int, image: Image, mask: Mask | None = None, *, always: bool = False) -> Masked:
        arrays = {"image": image.view()} if mask is None else {"image": image.view(), "mask": mask.view()}
        for array in arrays.values():
            array.flags.writeable = False
        try:
            done = self.seeded(key)(**arrays, force_apply=always)
        except (ValueError, TypeError, RuntimeError, MemoryError):
            raise
        except Exception as error:  # OpenCV's own derive from Exception
            raise ValueError(f"{type(error).__name__}: {error}") from error
        return done["image"], done.get("mask")


def operations() -> dict[str, Callable[..., KeyedTransform]]:
    """The operations that recipes may name, for `recipe.build_steps`."""
    return {name: _Factory(name) for name in names()}


class _Factory:
    """Builds a transform from the parameters of a recipe, as far as the library takes them without changing them."""

    def __init__(self, name: str) -> None:
        self.name, self.kind = name, getattr(library(), name)
        self.__signature__ = inspect.signature(self.kind)

    def __call__(self, **given: Any) -> KeyedTransform:
        if isinstance(given.get("size"), int):
            given["size"] = [given["size"], given["size"]]
        if "p" in given:  # the library doesn't check a container's
            check_number("p", given["p"], 0, 1)
        made = KeyedTransform(self.name, {name: _opencv_flag(name, value) for name, value in given.items()})
        with warnings.catch_warnings():  # the library warns of values that it replaces by others
            warnings.simplefilter("error", UserWarning)
            try:
                made.new()
            except UserWarning as warning:
                raise ValueError(str(warning).rstrip(".")) from warning
            except ValueError as error:
                if failures := getattr(error.__cause__, "errors", None):  # pydantic's, of several lines
                    found = failures(include_url=False)[0]
                    raise ValueError(": ".join((*map(str, found["loc"][:1]), found["msg"]))) from error
                raise
        return made


def _opencv_flag(name: str, value: Any) -> Any:
    """The number of OpenCV's constant that a name stands for: INTER_LINEAR, BORDER_REFLECT_101.

    Raises:
        BadParameterError: OpenCV has no such constant.
    """
    kind = "INTER_" if "interpolation" in name else "BORDER_" if "border_mode" in name else None
    if kind is None or not isinstance(value, str):
        return value
    cv2 = optional_package("cv2", "augment=albumentations", "opencv-python-headless")
    flags = [flag for flag in dir(cv2) if flag.startswith(kind)]
    if value not in flags:
        raise BadParameterError(f"{name}: OpenCV has no '{value}'; {choices(value, flags)}")
    return getattr(cv2, value)


# Python's and NumPy's generators, seeded by a key in 1 µs, for libraries that draw from such objects.

_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK = (1 << 64) - 1


class KeyedRandom(random.Random):
    """`random.Random` by SplitMix64, with the numbers of `effloop.data.random.words`.

    Seeding takes 0.1 µs, Python's own generator 3.8; a number takes 0.5 µs, Python's own 0.05.
    """

    def seed(self, key: int = 0, version: int = 2) -> None:  # type: ignore[override]
        """Seed with a key from 0 to 2**64 - 1."""
        self._state, self.gauss_next = key, None

    def _word(self) -> int:
        self._state = word = (self._state + _GOLDEN) & _MASK
        word = ((word ^ (word >> 30)) * _FIRST) & _MASK
        word = ((word ^ (word >> 27)) * _SECOND) & _MASK
        return word ^ (word >> 31)

    def random(self) -> float:
        """The next number, in [0, 1)."""
        return (self._word() >> 11) * 2.0**-53

    def getrandbits(self, k: int) -> int:
        """The next number of k bits."""
        bits = 0
        for _ in range(-(-k // 64)):
            bits = bits << 64 | self._word()
        return bits >> (-k % 64)


class Generators:
    """A generator of each kind, for one thread."""

    def __init__(self) -> None:
        # Philox 4x64-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"): seeded in 0.8 µs, PCG64 in
        # 1.3, and `default_rng` takes 8.
        self._bits = np.random.Philox(key=0)
        self._start = self._bits.state
        self.numpy = np.random.Generator(self._bits)
        self.python = KeyedRandom(0)

    def seed(self, key: int) -> None:
        """Seed both with a key from 0 to 2**64 - 1."""
        self._start["state"]["key"][0] = key
        self._bits.state = self._start
        self.python.seed(key)


@augments.register("albumentations", RecipeConfig)
def albumentations(config: RecipeConfig, *, size: ImageSize, train: bool, channels: int = 3) -> Augment:
    """Albumentations' operations, on the host.

    OpenCV's constants may be given by name (INTER_AREA, BORDER_REFLECT_101), and a `size` as one number. Containers
    (OneOf, SomeOf, RandomOrder, Sequential) have `transforms: {label: {op: NAME, parameter: value, ...}, ...}`.
    """
    return build(config, operations, size, channels, train=train)

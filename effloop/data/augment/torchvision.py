"""Recipes of torchvision's operations."""

from __future__ import annotations

import copy
import importlib
import inspect
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from numbers import Number
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from effloop.batch import ImageSize
from effloop.data.augment import recipe
from effloop.data.augment.base import Augment, RecipeConfig, augments
from effloop.data.augment.framing import Image, Sizes
from effloop.data.augment.library import LibraryAugment, choice_sizes, observed_sizes, sequential_sizes, shuffled_sizes
from effloop.data.augment.native.augment import for_evaluation
from effloop.data.augment.operation import (
    MOST_SIDE,
    RATIOS,
    BadParameterError,
    Keys,
    check_number,
    check_probability,
    check_range,
    check_size,
    check_whole,
)
from effloop.data.image.grey import batch_to_grey, batch_to_rgb
from effloop.data.image.mask import Mask
from effloop.data.image.resize import readable
from effloop.errors import ConfigError
from effloop.registry import choices
from effloop.system.hardware import set_own_threads

# Values of recipes are checked against torchvision's own annotations, then by building the operation and running it on
# black images; only what neither of them refuses is checked here.

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


# torch's random functions with numbers from a key: the global generator isn't used, and threads share none.

Function = Callable[..., Any]


def seeded(key: int) -> Seeded:
    """A context in which this thread's random numbers by torch come from `key`, on any device.

    It takes 3 µs, and 1 to 2 for each torch function called inside. torch's generator uses the lower 32 bits of a
    key only.

    Args:
        key: from 0 to 2**64 - 1.
    """
    mode: Seeded | None = getattr(_own, "mode", None)
    if mode is None:
        mode = _own.mode = Seeded()
    mode.generator.manual_seed(key)
    return mode


_own = threading.local()


class Seeded(TorchFunctionMode):
    """The context of `seeded`: one per thread, not reentrant.

    torch computes on one thread inside, so that no sum depends on the number of threads, and an engine's threads
    don't start others. Numbers for a GPU are drawn on the host, so that the pixels are the same.

    Attributes:
        generator: source of the numbers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator()

    def __enter__(self) -> Seeded:
        self._threads = set_own_threads(1)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        set_own_threads(self._threads)

    def __torch_function__(
        self, func: Function, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        draw = _DRAWS.get(getattr(func, "__name__", ""))
        if draw is None:
            return func(*args, **(kwargs or {}))
        return draw(self.generator, func, args, kwargs or {})


def _made(generator: torch.Generator, func: Function, args: Any, kwargs: dict[str, Any]) -> Tensor:
    """torch.rand(2, 3, device=...)"""
    device = kwargs.get("device")
    return _moved(func(*args, **{**kwargs, "device": "cpu", "generator": generator}), device)


def _alike(generator: torch.Generator, func: Function, args: Any, kwargs: dict[str, Any]) -> Tensor:
    """torch.randn_like(x), in row-major order whatever the memory layout."""
    (like,) = args
    make = {"rand_like": torch.rand, "randn_like": torch.randn}[func.__name__]
    drawn = make(like.shape, dtype=kwargs.get("dtype") or like.dtype, device="cpu", generator=generator)
    return _moved(drawn, kwargs.get("device") or like.device)


def _filled(generator: torch.Generator, func: Function, args: Any, kwargs: dict[str, Any]) -> Tensor:
    """x.uniform_(0, 1)"""
    target, *rest = args
    if target.device.type == "cpu":
        return func(target, *rest, **{**kwargs, "generator": generator})  # type: ignore[no-any-return]
    drawn = torch.empty(target.shape, dtype=target.dtype, device="cpu")
    func(drawn, *rest, **{**kwargs, "generator": generator})
    return target.copy_(_moved(drawn, target.device), non_blocking=True)  # type: ignore[no-any-return]


def _chosen(generator: torch.Generator, func: Function, args: Any, kwargs: dict[str, Any]) -> Tensor:
    """torch.multinomial(weights, 1); the host waits for weights on a device."""
    device = next((value.device for value in args if isinstance(value, Tensor)), None)
    args = [value.cpu() if isinstance(value, Tensor) else value for value in args]
    return _moved(func(*args, **{**kwargs, "generator": generator}), device)


def _refused(generator: torch.Generator, func: Function, args: Any, kwargs: dict[str, Any]) -> Tensor:
    del generator, args, kwargs
    raise RuntimeError(f"torch's {func.__name__} would draw from the global generator")


def _moved(drawn: Tensor, device: Any) -> Tensor:
    """To the requested device, without a sync."""
    where = torch.device("cpu" if device is None else device)
    if where.type == "cuda":
        drawn = drawn.pin_memory()
    return drawn.to(where, non_blocking=True)


_KNOWN: dict[Callable[..., Tensor], str] = {
    _made: "rand randn randint randperm",
    _alike: "rand_like randn_like",
    _filled: "bernoulli_ cauchy_ exponential_ geometric_ log_normal_ normal_ random_ uniform_",
    _chosen: "_sample_dirichlet _standard_gamma bernoulli binomial multinomial normal poisson",
    # All others in torch that draw, and functions of torch.nn.functional that call them unseen by the mode.
    _refused: "alpha_dropout alpha_dropout_ cauchy dropout dropout1d dropout2d dropout3d dropout_ exponential "
    "feature_alpha_dropout feature_alpha_dropout_ feature_dropout feature_dropout_ fractional_max_pool2d "
    "fractional_max_pool2d_with_indices fractional_max_pool3d fractional_max_pool3d_with_indices geometric gru "
    "gumbel_softmax log_normal lstm miopen_rnn multi_head_attention_forward native_dropout normal_functional "
    "randint_like random rnn_relu rnn_tanh rrelu rrelu_ rrelu_with_noise rrelu_with_noise_ "
    "rrelu_with_noise_functional scaled_dot_product_attention uniform",
}

_DRAWS = {name: how for how, names in _KNOWN.items() for name in names.split()}
"""Names of torch's drawing functions -> their replacements."""


@dataclass
class TorchvisionConfig(RecipeConfig):
    """Fields of `augment=torchvision`; `op` is the name of a class of torchvision.transforms.v2."""


@augments.register("torchvision", TorchvisionConfig)
def torchvision(config: TorchvisionConfig, *, size: ImageSize, train: bool, channels: int = 3) -> Augment:
    """Operations of torchvision, on the host or, image by image, on the device."""
    if not train:
        return for_evaluation(config, size, channels)
    library = importlib.import_module("torchvision.transforms.v2")
    steps = recipe.build_steps(config, operations(library, size), size)
    return TorchvisionAugment(steps, config, size, channels)


class TorchvisionAugment(LibraryAugment[Any]):
    """torchvision's operations, one image at a time, on views: nothing is copied except by torchvision."""

    def is_crop(self, op: Any) -> bool:
        return type(op).__name__ == "RandomResizedCrop"

    def box(self, op: Any, key: int, height: int, width: int) -> tuple[int, int, int, int]:
        image = torch.empty(1).expand(3, height, width)  # has a size, but no pixels
        with seeded(key):
            found = op.make_params([image])
        return found["top"], found["left"], found["height"], found["width"]

    def resize(self, op: Any, region: Image) -> Image:
        height, width = region.shape[:2]
        with seeded(0):  # it draws nothing
            return _image(op.transform(_tensor(region), {"top": 0, "left": 0, "height": height, "width": width}))

    def run(self, op: Any, key: int, image: Image) -> Image:
        with seeded(key):
            return _image(op(_tensor(image)))

    def with_masks(self) -> Augment:
        for step in [*self.host, *self.device]:
            if name := next((each for each in names_in(step.op) if each in IMAGES_ALONE), None):
                raise ConfigError(
                    f"{step.where}: torchvision's {name} can't be applied to masks; leave it out, or set "
                    "augment=native_rand"
                )
        return self

    def resize_mask(self, op: Any, mask: Mask) -> Mask:
        height, width = mask.shape
        with seeded(0):
            return _values(op.transform(as_mask(mask), {"top": 0, "left": 0, "height": height, "width": width}))

    def run_with_mask(self, op: Any, key: int, image: Image, mask: Mask) -> tuple[Image, Mask]:
        if type(op).__name__ in LEAVES_MASKS:  # some warn of masks
            return self.run(op, key, image), mask
        with seeded(key):
            done, cut = op(_tensor(image), as_mask(mask))
        return _image(done), _values(cut)

    def on_device(self, images: Tensor, keys: Keys) -> Tensor:
        if not self.device:
            return images
        return self._on_device(images, keys, [None] * len(images))[0]

    def on_device_with_masks(self, images: Tensor, masks: Tensor, keys: Keys) -> tuple[Tensor, Tensor]:
        if not self.device:
            return images, masks
        done, cut = self._on_device(images, keys, [as_mask(mask) for mask in masks])
        return done, torch.stack([from_mask(each) for each in cut])

    def _on_device(self, images: Tensor, keys: Keys, masks: Sequence[Any]) -> tuple[Tensor, list[Any]]:
        if self.channels == 1:
            images = batch_to_rgb(images)
        steps = [(step.op, step.keys(keys).tolist()) for step in self.device]
        done: list[Tensor] = []
        cut: list[Any] = []
        with _exact_matmul(images.device):
            for row, (image, mask) in enumerate(zip(images, masks, strict=True)):
                for op, own in steps:
                    with seeded(own[row]):
                        if mask is None or type(op).__name__ in LEAVES_MASKS:
                            image = op(image)
                        else:
                            image, mask = op(image, mask)
                done.append(image)
                cut.append(mask)
        batch = _batch(done)
        return batch_to_grey(batch) if self.channels == 1 else batch, cut

    def sizes_after(self, op: Any, sizes: Sizes) -> Sizes:
        chance = getattr(op, "p", None)
        if not isinstance(chance, int | float):  # RandomChoice's p are weights of its operations
            return self._done(op, sizes)
        if chance == 0:
            return sizes
        found = self._done(always(op), sizes)
        return found if chance == 1 else np.concatenate([found, sizes])

    def _done(self, op: Any, sizes: Sizes) -> Sizes:
        parts = [self.inside(type(one).__name__, one) for one in getattr(op, "transforms", ())]
        match type(op).__name__:
            case "RandomApply":
                return sequential_sizes(parts, sizes)
            case "RandomChoice":
                return choice_sizes([part for part, weight in zip(parts, op.p, strict=True) if weight > 0], sizes)
            case "RandomOrder":
                return shuffled_sizes(parts, sizes)
            case _:
                return observed_sizes(partial(self.run, op), sizes)


@contextmanager
def _exact_matmul(device: torch.device) -> Iterator[None]:
    """Full float32 matrix products on CUDA: with precision=tf32, affine warps would pick some neighbouring pixels.

    Uses torch's newer setting: the older one raises once a user has set the newer.
    """
    if device.type != "cuda":
        yield
        return
    products = torch.backends.cuda.matmul
    usual = products.fp32_precision
    products.fp32_precision = "ieee"
    try:
        yield
    finally:
        products.fp32_precision = usual


def _batch(images: list[Tensor]) -> Tensor:
    """(3, h, w) each -> (N, 3, h, w), channels_last."""
    out = images[0].new_empty((len(images), *images[0].shape[1:], 3)).permute(0, 3, 1, 2)
    for target, image in zip(out, images, strict=True):
        target.copy_(image)
    return out


def _tensor(image: Image) -> Tensor:
    """(h, w, 3) -> (3, h, w) view, to be read only."""
    return torch.from_numpy(readable(image)).permute(2, 0, 1)


def _values(mask: Any) -> Mask:
    """A mask of torchvision's -> (h, w)."""
    values: Mask = from_mask(mask).contiguous().numpy()
    return values


def _image(tensor: Tensor) -> Image:
    """(3, h, w) -> (h, w, 3), copied only if it isn't contiguous."""
    image: Image = tensor.permute(1, 2, 0).contiguous().numpy()
    return image

"""Recipes of torchvision's operations."""

from __future__ import annotations

import copy
import importlib
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from effloop.batch import ImageSize
from effloop.data.augment import recipe
from effloop.data.augment.base import Augment, RecipeConfig, augments
from effloop.data.augment.framing import Image, Sizes
from effloop.data.augment.library import (
    LibraryAugment,
    choice_sizes,
    observed_sizes,
    sequential_sizes,
    shuffled_sizes,
)
from effloop.data.augment.native.augment import for_evaluation
from effloop.data.augment.operation import (
    MOST_SIDE,
    RATIOS,
    BadParameterError,
    Keys,
    check_number,
    check_probability,
    check_range,
)
from effloop.data.image.grey import batch_to_grey, batch_to_rgb
from effloop.data.image.mask import Mask
from effloop.data.image.resize import readable
from effloop.errors import ConfigError
from effloop.registry import choices
from effloop.system.hardware import set_own_threads

_ALONE = (
    "ColorJitter GaussianBlur GaussianNoise Grayscale RGB RandomAdjustSharpness RandomAutocontrast "
    "RandomChannelPermutation RandomEqualize RandomErasing RandomGrayscale RandomInvert RandomPhotometricDistort "
    "RandomPosterize RandomSolarize"
)
_MOVING = (
    "CenterCrop ElasticTransform Identity Pad RandomAffine RandomApply RandomChoice RandomCrop RandomHorizontalFlip "
    "RandomOrder RandomPerspective RandomResize RandomResizedCrop RandomRotation RandomShortestSize RandomVerticalFlip "
    "RandomZoomOut Resize ScaleJitter"
)

LEAVES_MASKS = frozenset(_ALONE.split())
"""Operations on an image alone: its mask stays as it is. Erasing, too: what is under the box has to be guessed."""

REFUSES_MASKS = frozenset(("AugMix", "AutoAugment", "RandAugment", "TrivialAugmentWide"))
"""Operations that refuse a mask, though they move pixels."""

_LEAST = {("AugMix", "alpha"): RATIOS[0], ("AugMix", "mixture_width"): 1, ("ElasticTransform", "sigma"): 0}
"""The smallest values that make sense, where torchvision takes smaller ones without an error."""

NAMES = tuple(sorted({*LEAVES_MASKS, *REFUSES_MASKS, *_MOVING.split()}))
"""Classes of torchvision.transforms.v2 that map a (3, h, w) uint8 image to another. Not JPEG, which is deprecated since
0.29 and doesn't run on a GPU."""


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
    """Builds a torchvision operation from a recipe's values; torchvision refuses bad ones, here or on black images.

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
        # `inplace` would write into memory that may be the source's.
        return signature.replace(parameters=[p for p in signature.parameters.values() if p.name != "inplace"])

    def __call__(self, **parameters: Any) -> Any:
        """Build the operation.

        Raises:
            BadParameterError: a parameter has a value that is not allowed.
            TypeError, ValueError: as raised by torchvision.
        """
        if self.name == "Grayscale":
            parameters = {"num_output_channels": 3, **parameters}
        values = {name: self._converted(name, value) for name, value in parameters.items()}
        fill = self.__signature__.parameters.get("fill")
        if fill is not None:
            values["fill"] = {"others": values.get("fill", fill.default), mask_type(): 0}  # `as_mask` inverts
        return getattr(self.library, self.name)(**values)

    def _converted(self, name: str, value: Any) -> Any:
        """A parameter's value, as torchvision takes it."""
        if name == "transforms":
            return list(recipe.build_nested(value, self.siblings, self.size).values())
        kinds = {"policy": self.library.AutoAugmentPolicy, "interpolation": self.library.InterpolationMode}
        if name in kinds:
            allowed = [each.value for each in kinds[name]]
            if value not in allowed:
                raise BadParameterError(f"{name}: {value} is not allowed; {choices(str(value), allowed)}")
            return kinds[name](value)
        if name == "p" and self.name != "RandomChoice":  # whose p are weights
            return check_probability(name, value)
        if (self.name, name) == ("RandomResizedCrop", "scale"):  # [0,0] would crop a pixel
            return check_range(name, value, 0, 1, above=True)
        # torchvision fills with 300 without an error, and counts or allocates up to any number.
        levels = name in ("fill", "value")
        least = _LEAST.get((self.name, name), 0 if levels else -MOST_SIDE)
        for each in value if isinstance(value, list | tuple) else [value]:
            if type(each) in (int, float) or (levels and each is not None):
                check_number(name, each, least, 255 if levels else MOST_SIDE)
        annotation = self.__signature__.parameters[name].annotation
        return float(value) if annotation is float and type(value) is int else value  # AugMix takes no whole `alpha`


class TorchvisionAugment(LibraryAugment[Any]):
    """torchvision's operations, one image at a time, on views: nothing is copied except by torchvision."""

    def is_crop(self, op: Any) -> bool:
        return type(op).__name__ == "RandomResizedCrop"

    def box(self, op: Any, key: int, height: int, width: int) -> tuple[int, int, int, int]:
        image = torch.empty(1).expand(3, height, width)  # has a size, but no pixels
        with seeded(key):
            found = op.make_params([image])
        return found["top"], found["left"], found["height"], found["width"]

    def resize(self, op: Any, region: Image, mask: Mask | None = None) -> tuple[Image, Mask | None]:
        height, width = region.shape[:2]
        with seeded(0):  # it draws nothing
            image = _image(op.transform(_tensor(region), {"top": 0, "left": 0, "height": height, "width": width}))
            if mask is None:
                return image, None
            height, width = mask.shape
            box = {"top": 0, "left": 0, "height": height, "width": width}
            return image, _values(op.transform(as_mask(mask), box))

    def run(self, op: Any, key: int, image: Image, mask: Mask | None = None) -> tuple[Image, Mask | None]:
        with seeded(key):
            if mask is None or type(op).__name__ in LEAVES_MASKS:  # some warn of masks
                return _image(op(_tensor(image))), mask
            done, cut = op(_tensor(image), as_mask(mask))
        return _image(done), _values(cut)

    def with_masks(self) -> Augment:
        for step in [*self.host, *self.device]:
            if name := next((each for each in names_in(step.op) if each in REFUSES_MASKS), None):
                raise ConfigError(
                    f"{step.where}: torchvision's {name} can't be applied to masks; leave it out, or set "
                    "augment=native_rand"
                )
        return self

    def on_device(self, images: Tensor, keys: Keys, masks: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        if not self.device:
            return images, masks
        if self.channels == 1:
            images = batch_to_rgb(images)
        steps = [(step.op, step.keys(keys).tolist()) for step in self.device]
        done: list[Tensor] = []
        cut: list[Tensor] = []
        with _exact_matmul(images.device):
            for row, image in enumerate(images):
                mask = None if masks is None else as_mask(masks[row])
                for op, own in steps:
                    with seeded(own[row]):
                        if mask is None or type(op).__name__ in LEAVES_MASKS:
                            image = op(image)
                        else:
                            image, mask = op(image, mask)
                done.append(image)
                cut += [] if mask is None else [from_mask(mask)]
        batch = _batch(done)
        return batch_to_grey(batch) if self.channels == 1 else batch, torch.stack(cut) if cut else None

    def sizes_after(self, op: Any, sizes: Sizes) -> Sizes:
        chance = getattr(op, "p", None)
        if not isinstance(chance, int | float):  # RandomChoice's p are weights of its operations
            return self._done(op, sizes)
        if chance == 0:
            return sizes
        always = copy.copy(op)
        always.p = 1.0
        found = self._done(always, sizes)
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
                return observed_sizes(lambda key, image: self.run(op, key, image)[0], sizes)


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

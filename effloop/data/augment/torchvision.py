"""Recipes of torchvision's operations."""

from __future__ import annotations

import copy
import importlib
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from effloop.batch import ImageSize
from effloop.data.augment import recipe
from effloop.data.augment.base import Augment, RecipeConfig, augments
from effloop.data.augment.framing import Image
from effloop.data.augment.library import LibraryAugment
from effloop.data.augment.native.augment import for_evaluation
from effloop.data.augment.operation import BadParameterError, Keys
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
    steps = recipe.build_steps(config, operations(library), size)
    return TorchvisionAugment(steps, config, size, channels)


def operations(library: Any) -> dict[str, OperationFactory]:
    """The operations that recipes may name, by torchvision.transforms.v2; the oldest supported one lacks some."""
    return {name: OperationFactory(library, name) for name in NAMES if hasattr(library, name)}


@dataclass(frozen=True)
class OperationFactory:
    """Builds a torchvision operation from a recipe's values; torchvision refuses bad ones, here or on black images."""

    library: Any
    name: str

    @property
    def __signature__(self) -> inspect.Signature:
        signature = inspect.signature(getattr(self.library, self.name))
        # `inplace` would write into memory that may be the source's.
        return signature.replace(parameters=[p for p in signature.parameters.values() if p.name != "inplace"])

    def __call__(self, **values: Any) -> Any:
        if self.name == "Grayscale":
            values.setdefault("num_output_channels", 3)
        if "transforms" in values:
            values["transforms"] = list(values["transforms"].values())
        kinds = {"policy": self.library.AutoAugmentPolicy, "interpolation": self.library.InterpolationMode}
        for name in kinds.keys() & values:
            allowed = [each.value for each in kinds[name]]
            if values[name] not in allowed:
                raise BadParameterError(f"{name}: {values[name]} is not allowed; {choices(str(values[name]), allowed)}")
            values[name] = kinds[name](values[name])
        fill = self.__signature__.parameters.get("fill")
        if fill is not None:
            values["fill"] = {"others": values.get("fill", fill.default), mask_type(): 0}  # `as_mask` inverts
        return getattr(self.library, self.name)(**values)


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
            return image, from_mask(op.transform(as_mask(mask), box)).contiguous().numpy()

    def run(
        self, op: Any, key: int, image: Image, mask: Mask | None = None, *, always: bool = False
    ) -> tuple[Image, Mask | None]:
        if always and self.probability(op) < 1:
            op = copy.copy(op)
            op.p = 1.0
        with seeded(key):
            if mask is None or type(op).__name__ in LEAVES_MASKS:  # some warn of masks
                return _image(op(_tensor(image))), mask
            done, cut = op(_tensor(image), as_mask(mask))
        return _image(done), from_mask(cut).contiguous().numpy()

    def probability(self, op: Any) -> float:
        found = getattr(op, "p", 1)
        return found if isinstance(found, int | float) else 1  # RandomChoice's p are weights of its operations

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
        batch = torch.stack(done).contiguous(memory_format=torch.channels_last)
        return batch_to_grey(batch) if self.channels == 1 else batch, torch.stack(cut) if cut else None


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


def _tensor(image: Image) -> Tensor:
    """(h, w, 3) -> (3, h, w) view, to be read only."""
    return torch.from_numpy(readable(image)).permute(2, 0, 1)


def _image(tensor: Tensor) -> Image:
    """(3, h, w) -> (h, w, 3), copied only if it isn't contiguous."""
    image: Image = tensor.permute(1, 2, 0).contiguous().numpy()
    return image


# torch's random functions with numbers from a key: the global generator isn't used, and threads share none.

_DRAWS = (
    "rand randn randint randperm rand_like randn_like bernoulli_ exponential_ normal_ random_ uniform_ "
    "_sample_dirichlet bernoulli multinomial normal poisson"
)
_DRAWING = frozenset(_DRAWS.split())


def seeded(key: int) -> Seeded:
    """A context in which this thread's random numbers by torch come from `key`, 64 bits, on any device.

    It takes 3 µs, and 1 to 2 for each torch function called inside. torch's generator uses a key's lower 32 bits only.
    """
    mode: Seeded | None = getattr(_own, "mode", None)
    if mode is None:
        mode = _own.mode = Seeded()
    mode.generator.manual_seed(key)
    return mode


_own = threading.local()


class Seeded(TorchFunctionMode):
    """The context of `seeded`: one per thread, not reentrant.

    torch computes on one thread inside, so that no sum depends on the number of threads, and an engine's threads don't
    start others. Numbers for a GPU are drawn on the host, so that the pixels are the same.
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
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name not in _DRAWING:
            return func(*args, **kwargs)
        given = next((each for each in args if isinstance(each, Tensor)), None)
        device = torch.device(kwargs.get("device") or ("cpu" if given is None else given.device))
        kwargs = {**kwargs, "generator": self.generator}
        if given is None:  # torch.rand(2, 3, device=...)
            drawn = func(*args, **{**kwargs, "device": "cpu"})
        elif name.endswith("_like"):  # torch.randn_like(x), in row-major order whatever the memory layout
            make = torch.rand if name == "rand_like" else torch.randn
            drawn = make(given.shape, dtype=kwargs.get("dtype") or given.dtype, device="cpu", generator=self.generator)
        elif name.endswith("_"):  # x.uniform_(0, 1)
            if device.type == "cpu":
                return func(*args, **kwargs)
            drawn = func(torch.empty(given.shape, dtype=given.dtype, device="cpu"), *args[1:], **kwargs)
        else:  # torch.multinomial(weights, 1); the host waits for weights on a device
            drawn = func(*(each.cpu() if isinstance(each, Tensor) else each for each in args), **kwargs)
        drawn = (drawn.pin_memory() if device.type == "cuda" else drawn).to(device, non_blocking=True)
        return given.copy_(drawn, non_blocking=True) if name.endswith("_") and given is not None else drawn

"""Recipes of torchvision's operations."""

from __future__ import annotations

import copy
import importlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from effloop.batch import ImageSize
from effloop.data.augment.base import Augment, RecipeConfig, augments
from effloop.data.augment.library import LibraryOperation, Masked, build
from effloop.data.augment.operation import BadParameterError, Image
from effloop.data.image.mask import Mask
from effloop.data.image.pixels import readable
from effloop.lazy import LazyModule, Tensor, torch
from effloop.registry import choices

random = LazyModule("effloop.data.augment.seeded")  # which imports torch

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


@augments.register("torchvision", RecipeConfig)
def torchvision(config: RecipeConfig, *, size: ImageSize, train: bool, channels: int = 3) -> Augment:
    """Operations of torchvision, on the host; `op` is the name of a class of torchvision.transforms.v2."""
    return build(config, operations, size, channels, train=train)


def operations() -> dict[str, OperationFactory]:
    """The operations that recipes may name; the oldest supported torchvision lacks some."""
    library = importlib.import_module("torchvision.transforms.v2")
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

    def __call__(self, **values: Any) -> TorchvisionOperation:
        if self.name == "Grayscale":
            values.setdefault("num_output_channels", 3)
        if "transforms" in values:
            values["transforms"] = [each.op for each in values["transforms"].values()]
        kinds = {"policy": self.library.AutoAugmentPolicy, "interpolation": self.library.InterpolationMode}
        for name in kinds.keys() & values:
            allowed = [each.value for each in kinds[name]]
            if values[name] not in allowed:
                raise BadParameterError(f"{name}: {values[name]} is not allowed; {choices(str(values[name]), allowed)}")
            values[name] = kinds[name](values[name])
        fill = self.__signature__.parameters.get("fill")
        if fill is not None:
            values["fill"] = {"others": values.get("fill", fill.default), mask_type(): 0}  # `as_mask` inverts
        return TorchvisionOperation(getattr(self.library, self.name)(**values))


class TorchvisionOperation(LibraryOperation):
    """One of torchvision's, on views: nothing is copied except by torchvision."""

    def __init__(self, op: Any) -> None:
        self.op = op
        self.is_crop = type(op).__name__ == "RandomResizedCrop"

    @property
    def probability(self) -> float:
        found = getattr(self.op, "p", 1)
        return found if isinstance(found, int | float) else 1  # RandomChoice's are weights of its operations

    def __call__(self, key: int, image: Image, mask: Mask | None = None, *, always: bool = False) -> Masked:
        op = self.op
        if always and self.probability < 1:
            op = copy.copy(op)
            op.p = 1.0
        with random.seeded(key):
            if mask is None or type(op).__name__ in LEAVES_MASKS:  # some warn of masks
                return _image(op(_tensor(image))), mask
            done, cut = op(_tensor(image), as_mask(mask))
        return _image(done), from_mask(cut)

    def box(self, key: int, height: int, width: int) -> tuple[int, int, int, int]:
        image = torch.empty(1).expand(3, height, width)  # has a size, but no pixels
        with random.seeded(key):
            found = self.op.make_params([image])
        return found["top"], found["left"], found["height"], found["width"]

    def resize(self, region: Image, mask: Mask | None = None) -> Masked:
        def resized(tensor: Tensor) -> Tensor:
            height, width = tensor.shape[-2:]
            found: Tensor = self.op.transform(tensor, {"top": 0, "left": 0, "height": height, "width": width})
            return found

        with random.seeded(0):  # it draws nothing
            image = _image(resized(_tensor(region)))
            return image, None if mask is None else from_mask(resized(as_mask(mask)))

    @property
    def without_masks(self) -> str:
        return next((each for each in names_in(self.op) if each in REFUSES_MASKS), "")


def mask_type() -> Any:
    """Torchvision's class of masks."""
    return importlib.import_module("torchvision.tv_tensors").Mask


def as_mask(mask: Mask) -> Any:
    """(h, w) uint8 -> a mask of torchvision's, 255 less each value.

    What lies outside of an image, which torchvision makes 0, is `IGNORED` so: some operations have no other fill.
    """
    return mask_type()(~torch.from_numpy(readable(mask)))


def from_mask(mask: Any) -> Mask:
    """A mask of torchvision's, as `as_mask` made it -> (h, w) uint8."""
    found: Mask = (~mask.as_subclass(torch.Tensor)).contiguous().numpy()
    return found


def names_in(op: Any) -> Iterator[str]:
    """Names of an operation and of those inside of it."""
    yield type(op).__name__
    for each in getattr(op, "transforms", ()):
        yield from names_in(each)


def _tensor(image: Image) -> Tensor:
    """(h, w, 3) -> (3, h, w) view, to be read only."""
    return torch.from_numpy(readable(image)).permute(2, 0, 1)


def _image(tensor: Tensor) -> Image:
    """(3, h, w) -> (h, w, 3), copied only if it isn't contiguous."""
    image: Image = tensor.permute(1, 2, 0).contiguous().numpy()
    return image

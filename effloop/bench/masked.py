"""Loaders of images with masks that `bench what=loader` compares EffLoop's with."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from effloop.bench.baselines import EpochRunner, Workload, data_loader, timed_epochs
from effloop.bench.mmseg import Mmseg
from effloop.data.augment.albumentations import library
from effloop.data.image.mask import IGNORED
from effloop.errors import ConfigError

Sample = tuple[torch.Tensor, torch.Tensor]
"""(3, H, W) uint8 or float32, and (H, W) uint8, of mmsegmentation int64."""


class Pairs(torch.utils.data.Dataset[Sample]):
    """ROOT/images/NAME and ROOT/masks/NAME.png.

    Args:
        root: the folder of a split.
        load: paths of an image and its mask -> what is loaded.

    Raises:
        ConfigError: there are no such pairs.
    """

    def __init__(self, root: Path, load: Callable[[Path, Path], Sample]) -> None:
        images = sorted(path for path in (root / "images").rglob("*") if path.is_file())
        names = [path.relative_to(root / "images").with_suffix(".png") for path in images]
        self.pairs = [(path, root / "masks" / name) for path, name in zip(images, names, strict=True)]
        self.load = load
        if not images or not all(mask.is_file() for _, mask in self.pairs):
            raise ConfigError(f"vs: {root} has no images/NAME with masks/NAME.png, which others read; set vs=none")

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> Sample:
        return self.load(*self.pairs[index])


def _torchvision(pillow: bool, workload: Workload) -> EpochRunner:
    """DataLoader with torchvision's v2 transforms on uint8 and tv_tensors.Mask, normalised last.

    For a random scale and crop, those of torchvision's own scripts for segmentation.
    """
    from torchvision import tv_tensors
    from torchvision.transforms import v2

    size, scaled = tuple(workload.config.size), workload.scale_crop
    crop = v2.RandomResizedCrop(size, scale=workload.scale, ratio=workload.ratio, antialias=True)
    steps = [crop, v2.RandomHorizontalFlip()]
    if scaled:
        fill: Any = {tv_tensors.Mask: IGNORED, "others": 0}
        steps[:1] = [v2.RandomResize(*scaled.shorter), v2.RandomCrop(size, pad_if_needed=True, fill=fill)]
    steps += [v2.RandomApply([v2.ColorJitter(**{key: far})]) for key, far in workload.jitters.items()]
    if workload.mean and workload.std:
        steps += [v2.ToDtype(torch.float32, scale=True), v2.Normalize(workload.mean, workload.std)]
    return _epochs(workload, functools.partial(_by_torchvision, v2.Compose(steps), pillow))


def _by_torchvision(steps: Callable[..., Any], pillow: bool, image: Path, mask: Path) -> Sample:
    from PIL import Image
    from torchvision import tv_tensors
    from torchvision.io import decode_image
    from torchvision.transforms.v2.functional import pil_to_tensor

    pixels = pil_to_tensor(Image.open(image).convert("RGB")) if pillow else decode_image(str(image), mode="RGB")
    done, cut = steps(pixels, tv_tensors.Mask(torch.from_numpy(_values(mask))))
    return done, cut.as_subclass(torch.Tensor)


def _albumentations(workload: Workload) -> EpochRunner:
    """DataLoader with OpenCV and Albumentations' transforms of image and mask, normalised last."""
    package = library()
    size, scaled = tuple(workload.config.size), workload.scale_crop
    steps = [package.RandomResizedCrop(size, workload.scale, workload.ratio), package.HorizontalFlip()]
    if scaled:
        shorter = range(scaled.shorter[0], scaled.shorter[1] + 1)
        pad = {"pad_if_needed": True, "pad_position": "top_left", "fill_mask": IGNORED}
        steps[:1] = [package.SmallestMaxSize([*shorter], p=1), package.RandomCrop(*size, **pad)]
    still = {"brightness": (1, 1), "contrast": (1, 1), "saturation": (1, 1), "hue": (0, 0)}
    steps += [package.ColorJitter(**still | {key: far}, p=0.5) for key, far in workload.jitters.items()]
    if workload.mean and workload.std:
        steps.append(package.Normalize(workload.mean, workload.std))
    return _epochs(workload, functools.partial(_by_albumentations, package.Compose(steps)))


def _by_albumentations(steps: Callable[..., Any], image: Path, mask: Path) -> Sample:
    import cv2

    pixels = cv2.imread(str(image), cv2.IMREAD_COLOR_RGB)
    done = steps(image=pixels, mask=_values(mask))
    return torch.from_numpy(np.ascontiguousarray(done["image"])).permute(2, 0, 1), torch.from_numpy(done["mask"])


def _mmseg(workload: Workload) -> EpochRunner:
    """DataLoader with mmsegmentation's transforms, see `effloop.bench.mmseg`.

    Raises:
        ConfigError: the recipe has no random scale and crop, which is what mmsegmentation has.
    """
    if not workload.scale_crop:
        raise ConfigError("it has RandomScaleCrop; set augment=segmentation and augment.ops.colour=null")
    import cv2

    cv2.setNumThreads(0)  # as mmsegmentation's configs have it; worker processes inherit it
    return _epochs(workload, functools.partial(_by_mmseg, Mmseg.of(workload)))


def _by_mmseg(transforms: Mmseg, image: Path, mask: Path) -> Sample:
    import cv2

    pixels: Any = cv2.imdecode(np.frombuffer(image.read_bytes(), np.uint8), cv2.IMREAD_COLOR_RGB)
    return transforms(pixels, _values(mask))


def _values(path: Path) -> Any:
    """(H, W) uint8, by Pillow, as most loaders do it: palettes stay indices."""
    from PIL import Image

    return np.array(Image.open(path))


def _epochs(workload: Workload, load: Callable[[Path, Path], Sample]) -> EpochRunner:
    batches = data_loader(Pairs(workload.root, load), workload)
    return timed_epochs(lambda _: (len(masks) for _, masks in batches))


NOTES = {
    "torchvision": "resizes masks half a pixel beside the centre; no cat_max_ratio",
    "pillow": "torchvision's transforms; images decoded by Pillow",
    "albumentations": "not antialiased; resizes masks half a pixel beside the centre; no cat_max_ratio",
    "mmseg": "as its transforms are defined: not antialiased, masks half a pixel beside the centre and int64",
}
"""What a loader does differently."""

MASKED: dict[str, Callable[[Workload], EpochRunner]] = {
    "torchvision": functools.partial(_torchvision, False),
    "pillow": functools.partial(_torchvision, True),
    "albumentations": _albumentations,
    "mmseg": _mmseg,
}
"""Baselines by the names that `vs=` takes where the data has masks."""

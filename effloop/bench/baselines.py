"""Baselines: the loaders that EffLoop's is compared with, each over the same photographs, epoch by epoch."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from effloop.assemble.resolve import num_workers
from effloop.config import Config
from effloop.data.augment.base import Device
from effloop.data.augment.recipe import split_entry
from effloop.data.remote.location import is_remote
from effloop.data.source import expand_root
from effloop.errors import ConfigError

EpochRunner = Callable[[], tuple[int, float]]
"""Loads one epoch; returns its number of images and the seconds spent waiting for batches."""


IMAGENET = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
"""Mean and standard deviation of (R, G, B) in units of 0 to 1."""

_SCALE_CROP, _FLIP = "RandomScaleCrop", "RandomHorizontalFlip"


@dataclass(frozen=True)
class Workload:
    """What every loader has to do.

    Attributes:
        config: of EffLoop's loader; batch size, image size, crop and number of workers apply to all.
        root: the original photographs, ROOT/CLASS/*.
        scratch: an empty folder.
    """

    config: Config
    root: Path
    scratch: Path

    @property
    def num_workers(self) -> int:
        """Threads or worker processes."""
        return num_workers(self.config)

    @property
    def mean(self) -> list[float] | None:
        """Of the normalised float32 batches that every loader delivers; None: uint8."""
        return self.config.data.mean

    @property
    def std(self) -> list[float] | None:
        """As `mean`."""
        return self.config.data.std

    @property
    def scale(self) -> tuple[float, float]:
        """Smallest and largest area of a crop, as a share of the image."""
        low, high = self._crop.get("scale", (0.08, 1.0))
        return low, high

    @property
    def ratio(self) -> tuple[float, float]:
        """Smallest and largest width over height of a crop."""
        low, high = self._crop.get("ratio", (3 / 4, 4 / 3))
        return low, high

    @property
    def scale_crop(self) -> ScaleCrop | None:
        """The parameters of RandomScaleCrop; None: the recipe has RandomResizedCrop."""
        if _operations(self.config)[0][0] != _SCALE_CROP:
            return None
        base = self._crop.get("base") or min(self.config.size)
        low, high = self._crop.get("ratio", (0.5, 2.0))
        return ScaleCrop((round(base * low), round(base * high)), self._crop.get("cat_max_ratio", 1.0))

    @property
    def jitters(self) -> dict[str, float]:
        """{brightness, contrast, saturation or hue: how far it is changed}, each with probability 0.5."""
        return {key: value for _, given in _operations(self.config)[2:] for key, value in given.items() if key != "p"}

    @property
    def _crop(self) -> dict[str, Any]:
        """The parameters of the recipe's crop, as the user wrote them; `check_comparable` made sure of it."""
        return _operations(self.config)[0][1]


@dataclass(frozen=True)
class ScaleCrop:
    """A random scale and a random crop.

    Attributes:
        shorter: the smallest and the largest shorter side of a scaled image, in pixels.
        cat_max_ratio: the largest share that a class may have of a crop's pixels.
    """

    shorter: tuple[int, int]
    cat_max_ratio: float


def _operations(config: Config) -> list[tuple[str, dict[str, Any]]]:
    """The operations of a recipe by their names, with their parameters."""
    ops: dict[str, Any] = getattr(config.augment, "ops", {})
    return [split_entry(label, entry, f"augment.ops.{label}") for label, entry in ops.items() if entry is not None]


def check_comparable(config: Config, baselines: str, fix: str = "", *, masks: bool = False) -> None:
    """Refuse a recipe that the baselines don't follow: the workloads would differ.

    Args:
        config: EffLoop's.
        baselines: their names, as in the message; if empty, any recipe will do.
        fix: what helps besides leaving the recipe as it was.
        masks: whether images have masks.

    Raises:
        ConfigError: it is anything but a random resized crop and a flip; or, with masks, a random scale and crop, a
            flip, and changes of colour.
    """
    augment = config.augment
    fits = {
        "ops": _is_plain(_operations(config)) or (masks and _is_scaled(_operations(config))),
        "order": getattr(augment, "order", None) is None,
        "mixup": not augment.mixup,
        "cutmix": not augment.cutmix,
        "device": getattr(augment, "device", Device.cpu) is Device.cpu,
    }
    allowed = "RandomResizedCrop (any scale and ratio) and RandomHorizontalFlip with p=0.5"
    if masks:
        allowed += (
            ", or RandomScaleCrop (any ratio, base and cat_max_ratio), that flip, and ColorJitter with p=0.5 of one "
            "number each"
        )
    for key, fit in fits.items():
        if baselines and not fit:
            raise ConfigError(
                f"augment.{key}: {baselines} can only be compared on {allowed}, on the host; leave out what sets it"
                f"{fix}"
            )


def _is_plain(operations: list[tuple[str, dict[str, Any]]]) -> bool:
    """RandomResizedCrop and a flip."""
    return [name for name, _ in operations] == ["RandomResizedCrop", _FLIP] and _has_frame(
        operations, {"size", "scale", "ratio"}
    )


def _is_scaled(operations: list[tuple[str, dict[str, Any]]]) -> bool:
    """RandomScaleCrop, a flip, and any changes of colour that each have probability 0.5."""
    colours = [parameters for name, parameters in operations[2:] if name == "ColorJitter"]
    keys = [key for parameters in colours for key in parameters.keys() - {"p"}]
    return (
        [name for name, _ in operations] == [_SCALE_CROP, _FLIP, *["ColorJitter"] * len(colours)]
        and _has_frame(operations, {"size", "ratio", "base", "cat_max_ratio"})
        and all(len(each) == 2 and each.get("p") == 0.5 for each in colours)
        and all(isinstance(value, int | float) for each in colours for value in each.values())
        and len(keys) == len({*keys})
    )


def _has_frame(operations: list[tuple[str, dict[str, Any]]], of_crop: set[str]) -> bool:
    """Whether the crop has no other parameters, and the flip none but its default."""
    return operations[0][1].keys() <= of_crop and operations[1][1] in ({}, {"p": 0.5})


def original_photos(config: Config, folder: str, baselines: str) -> Path:
    """The folder ROOT/SPLIT with the photographs of the train split, for baselines that read files.

    Raises:
        ConfigError: it isn't there, and there are `baselines` that need it.
    """
    data = expand_root(config.data) if is_remote(config.data.root) else Path(config.data.root or "")
    root = (Path(folder) if folder else data) / config.data.train_split
    if baselines and not root.is_dir():
        raise ConfigError(
            f"folder: {root} is no folder with a folder for each class, as {baselines} needs; set folder=ROOT"
        )
    return root


def timed_epochs(batches: Callable[[int], Iterator[int]]) -> EpochRunner:
    """Time the waiting for batches, from a function of the epoch's number that yields each batch's length."""
    numbers = itertools.count()

    def epoch() -> tuple[int, float]:
        num_images, waited_s, counts = 0, 0.0, batches(next(numbers))
        while True:
            started = time.perf_counter()
            count = next(counts, None)
            waited_s += time.perf_counter() - started
            if count is None:
                return num_images, waited_s
            num_images += count

    return epoch


def pillow_loader(workload: Workload) -> torch.utils.data.DataLoader[Any]:
    """ImageFolder and DataLoader; batches of images (N, 3, H, W) float32 and targets (N,) int64."""
    from torchvision import transforms
    from torchvision.datasets import ImageFolder

    crop = transforms.RandomResizedCrop(workload.config.size, scale=workload.scale, ratio=workload.ratio)
    steps = [crop, transforms.RandomHorizontalFlip(), transforms.ToTensor()]
    steps.append(transforms.Normalize(workload.mean or IMAGENET[0], workload.std or IMAGENET[1]))
    return data_loader(ImageFolder(workload.root, transforms.Compose(steps)), workload)


def data_loader(data: Any, workload: Workload) -> torch.utils.data.DataLoader[Any]:
    """PyTorch's, with as many workers as EffLoop has; the last batch is dropped if it is short."""
    return torch.utils.data.DataLoader(
        data,
        workload.config.batch_size,
        shuffle=True,
        num_workers=workload.num_workers,
        persistent_workers=workload.num_workers > 0,
        drop_last=True,
    )

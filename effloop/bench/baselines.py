"""Baselines: the loaders that EffLoop's is compared with, each over the same photographs, epoch by epoch."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from effloop import config as configs
from effloop.build.loader import build_loader
from effloop.build.resolve import num_workers
from effloop.config import Config
from effloop.data.augment.base import Device
from effloop.data.augment.recipe import split_entry
from effloop.data.source import sources
from effloop.errors import ConfigError, optional_package

EpochRunner = Callable[[], tuple[int, float]]
"""Loads one epoch; returns its number of images and the seconds spent waiting for batches."""


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
    def _crop(self) -> dict[str, Any]:
        """The parameters of the recipe's crop, as the user wrote them; `check_comparable` made sure of it."""
        return _operations(self.config)[0][1]


def _operations(config: Config) -> list[tuple[str, dict[str, Any]]]:
    """The operations of a recipe by their names, with their parameters."""
    ops: dict[str, Any] = getattr(config.augment, "ops", {})
    return [split_entry(label, entry, f"augment.ops.{label}") for label, entry in ops.items() if entry is not None]


def check_comparable(config: Config, baselines: str, fix: str = "") -> None:
    """Refuse a recipe that the baselines don't follow: the workloads would differ.

    Args:
        config: EffLoop's.
        baselines: their names, as in the message; if empty, any recipe will do.
        fix: what helps besides leaving the recipe as it was.

    Raises:
        ConfigError: it is anything but a random resized crop and a flip.
    """
    augment, operations = config.augment, _operations(config)
    crop, flip = operations[0][1:] + operations[1][1:] if len(operations) == 2 else ({}, {})
    fits = {
        "ops": [name for name, _ in operations] == ["RandomResizedCrop", "RandomHorizontalFlip"]
        and crop.keys() <= {"size", "scale", "ratio"}
        and flip in ({}, {"p": 0.5}),
        "order": getattr(augment, "order", None) is None,
        "mixup": not augment.mixup,
        "cutmix": not augment.cutmix,
        "device": getattr(augment, "device", Device.cpu) is Device.cpu,
    }
    for key, fit in fits.items():
        if baselines and not fit:
            raise ConfigError(
                f"augment.{key}: {baselines} can only be compared on RandomResizedCrop (any scale and ratio) and "
                f"RandomHorizontalFlip with p=0.5, on the host; leave out what sets it{fix}"
            )


def original_photos(config: Config, folder: str, baselines: str) -> Path:
    """The folder ROOT/SPLIT with the photographs of the train split, for baselines that read files.

    Raises:
        ConfigError: it isn't there, and there are `baselines` that need it.
    """
    root = Path(folder or config.data.root or "") / config.data.train_split
    if baselines and not root.is_dir():
        raise ConfigError(
            f"folder: {root} is no folder with a folder for each class, as {baselines} needs; set folder=ROOT"
        )
    return root


def _timed_epochs(batches: Callable[[int], Iterator[int]]) -> EpochRunner:
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


def _effloop(workload: Workload) -> EpochRunner:
    """EffLoop, as configured."""
    loader = build_loader(workload.config)
    return _timed_epochs(lambda number: (len(batch) for batch in loader.epoch(number)))


def _own(engine: str, count: int | None, workload: Workload) -> EpochRunner:
    """EffLoop with another engine, and with so many workers."""
    workload.config.engine = configs.compose([f"engine={engine}"]).engine
    workload.config.num_workers = workload.config.num_workers if count is None else count
    return _effloop(workload)


OWN: dict[str, Callable[[Workload], EpochRunner]] = {
    "processes": partial(_own, "processes", None),
    **{f"{engine}-{n}": partial(_own, engine, n) for engine in ("threads", "processes") for n in (1, 2, 4)},
}
"""EffLoop's engines by the names that `vs=` takes: how they scale. They read `data.root`."""


def _torchvision(workload: Workload) -> EpochRunner:
    """ImageFolder and DataLoader with torchvision's v2 transforms on uint8."""
    from torchvision.datasets import ImageFolder
    from torchvision.io import decode_image
    from torchvision.transforms import v2

    crop = v2.RandomResizedCrop(workload.config.size, scale=workload.scale, ratio=workload.ratio, antialias=True)
    transform = v2.Compose([crop, v2.RandomHorizontalFlip()])
    data = ImageFolder(workload.root, transform, loader=lambda path: decode_image(path, mode="RGB"))
    batches = _data_loader(data, workload)
    return _timed_epochs(lambda _: (len(targets) for _, targets in batches))


def _pillow(workload: Workload) -> EpochRunner:
    """ImageFolder and DataLoader with Pillow, normalised to float32, as in torchvision's reference scripts."""
    batches = pillow_loader(workload)
    return _timed_epochs(lambda _: (len(targets) for _, targets in batches))


def pillow_loader(workload: Workload) -> torch.utils.data.DataLoader[Any]:
    """ImageFolder and DataLoader; batches of images (N, 3, H, W) float32 and targets (N,) int64."""
    from torchvision import transforms
    from torchvision.datasets import ImageFolder

    crop = transforms.RandomResizedCrop(workload.config.size, scale=workload.scale, ratio=workload.ratio)
    steps = [crop, transforms.RandomHorizontalFlip(), transforms.ToTensor()]
    steps.append(transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]))
    return _data_loader(ImageFolder(workload.root, transforms.Compose(steps)), workload)


def _data_loader(data: Any, workload: Workload) -> torch.utils.data.DataLoader[Any]:
    return torch.utils.data.DataLoader(
        data,
        workload.config.batch_size,
        shuffle=True,
        num_workers=workload.num_workers,
        persistent_workers=workload.num_workers > 0,
        drop_last=True,
    )


def _dali(workload: Workload) -> EpochRunner:
    """DALI on the CPU: region decoding, resize, flip."""
    dali = optional_package("nvidia.dali", "vs=dali", "effloop[dali]")
    fn = optional_package("nvidia.dali.fn", "vs=dali", "effloop[dali]")
    size, batch = workload.config.size, workload.config.batch_size
    pipe = dali.Pipeline(batch_size=batch, num_threads=max(1, workload.num_workers), device_id=None)
    with pipe:
        encoded, labels = fn.readers.file(file_root=str(workload.root), random_shuffle=True, name="reader")
        images = fn.decoders.image_random_crop(
            encoded, device="cpu", random_area=list(workload.scale), random_aspect_ratio=list(workload.ratio)
        )
        images = fn.resize(images, size=tuple(size))
        pipe.set_outputs(fn.flip(images, horizontal=fn.random.coin_flip()), labels)
    pipe.build()
    batches = pipe.epoch_size("reader") // batch

    def run() -> int:
        pipe.run()
        return batch

    return _timed_epochs(lambda _: (run() for _ in range(batches)))


def _ffcv(workload: Workload) -> EpochRunner:
    """FFCV on a file that is written for it, like `data.root`: JPEG of the same quality or raw, of the same size."""
    about = getattr(sources.build(workload.config.data, workload.config.data.train_split), "about", {})
    quality, kind = about.get("quality"), about.get("payload")
    if kind != "raw" and not isinstance(quality, int):
        raise ConfigError("it is compared on what was converted with quality=NUMBER or payload=raw; set data.root")
    optional_package("ffcv", "vs=ffcv", "ffcv")
    from ffcv.fields import IntField, RGBImageField
    from ffcv.fields.basics import IntDecoder
    from ffcv.fields.rgb_image import RandomResizedCropRGBImageDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.transforms import RandomHorizontalFlip, Squeeze, ToTensor, ToTorchImage
    from ffcv.writer import DatasetWriter
    from torchvision.datasets import ImageFolder

    file = str(workload.scratch / "ffcv.beton")
    side = {"max_resolution": about["max_side"]} if about["max_side"] else {}
    field = RGBImageField(write_mode="raw", **side) if kind == "raw" else None
    field = field or RGBImageField(write_mode="jpg", jpeg_quality=quality, **side)
    writer = DatasetWriter(file, {"image": field, "label": IntField()}, num_workers=workload.num_workers)
    writer.from_indexed_dataset(ImageFolder(str(workload.root)))
    crop = RandomResizedCropRGBImageDecoder(tuple(workload.config.size), scale=workload.scale, ratio=workload.ratio)
    loader = Loader(
        file,
        batch_size=workload.config.batch_size,
        num_workers=max(1, workload.num_workers),
        order=OrderOption.RANDOM,
        os_cache=True,
        drop_last=True,
        pipelines={
            "image": [crop, RandomHorizontalFlip(), ToTensor(), ToTorchImage()],
            "label": [IntDecoder(), ToTensor(), Squeeze()],
        },
    )
    return _timed_epochs(lambda _: (len(labels) for _, labels in loader))


def _simplejpeg(workload: Workload) -> EpochRunner:
    """No loader: simplejpeg decodes whole photographs from memory, and nothing else is done."""
    simplejpeg = optional_package("simplejpeg", "vs=simplejpeg", "simplejpeg")
    files = [path for path in sorted(workload.root.glob("*/*")) if path.suffix.lower() in (".jpg", ".jpeg")]
    encoded, threads = [path.read_bytes() for path in files], max(1, workload.num_workers)

    def decode(part: list[bytes]) -> int:
        for data in part:
            simplejpeg.decode_jpeg(data)
        return len(part)

    pool = ThreadPoolExecutor(threads)
    return _timed_epochs(lambda _: pool.map(decode, [encoded[number::threads] for number in range(threads)]))


LOADERS: dict[str, Callable[[Workload], EpochRunner]] = {
    "effloop": _effloop,
    **OWN,
    "torchvision": _torchvision,
    "pillow": _pillow,
    "dali": _dali,
    "ffcv": _ffcv,
    "simplejpeg": _simplejpeg,
}
"""Loaders by the names that `vs=` takes; `effloop` is always measured."""

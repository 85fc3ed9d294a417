"""What people would use instead of EffLoop's loader: each goes through the same photographs, epoch by epoch."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from effloop import config as configs
from effloop.build.loader import build_loader
from effloop.config import Config
from effloop.data.augment.base import Device
from effloop.data.augment.recipe import named
from effloop.data.source import sources
from effloop.errors import ConfigError, optional_package
from effloop.system.hardware import available_cores

Epoch = Callable[[], tuple[int, float]]
"""Goes through the data once; returns images and seconds waited for batches."""


@dataclass(frozen=True)
class Work:
    """What all have to do.

    Attributes:
        config: of EffLoop's loader; batch size, image size, crop and threads hold for all.
        root: the original photographs, ROOT/CLASS/*.
        scratch: an empty folder.
    """

    config: Config
    root: Path
    scratch: Path

    @property
    def threads(self) -> int:
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
        """The parameters of the recipe's crop, as the user wrote them; `check_same_work` saw that there is one."""
        return _operations(self.config)[0][1]


def _operations(config: Config) -> list[tuple[str, dict[str, Any]]]:
    """The operations of a recipe by their names, with their parameters."""
    ops: dict[str, Any] = getattr(config.augment, "ops", {})
    return [named(label, entry, f"augment.ops.{label}") for label, entry in ops.items() if entry is not None]


def check_same_work(config: Config, who: str, fix: str = "") -> None:
    """Refuse a recipe that peers don't follow: they would be compared on other work.

    Args:
        config: EffLoop's.
        who: the peers; none if empty, and any recipe will do.
        fix: what may be done beside leaving the recipe as it was.

    Raises:
        ConfigError: it is more or less than a random resized crop and a flip.
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
        if who and not fit:
            raise ConfigError(
                f"augment.{key}: {who} can only be compared on RandomResizedCrop (any scale and ratio) and "
                f"RandomHorizontalFlip with p=0.5, on the host; leave out what sets it{fix}"
            )


def num_workers(config: Config) -> int:
    """`config.num_workers` as a number."""
    return available_cores() if isinstance(config.num_workers, str) else config.num_workers


def originals(config: Config, folder: str, who: str) -> Path:
    """Where the photographs of the train split are, for those who read files: ROOT/SPLIT.

    Raises:
        ConfigError: somebody (`who`, if not empty) needs them, and they aren't there.
    """
    root = Path(folder or config.data.root or "") / config.data.train_split
    if who and not root.is_dir():
        raise ConfigError(f"folder: {root} is no folder with a folder for each class, as {who} needs; set folder=ROOT")
    return root


def _epochs(batches: Callable[[int], Iterator[int]]) -> Epoch:
    """From a function of the epoch's number that gives each batch's length."""
    numbers = itertools.count()

    def epoch() -> tuple[int, float]:
        images, waited, counts = 0, 0.0, batches(next(numbers))
        while True:
            started = time.perf_counter()
            count = next(counts, None)
            waited += time.perf_counter() - started
            if count is None:
                return images, waited
            images += count

    return epoch


def _effloop(work: Work) -> Epoch:
    """This package, as configured."""
    loader = build_loader(work.config)
    return _epochs(lambda number: (len(batch) for batch in loader.epoch(number)))


def _processes(work: Work) -> Epoch:
    """This package with engine=processes."""
    work.config.engine = configs.compose(["engine=processes"]).engine
    return _effloop(work)


def _torchvision(work: Work) -> Epoch:
    """ImageFolder and DataLoader with torchvision's v2 transforms on uint8."""
    from torchvision.datasets import ImageFolder
    from torchvision.io import decode_image
    from torchvision.transforms import v2

    crop = v2.RandomResizedCrop(work.config.image_size, scale=work.scale, ratio=work.ratio, antialias=True)
    transform = v2.Compose([crop, v2.RandomHorizontalFlip()])
    data = ImageFolder(work.root, transform, loader=lambda path: decode_image(path, mode="RGB"))
    batches = _data_loader(data, work)
    return _epochs(lambda _: (len(targets) for _, targets in batches))


def _pillow(work: Work) -> Epoch:
    """ImageFolder and DataLoader with Pillow, normalised to float32, as in torchvision's reference scripts."""
    batches = pillow_batches(work)
    return _epochs(lambda _: (len(targets) for _, targets in batches))


def pillow_batches(work: Work) -> torch.utils.data.DataLoader[Any]:
    """Batches of (N, 3, S, S) float32 and (N,) int64."""
    from torchvision import transforms
    from torchvision.datasets import ImageFolder

    crop = transforms.RandomResizedCrop(work.config.image_size, scale=work.scale, ratio=work.ratio)
    steps = [crop, transforms.RandomHorizontalFlip(), transforms.ToTensor()]
    steps.append(transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]))
    return _data_loader(ImageFolder(work.root, transforms.Compose(steps)), work)


def _data_loader(data: Any, work: Work) -> torch.utils.data.DataLoader[Any]:
    return torch.utils.data.DataLoader(
        data,
        work.config.batch_size,
        shuffle=True,
        num_workers=work.threads,
        persistent_workers=work.threads > 0,
        drop_last=True,
    )


def _dali(work: Work) -> Epoch:
    """DALI on the CPU: region decoding, resize, flip."""
    dali = optional_package("nvidia.dali", "vs=dali", "effloop[dali]")
    fn = optional_package("nvidia.dali.fn", "vs=dali", "effloop[dali]")
    size, batch = work.config.image_size, work.config.batch_size
    pipe = dali.Pipeline(batch_size=batch, num_threads=max(1, work.threads), device_id=None)
    with pipe:
        encoded, labels = fn.readers.file(file_root=str(work.root), random_shuffle=True, name="reader")
        images = fn.decoders.image_random_crop(
            encoded, device="cpu", random_area=list(work.scale), random_aspect_ratio=list(work.ratio)
        )
        images = fn.resize(images, size=(size, size))
        pipe.set_outputs(fn.flip(images, horizontal=fn.random.coin_flip()), labels)
    pipe.build()
    batches = pipe.epoch_size("reader") // batch

    def run() -> int:
        pipe.run()
        return batch

    return _epochs(lambda _: (run() for _ in range(batches)))


def _ffcv(work: Work) -> Epoch:
    """FFCV on a file of its own, of the same kind as `data.root`: JPEG of the same quality, or raw; as large."""
    about = getattr(sources.build(work.config.data, work.config.data.train_split), "about", {})
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

    file, side = str(work.scratch / "ffcv.beton"), {"max_resolution": about["max_side"]} if about["max_side"] else {}
    field = RGBImageField(write_mode="raw", **side) if kind == "raw" else None
    field = field or RGBImageField(write_mode="jpg", jpeg_quality=quality, **side)
    writer = DatasetWriter(file, {"image": field, "label": IntField()}, num_workers=work.threads)
    writer.from_indexed_dataset(ImageFolder(str(work.root)))
    size = (work.config.image_size,) * 2
    crop = RandomResizedCropRGBImageDecoder(size, scale=work.scale, ratio=work.ratio)
    loader = Loader(
        file,
        batch_size=work.config.batch_size,
        num_workers=max(1, work.threads),
        order=OrderOption.RANDOM,
        os_cache=True,
        drop_last=True,
        pipelines={
            "image": [crop, RandomHorizontalFlip(), ToTensor(), ToTorchImage()],
            "label": [IntDecoder(), ToTensor(), Squeeze()],
        },
    )
    return _epochs(lambda _: (len(labels) for _, labels in loader))


def _simplejpeg(work: Work) -> Epoch:
    """No loader: simplejpeg decodes the whole photographs, which lie in memory, and nothing else is done."""
    simplejpeg = optional_package("simplejpeg", "vs=simplejpeg", "simplejpeg")
    files = [path for path in sorted(work.root.glob("*/*")) if path.suffix.lower() in (".jpg", ".jpeg")]
    encoded, threads = [path.read_bytes() for path in files], max(1, work.threads)

    def decode(part: list[bytes]) -> int:
        for data in part:
            simplejpeg.decode_jpeg(data)
        return len(part)

    pool = ThreadPoolExecutor(threads)
    return _epochs(lambda _: pool.map(decode, [encoded[number::threads] for number in range(threads)]))


LOADERS: dict[str, Callable[[Work], Epoch]] = {
    "effloop": _effloop,
    "processes": _processes,
    "torchvision": _torchvision,
    "pillow": _pillow,
    "dali": _dali,
    "ffcv": _ffcv,
    "simplejpeg": _simplejpeg,
}
"""By the names that `vs=` takes; `effloop` is always there."""

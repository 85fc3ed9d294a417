"""The loaders of `bench what=loader`: EffLoop's, and those of other packages on the same photographs."""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import torch

from effloop import config as configs
from effloop.assemble.loader import build_loader
from effloop.bench.baselines import EpochRunner, Workload, data_loader, pillow_loader, timed_epochs
from effloop.data.source import sources
from effloop.errors import ConfigError, optional_package


def _effloop(workload: Workload) -> EpochRunner:
    """EffLoop, as configured."""
    loader = build_loader(workload.config)
    return timed_epochs(lambda number: (len(batch) for batch in loader.epoch(number)))


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
    """ImageFolder and DataLoader with torchvision's v2 transforms on uint8, normalised last."""
    from torchvision.datasets import ImageFolder
    from torchvision.io import decode_image
    from torchvision.transforms import v2

    crop = v2.RandomResizedCrop(workload.config.size, scale=workload.scale, ratio=workload.ratio, antialias=True)
    steps = [crop, v2.RandomHorizontalFlip()]
    if workload.mean and workload.std:
        steps += [v2.ToDtype(torch.float32, scale=True), v2.Normalize(workload.mean, workload.std)]
    data = ImageFolder(workload.root, v2.Compose(steps), loader=lambda path: decode_image(path, mode="RGB"))
    batches = data_loader(data, workload)
    return timed_epochs(lambda _: (len(targets) for _, targets in batches))


def _pillow(workload: Workload) -> EpochRunner:
    """ImageFolder and DataLoader with Pillow, normalised to float32, as in torchvision's reference scripts."""
    batches = pillow_loader(workload)
    return timed_epochs(lambda _: (len(targets) for _, targets in batches))


def _dali(workload: Workload) -> EpochRunner:
    """DALI on the CPU: region decoding, resize, flip."""
    dali = optional_package("nvidia.dali", "vs=dali", "effloop[dali]")
    fn = optional_package("nvidia.dali.fn", "vs=dali", "effloop[dali]")
    types = optional_package("nvidia.dali.types", "vs=dali", "effloop[dali]")
    size, batch = workload.config.size, workload.config.batch_size
    pipe = dali.Pipeline(batch_size=batch, num_threads=max(1, workload.num_workers), device_id=None)
    with pipe:
        encoded, labels = fn.readers.file(file_root=str(workload.root), random_shuffle=True, name="reader")
        images = fn.decoders.image_random_crop(
            encoded, device="cpu", random_area=list(workload.scale), random_aspect_ratio=list(workload.ratio)
        )
        images = fn.resize(images, size=tuple(size))
        if workload.mean and workload.std:
            mean, std = ([255 * value for value in values] for values in (workload.mean, workload.std))
            options = {"dtype": types.FLOAT, "output_layout": "HWC", "mean": mean, "std": std}
            images = fn.crop_mirror_normalize(images, mirror=fn.random.coin_flip(), **options)
        else:
            images = fn.flip(images, horizontal=fn.random.coin_flip())
        pipe.set_outputs(images, labels)
    pipe.build()
    batches = pipe.epoch_size("reader") // batch

    def run() -> int:
        pipe.run()
        return batch

    return timed_epochs(lambda _: (run() for _ in range(batches)))


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
    from ffcv.transforms import NormalizeImage, RandomHorizontalFlip, Squeeze, ToTensor, ToTorchImage
    from ffcv.writer import DatasetWriter
    from torchvision.datasets import ImageFolder

    file = str(workload.scratch / "ffcv.beton")
    side = {"max_resolution": about["max_side"]} if about["max_side"] else {}
    field = RGBImageField(write_mode="raw", **side) if kind == "raw" else None
    field = field or RGBImageField(write_mode="jpg", jpeg_quality=quality, **side)
    writer = DatasetWriter(file, {"image": field, "label": IntField()}, num_workers=workload.num_workers)
    writer.from_indexed_dataset(ImageFolder(str(workload.root)))
    crop = RandomResizedCropRGBImageDecoder(tuple(workload.config.size), scale=workload.scale, ratio=workload.ratio)
    steps = [crop, RandomHorizontalFlip()]
    if workload.mean and workload.std:
        steps.append(NormalizeImage(255 * np.array(workload.mean), 255 * np.array(workload.std), np.float32))
    loader = Loader(
        file,
        batch_size=workload.config.batch_size,
        num_workers=max(1, workload.num_workers),
        order=OrderOption.RANDOM,
        os_cache=True,
        drop_last=True,
        pipelines={
            "image": [*steps, ToTensor(), ToTorchImage()],
            "label": [IntDecoder(), ToTensor(), Squeeze()],
        },
    )
    return timed_epochs(lambda _: (len(labels) for _, labels in loader))


def _turboloader(workload: Workload) -> EpochRunner:
    """TurboLoader on a tar of the photographs; as many threads as it takes."""
    turbo = optional_package("turboloader", "vs=turboloader", "turboloader")
    if (workload.scale, workload.ratio) != ((0.08, 1), (3 / 4, 4 / 3)):
        raise ConfigError("it always crops 0.08 to 1 of an image; set augment.ops.crop.scale=[0.08,1]")
    file = str(workload.scratch / "turboloader.tar")
    with tarfile.open(file, "w", format=tarfile.USTAR_FORMAT) as tar:
        for path in _jpegs(workload):
            tar.add(path, str(path.relative_to(workload.root)))
    loader = turbo.DataLoader(
        file,
        workload.config.batch_size,
        shuffle=True,
        transform=turbo.Normalize(workload.mean, workload.std) if workload.mean and workload.std else None,
        image_size=tuple(workload.config.size),
        output_format="numpy",
        train_aug=True,
        antialias=True,
        drop_last=True,
    )

    def epoch(number: int) -> Iterator[int]:
        loader.set_epoch(number)
        return (len(images) for images, _ in loader)

    return timed_epochs(epoch)


def _jpegs(workload: Workload) -> list[Path]:
    return [path for path in sorted(workload.root.glob("*/*")) if path.suffix.lower() in (".jpg", ".jpeg")]


def _simplejpeg(workload: Workload) -> EpochRunner:
    """No loader: simplejpeg decodes whole photographs from memory, and nothing else is done."""
    simplejpeg = optional_package("simplejpeg", "vs=simplejpeg", "simplejpeg")
    encoded, threads = [path.read_bytes() for path in _jpegs(workload)], max(1, workload.num_workers)

    def decode(part: list[bytes]) -> int:
        for data in part:
            simplejpeg.decode_jpeg(data)
        return len(part)

    pool = ThreadPoolExecutor(threads)
    return timed_epochs(lambda _: pool.map(decode, [encoded[number::threads] for number in range(threads)]))


LOADERS: dict[str, Callable[[Workload], EpochRunner]] = {
    "effloop": _effloop,
    **OWN,
    "torchvision": _torchvision,
    "pillow": _pillow,
    "dali": _dali,
    "ffcv": _ffcv,
    "turboloader": _turboloader,
    "simplejpeg": _simplejpeg,
}
"""Loaders by the names that `vs=` takes; `effloop` is always measured."""

NOTES = {
    "pillow": "always normalised float32",
    "ffcv": "resizes by areas",
    "turboloader": "always float32; decodes at a reduced size where it can, which isn't exact; no labels",
    "simplejpeg": "decodes whole images, and nothing else",
}
"""What a loader does differently, where it does."""

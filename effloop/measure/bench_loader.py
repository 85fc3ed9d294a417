"""`bench what=loader` and `train`: EffLoop beside other loaders on the same photographs, each in its own process."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from effloop import config as configs
from effloop.assemble.loader import build_loader
from effloop.assemble.model import build_model
from effloop.assemble.resolve import num_workers, resolved
from effloop.assemble.trainer import build_trainer
from effloop.config import Config
from effloop.data.augment.base import Device
from effloop.data.augment.recipe import split_entry
from effloop.data.remote.location import is_remote
from effloop.data.source import expand_root, sources
from effloop.errors import ConfigError, optional_package
from effloop.measure import turns
from effloop.measure.loops import alone, facts
from effloop.optim import optimizers
from effloop.precision import precisions
from effloop.registry import choices
from effloop.system.hardware import find_device
from effloop.system.openmp import without_limit

Timed = Callable[[Iterable[Any]], Iterator[Any]]
"""Passes batches through, and adds up the seconds that each was waited for."""

Epoch = Callable[[int, Timed], int]
"""Loads, or trains on, the epoch of a number, its batches passed through; returns the number of images."""

Measurement = dict[str, float]
"""Of an epoch: images `per_s`, `cores_used`, the share of time `waited` for batches, `bytes` of memory, and, where no
child process loads, `gil_us`: how long the process held the GIL for each image.
"""

IMAGENET = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
"""Mean and standard deviation of (R, G, B) in units of 0 to 1."""


@dataclass(frozen=True)
class Workload:
    """What every loader has to do.

    Attributes:
        config: of EffLoop's loader; batch size, image size, crop, mean and std and number of workers apply to all.
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
    def normalised(self) -> tuple[list[float], list[float]] | None:
        """Mean and standard deviation of the float32 batches that every loader delivers; None: uint8."""
        mean, std = self.config.data.mean, self.config.data.std
        return (mean, std) if mean and std else None

    @property
    def crop(self) -> dict[str, tuple[float, float]]:
        """Least and most area of a crop as a share of the image, `scale`, and of width over height, `ratio`."""
        found = _operations(self.config)[0][1]
        return {key: tuple(found.get(key, usual)) for key, usual in _CROP.items()}


_CROP = {"scale": (0.08, 1.0), "ratio": (3 / 4, 4 / 3)}


def _operations(config: Config) -> list[tuple[str, dict[str, Any]]]:
    """The operations of a recipe by their names, with their parameters."""
    ops: dict[str, Any] = getattr(config.augment, "ops", {})
    return [split_entry(label, entry, f"augment.ops.{label}") for label, entry in ops.items() if entry is not None]


def check_comparable(config: Config, baselines: str, fix: str = "") -> None:
    """Refuse a recipe that the baselines don't follow: the workloads would differ."""
    augment, operations = config.augment, _operations(config)
    plain = [name for name, _ in operations] == ["RandomResizedCrop", "RandomHorizontalFlip"]
    fits = {
        "ops": plain and operations[0][1].keys() <= {"size", *_CROP} and operations[1][1] in ({}, {"p": 0.5}),
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
    """The folder ROOT/SPLIT with the photographs of the train split, for baselines that read files."""
    data = expand_root(config.data) if is_remote(config.data.root) else Path(config.data.root or "")
    root = (Path(folder) if folder else data) / config.data.train_split
    if baselines and not root.is_dir():
        raise ConfigError(
            f"folder: {root} is no folder with a folder for each class, as {baselines} needs; set folder=ROOT"
        )
    return root


def loader(
    config: Config,
    repeats: int,
    *,
    vs: str = "torchvision,pillow",
    folder: str = "",
    work: str = "",
    dtype: str = "uint8",
) -> dict[str, Any]:
    """Images/s of the configured loader and of baselines, in turns; from the index to the batch that the loop gets.

    The workload is the same for all: random-resized-crop to `image_size`, antialiased, and flip; batches of
    `batch_size`. `NOTES` has what is different. Each runs in a process of its own, after a warm-up epoch.

    Raises:
        ConfigError: no such baseline, or a package or folder that it needs is missing; or a recipe that it doesn't do.
    """
    wanted = [] if vs == "none" else vs.split(",")
    baselines = [name for name in LOADERS if name != "effloop"]
    for name in wanted:
        if name not in baselines:
            raise ConfigError(f"vs: no baseline '{name}'; {choices(name, ['none', *baselines])}")
    others = ",".join(name for name in wanted if name not in OWN)
    check_comparable(config, others, ", or set vs=none")
    if dtype == "uint8":
        config.data.mean = config.data.std = None
    elif config.data.mean is None or config.data.std is None:
        raise ConfigError("dtype: float32 is normalised with data.mean and data.std, and these are null; set both")
    config.device = "cpu"
    root = original_photos(config, folder, others)
    ours = build_loader(config)  # raises what is wrong with it before any process starts
    data = ours.describe()
    ours.close()
    with turns.scratch_folder(work) as scratch, ExitStack() as stack:
        workload = Workload(config, root, scratch)
        runs = {name: _enter(stack, name, LOADERS[name], workload) for name in dict.fromkeys(["effloop", *wanted])}
        result = _result("loader", config, data, turns.in_turns(runs, repeats, warm_up=1)) | {"dtype": dtype}
    _print(result, repeats)
    for name in runs:
        if name in NOTES:
            print(f"{name}: {NOTES[name]}")
    return result


def train(config: Config, repeats: int, *, folder: str = "", work: str = "") -> dict[str, Any]:
    """Images/s of training epochs: EffLoop, with all that a run does, and the loop that PyTorch's docs show.

    Both train the same model with the same optimizer in the same precision and layout; `bare` takes its
    images from ImageFolder and DataLoader with Pillow, as torchvision's reference scripts do, and computes no scores.
    Its OpenMP threads spin as torch has them by default, EffLoop's as a run's do.

    Raises:
        ConfigError: something is missing or can't be built; or a recipe that `bare` doesn't do.
    """
    check_comparable(config, "bare")
    root = original_photos(config, folder, "bare")
    with turns.scratch_folder(work) as scratch, ExitStack() as stack:
        workload = Workload(alone(config), root, scratch)
        runs = {"effloop": _enter(stack, "effloop", _effloop_training, workload)}
        with without_limit():
            runs["bare"] = _enter(stack, "bare", _bare_training, workload)
        rounds = turns.in_turns(runs, repeats, warm_up=1)
    result = _result("train", config, f"model={config.model.name}, {root.parent}", rounds)
    _print(result, repeats)
    return result


def _enter(
    stack: ExitStack, name: str, build: Callable[[Workload], Epoch], workload: Workload
) -> Callable[[], Measurement]:
    epochs = partial(measured_epochs, partial(build, workload))
    return stack.enter_context(turns.apart(name, epochs, reuse_memory=workload.config.reuse_memory))


def measured_epochs(build: Callable[[], Epoch]) -> Callable[[], Measurement]:
    """What runs an epoch, in this process -> what runs and measures one after the other."""
    epoch, numbers, waited_s = build(), itertools.count(), 0.0

    def timed(batches: Iterable[Any]) -> Iterator[Any]:
        nonlocal waited_s
        started = time.perf_counter()
        for batch in batches:
            waited_s += time.perf_counter() - started
            yield batch
            started = time.perf_counter()

    def measure() -> Measurement:
        nonlocal waited_s
        waited_s = 0.0
        with turns.GilProbe() as gil:
            started, cpu = time.perf_counter(), turns.cpu_seconds()
            num_images = epoch(next(numbers), timed)
            seconds = time.perf_counter() - started
        found = {
            "per_s": num_images / seconds,
            "cores_used": (turns.cpu_seconds() - cpu) / seconds,
            "waited": waited_s / seconds,
            "bytes": float(turns.held_bytes()),
        }
        alone_here = len(turns.process_tree()) == 1
        return found | ({"gil_us": gil.share * seconds / num_images * 1e6} if alone_here else {})

    return measure


def _result(what: str, config: Config, data: str, rounds: Mapping[str, list[Measurement]]) -> dict[str, Any]:
    """The figures as they go to JSON; `rounds` are a side's measurements."""
    return {
        "what": what,
        "data": data,
        **facts(config),
        "augment": configs.to_dict(config)["augment"],
        "loaders": {
            # The values of each figure that all of a side's epochs have.
            name: {key: [each[key] for each in found] for key in found[0] if all(key in each for each in found)}
            for name, found in rounds.items()
        },
    }


def _print(result: Mapping[str, Any], repeats: int) -> None:
    loaders = result["loaders"]
    ours, rows = statistics.median(loaders["effloop"]["per_s"]), []
    for name, found in loaders.items():
        speeds = turns.spread(found["per_s"])
        medians = {key: statistics.median(values) for key, values in found.items()}
        cells = [*(f"{value:,.0f}" for value in speeds), f"{ours / speeds[0]:.2f}"]
        cells += [f"{speeds[0] / medians['cores_used']:,.0f}", f"{medians['cores_used']:.2f}"]
        cells += [f"{medians['waited']:.0%}", f"{medians['bytes'] / 1e6:,.0f}"]
        rows.append([name, *cells, f"{medians['gil_us']:,.0f}" if "gil_us" in medians else ""])
    headings = ["loader", "images/s", "least", "most", "effloop over it", "per core used", "cores used", "waiting"]
    title = f"{result['data']}; {repeats} epochs each, in turns; {result['num_workers']} workers"
    turns.print_table([*headings, "MB of memory", "GIL µs"], rows, left=("loader",), min_width=110, title=title)
    print("medians; effloop over it: effloop's images/s over this one's; GIL µs: how long an image holds the GIL")


def _data_loader(data: Any, workload: Workload) -> torch.utils.data.DataLoader[Any]:
    """PyTorch's, with as many workers as EffLoop has; the last batch is dropped if it is short."""
    return torch.utils.data.DataLoader(
        data,
        workload.config.batch_size,
        shuffle=True,
        num_workers=workload.num_workers,
        persistent_workers=workload.num_workers > 0,
        drop_last=True,
    )


def _pillow_loader(workload: Workload) -> torch.utils.data.DataLoader[Any]:
    """ImageFolder and DataLoader; batches of images (N, 3, H, W) float32 and targets (N,) int64."""
    from torchvision import transforms
    from torchvision.datasets import ImageFolder

    crop = transforms.RandomResizedCrop(workload.config.size, **workload.crop)
    steps = [crop, transforms.RandomHorizontalFlip(), transforms.ToTensor()]
    steps.append(transforms.Normalize(*(workload.normalised or IMAGENET)))
    return _data_loader(ImageFolder(workload.root, transforms.Compose(steps)), workload)


def _pairs(batches: Iterable[Any]) -> Epoch:
    """Epochs over batches of images and targets."""
    return lambda _, timed: sum(len(targets) for _, targets in timed(batches))


def _effloop(workload: Workload) -> Epoch:
    loader = build_loader(workload.config)
    return lambda number, timed: sum(map(len, timed(loader.epoch(number))))


def _own(engine: str, count: int | None, workload: Workload) -> Epoch:
    """EffLoop with another engine, and with so many workers."""
    workload.config.engine = configs.compose([f"engine={engine}"]).engine
    workload.config.num_workers = workload.config.num_workers if count is None else count
    return _effloop(workload)


def _effloop_training(workload: Workload) -> Epoch:
    trainer = build_trainer(workload.config, run_dir=workload.scratch / "run")
    trainer.recorder.__enter__()  # until this process ends

    def epoch(number: int, timed: Timed) -> int:
        trainer.progress.samples_seen = 0
        trainer.train_epoch(timed(trainer.train.epoch(number)))
        return len(trainer.train) * trainer.train.global_batch

    return epoch


def _bare_training(workload: Workload) -> Epoch:
    config, device = resolved(workload.config), find_device(workload.config.device)
    batches = _pillow_loader(workload)
    model = build_model(config, len(batches.dataset.classes), device)  # type: ignore[attr-defined]
    optimizer, loss_fn = optimizers.build(config.optim, model.parameters()), nn.CrossEntropyLoss()
    precision = precisions.build(config.precision, device)
    layout = torch.channels_last if config.channels_last else torch.contiguous_format

    def epoch(_: int, timed: Timed) -> int:
        model.train()
        num_images = 0
        for images, targets in timed(batches):
            optimizer.zero_grad()
            with precision.autocast():
                loss = loss_fn(model(images.to(device, memory_format=layout)), targets.to(device))
            precision.backward(loss)
            precision.step(optimizer)
            num_images += len(images)
        if device.type == "cuda":
            torch.cuda.synchronize()
        return num_images

    return epoch


def _torchvision(workload: Workload) -> Epoch:
    """ImageFolder and DataLoader with torchvision's v2 transforms on uint8, normalised last."""
    from torchvision.datasets import ImageFolder
    from torchvision.io import decode_image
    from torchvision.transforms import v2

    steps = [v2.RandomResizedCrop(workload.config.size, antialias=True, **workload.crop), v2.RandomHorizontalFlip()]
    if workload.normalised:
        steps += [v2.ToDtype(torch.float32, scale=True), v2.Normalize(*workload.normalised)]
    data = ImageFolder(workload.root, v2.Compose(steps), loader=lambda path: decode_image(path, mode="RGB"))
    return _pairs(_data_loader(data, workload))


def _pillow(workload: Workload) -> Epoch:
    """ImageFolder and DataLoader with Pillow, normalised to float32, as in torchvision's reference scripts."""
    return _pairs(_pillow_loader(workload))


def _dali(workload: Workload) -> Epoch:
    """DALI on the CPU: region decoding, resize, flip."""
    dali, fn, types = (
        optional_package(f"nvidia.dali{part}", "vs=dali", "effloop[dali]") for part in ("", ".fn", ".types")
    )
    batch, area, aspect = workload.config.batch_size, workload.crop["scale"], workload.crop["ratio"]
    pipe = dali.Pipeline(batch_size=batch, num_threads=max(1, workload.num_workers), device_id=None)
    with pipe:
        encoded, labels = fn.readers.file(file_root=str(workload.root), random_shuffle=True, name="reader")
        crop = {"random_area": list(area), "random_aspect_ratio": list(aspect)}
        images = fn.decoders.image_random_crop(encoded, device="cpu", **crop)
        images = fn.resize(images, size=tuple(workload.config.size))
        if workload.normalised:
            mean, std = ([255 * value for value in values] for values in workload.normalised)
            options = {"dtype": types.FLOAT, "output_layout": "HWC", "mean": mean, "std": std}
            images = fn.crop_mirror_normalize(images, mirror=fn.random.coin_flip(), **options)
        else:
            images = fn.flip(images, horizontal=fn.random.coin_flip())
        pipe.set_outputs(images, labels)
    pipe.build()
    batches = pipe.epoch_size("reader") // batch
    return lambda _, timed: batch * sum(1 for _ in timed(pipe.run() for _ in range(batches)))


def _ffcv(workload: Workload) -> Epoch:
    """FFCV on a file that is written for it, like `data.root`: JPEG of the same quality or raw, of the same size."""
    about = getattr(sources.build(workload.config.data, workload.config.data.train_split), "about", None) or {}
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
    form = {"write_mode": "raw"} if kind == "raw" else {"write_mode": "jpg", "jpeg_quality": quality}
    fields = {"image": RGBImageField(**form, **side), "label": IntField()}
    DatasetWriter(file, fields, num_workers=workload.num_workers).from_indexed_dataset(ImageFolder(str(workload.root)))
    steps = [RandomResizedCropRGBImageDecoder(tuple(workload.config.size), **workload.crop), RandomHorizontalFlip()]
    if workload.normalised:
        steps.append(NormalizeImage(*(255 * np.array(values) for values in workload.normalised), np.float32))
    labels = [IntDecoder(), ToTensor(), Squeeze()]
    loader = Loader(
        file,
        batch_size=workload.config.batch_size,
        num_workers=max(1, workload.num_workers),
        order=OrderOption.RANDOM,
        os_cache=True,
        drop_last=True,
        pipelines={"image": [*steps, ToTensor(), ToTorchImage()], "label": labels},
    )
    return _pairs(loader)


OWN: dict[str, Callable[[Workload], Epoch]] = {
    "processes": partial(_own, "processes", None),
    **{f"{engine}-{n}": partial(_own, engine, n) for engine in ("threads", "processes") for n in (1, 2, 4)},
}
"""EffLoop's engines by the names that `vs=` takes: how they scale. They read `data.root`."""

LOADERS: dict[str, Callable[[Workload], Epoch]] = {
    "effloop": _effloop,
    **OWN,
    "torchvision": _torchvision,
    "pillow": _pillow,
    "dali": _dali,
    "ffcv": _ffcv,
}
"""Loaders by the names that `vs=` takes; `effloop` is always measured."""

NOTES = {
    "pillow": "always normalised float32",
    "ffcv": "resizes by areas",
}
"""What a loader does differently, where it does."""

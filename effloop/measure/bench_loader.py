"""`bench what=loader` and `train`: EffLoop beside other loaders on the same photographs, each in its own process."""

from __future__ import annotations

import itertools
import statistics
import tarfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
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
from effloop.measure.loops import alone
from effloop.measure.turns import (
    GilProbe,
    apart,
    cpu_seconds,
    held_bytes,
    in_turns,
    print_table,
    process_tree,
    scratch_folder,
)
from effloop.optim import optimizers
from effloop.precision import precisions
from effloop.registry import choices
from effloop.system.hardware import available_cores, find_device
from effloop.system.openmp import without_limit

EpochRunner = Callable[[], tuple[int, float]]
"""Loads, or trains on, one epoch; returns its number of images and the seconds spent waiting for batches."""

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
        low, high = _operations(self.config)[0][1].get("scale", (0.08, 1.0))
        return low, high

    @property
    def ratio(self) -> tuple[float, float]:
        """Smallest and largest width over height of a crop."""
        low, high = _operations(self.config)[0][1].get("ratio", (3 / 4, 4 / 3))
        return low, high


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
    """
    augment, operations = config.augment, _operations(config)
    plain = [name for name, _ in operations] == ["RandomResizedCrop", "RandomHorizontalFlip"]
    fits = {
        "ops": plain and operations[0][1].keys() <= {"size", "scale", "ratio"} and operations[1][1] in ({}, {"p": 0.5}),
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


def loader(config: Config, repeats: int, *, vs: str, folder: str, work: str, dtype: str) -> dict[str, Any]:
    """Images/s of the configured loader and of baselines, in turns; from the index to the batch that the loop gets.

    The workload is the same for all: random-resized-crop to `image_size`, antialiased, and flip; batches of
    `batch_size`. `NOTES` has what is different. Each runs in a process of its own.

    Args:
        config: whose train split and engine are measured.
        repeats: epochs of each, after a warm-up epoch.
        vs: names of baselines, with commas between; `none` for none; `threads-1`, `processes-2` and the like are
            EffLoop's engines with so many workers, `processes` with as many as it has itself.
        folder: the original photographs for the baselines, ROOT/SPLIT/CLASS/*; empty is `data.root`.
        work: where `ffcv` and `turboloader` write their files; empty is the system's place for temporary files.
        dtype: of the images: `uint8`, or `float32`, normalised with `data.mean` and `data.std`, on the CPU.

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
    elif dtype != "float32":
        raise ConfigError(f"dtype: '{dtype}' is not allowed; {choices(dtype, ['uint8', 'float32'])}")
    elif config.data.mean is None or config.data.std is None:
        raise ConfigError("dtype: float32 is normalised with data.mean and data.std, and these are null; set both")
    config.device = "cpu"
    root = original_photos(config, folder, others)
    ours = build_loader(config)  # says what is wrong with it before any process starts
    data = ours.describe()
    ours.close()
    with scratch_folder(work) as scratch, ExitStack() as stack:
        workload = Workload(config, root, scratch)
        runs = {name: _enter(stack, name, LOADERS[name], workload) for name in dict.fromkeys(["effloop", *wanted])}
        rounds = in_turns(runs, repeats, warm_up=1)
    result = _comparison("loader", config, data, rounds) | {"dtype": dtype}
    _show(result, repeats)
    for name in rounds:
        if name in NOTES:
            print(f"{name}: {NOTES[name]}")
    return result


def train(config: Config, repeats: int, *, folder: str, work: str) -> dict[str, Any]:
    """Images/s of training epochs: EffLoop, with all that a run does, and the loop that PyTorch's docs show.

    Both train the same model with the same optimizer in the same precision and layout; `bare` takes its
    images from ImageFolder and DataLoader with Pillow, as torchvision's reference scripts do, and computes no scores.
    Its OpenMP threads spin as torch has them by default, EffLoop's as a run's do.

    Args:
        config: what is trained; its schedule is constant and no checkpoint is written.
        repeats: epochs of each, after a warm-up epoch.
        folder: the original photographs for `bare`, ROOT/SPLIT/CLASS/*; empty is `data.root`.
        work: where the run folder is; empty is the system's place for temporary files.

    Raises:
        ConfigError: something is missing or can't be built; or a recipe that `bare` doesn't do.
    """
    check_comparable(config, "bare")
    root = original_photos(config, folder, "bare")
    with scratch_folder(work) as scratch, ExitStack() as stack:
        workload = Workload(alone(config), root, scratch)
        runs = {"effloop": _enter(stack, "effloop", _effloop_training, workload)}
        with without_limit():
            runs["bare"] = _enter(stack, "bare", _bare_training, workload)
        rounds = in_turns(runs, repeats, warm_up=1)
    result = _comparison("train", config, f"model={config.model.name}, {root.parent}", rounds)
    _show(result, repeats)
    return result


def _enter(
    stack: ExitStack, name: str, build: Callable[[Workload], EpochRunner], workload: Workload
) -> Callable[[], Measurement]:
    epochs = partial(measured_epochs, partial(build, workload))
    return stack.enter_context(apart(name, epochs, reuse_memory=workload.config.reuse_memory))


def measured_epochs(build: Callable[[], EpochRunner]) -> Callable[[], Measurement]:
    """What runs an epoch, in this process -> what runs and measures one."""
    epoch = build()

    def measure() -> Measurement:
        with GilProbe() as gil:
            started, cpu = time.perf_counter(), cpu_seconds()
            num_images, waited_s = epoch()
            seconds = time.perf_counter() - started
        found = {
            "per_s": num_images / seconds,
            "cores_used": (cpu_seconds() - cpu) / seconds,
            "waited": waited_s / seconds,
            "bytes": float(held_bytes()),
        }
        alone_here = len(process_tree()) == 1
        return found | ({"gil_us": gil.share * seconds / num_images * 1e6} if alone_here else {})

    return measure


_COLUMNS = (
    *("loader", "images/s", "least", "most", "effloop over it"),
    *("per core used", "cores used", "waiting", "MB of memory", "GIL µs"),
)


def _comparison(what: str, config: Config, data: str, rounds: Mapping[str, list[Measurement]]) -> dict[str, Any]:
    """The figures as they go to JSON; `rounds` are a side's measurements."""
    return {
        "what": what,
        "data": data,
        "engine": config.engine.name,
        "decode": config.decode.name,
        "augment": configs.to_dict(config)["augment"],
        "batch_size": config.batch_size,
        "image_size": config.image_size,
        "num_workers": num_workers(config),
        "cores": available_cores(),
        "loaders": {
            # The values of each figure that all of a side's epochs have.
            name: {key: [each[key] for each in found] for key in found[0] if all(key in each for each in found)}
            for name, found in rounds.items()
        },
    }


def _show(result: Mapping[str, Any], repeats: int) -> None:
    """Print a result's table."""
    loaders = result["loaders"]
    medians = {name: statistics.median(found["per_s"]) for name, found in loaders.items()}
    rows = []
    for name, found in loaders.items():
        cores, waited, used = (statistics.median(found[key]) for key in ("cores_used", "waited", "bytes"))
        speed = [f"{value:,.0f}" for value in (medians[name], min(found["per_s"]), max(found["per_s"]))]
        gil = f"{statistics.median(found['gil_us']):,.0f}" if "gil_us" in found else ""
        rest = [f"{medians[name] / cores:,.0f}", f"{cores:.2f}", f"{waited:.0%}", f"{used / 1e6:,.0f}", gil]
        rows.append([name, *speed, f"{medians['effloop'] / medians[name]:.2f}", *rest])
    title = f"{result['data']}; {repeats} epochs each, in turns; {result['num_workers']} workers"
    print_table(_COLUMNS, rows, left=("loader",), min_width=110, title=title)
    print("medians; effloop over it: effloop's images/s over this one's; GIL µs: how long an image holds the GIL")


def _timed_epochs(batches: Callable[[int], Iterator[int]]) -> EpochRunner:
    """Time the waiting for batches, from a function of the epoch's number that yields each batch's length."""
    numbers = itertools.count()

    def epoch() -> tuple[int, float]:
        timer = WaitTimer()
        return sum(timer.timed(batches(next(numbers)))), timer.waited_s

    return epoch


class WaitTimer:
    """Adds up the seconds that a loop waits for its next batch."""

    def __init__(self) -> None:
        self.waited_s = 0.0

    def timed(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The same batches; the time until each one arrives counts."""
        started = time.perf_counter()
        for batch in batches:
            self.waited_s += time.perf_counter() - started
            yield batch
            started = time.perf_counter()


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

    crop = transforms.RandomResizedCrop(workload.config.size, scale=workload.scale, ratio=workload.ratio)
    steps = [crop, transforms.RandomHorizontalFlip(), transforms.ToTensor()]
    steps.append(transforms.Normalize(workload.mean or IMAGENET[0], workload.std or IMAGENET[1]))
    return _data_loader(ImageFolder(workload.root, transforms.Compose(steps)), workload)


def _effloop(workload: Workload) -> EpochRunner:
    loader = build_loader(workload.config)
    return _timed_epochs(lambda number: (len(batch) for batch in loader.epoch(number)))


def _own(engine: str, count: int | None, workload: Workload) -> EpochRunner:
    """EffLoop with another engine, and with so many workers."""
    workload.config.engine = configs.compose([f"engine={engine}"]).engine
    workload.config.num_workers = workload.config.num_workers if count is None else count
    return _effloop(workload)


def _effloop_training(workload: Workload) -> EpochRunner:
    trainer = build_trainer(workload.config, run_dir=workload.scratch / "run")
    trainer.recorder.__enter__()  # until this process ends
    numbers = itertools.count()

    def epoch() -> tuple[int, float]:
        trainer.progress.samples_seen = 0
        timer = WaitTimer()
        trainer.train_epoch(timer.timed(trainer.train.epoch(next(numbers))))
        return len(trainer.train) * trainer.train.global_batch, timer.waited_s

    return epoch


def _bare_training(workload: Workload) -> EpochRunner:
    config, device = resolved(workload.config), find_device(workload.config.device)
    batches = _pillow_loader(workload)
    model = build_model(config, len(batches.dataset.classes), device)  # type: ignore[attr-defined]
    optimizer, loss_fn = optimizers.build(config.optim, model.parameters()), nn.CrossEntropyLoss()
    precision = precisions.build(config.precision, device)
    layout = torch.channels_last if config.channels_last else torch.contiguous_format

    def epoch() -> tuple[int, float]:
        model.train()
        num_images, timer = 0, WaitTimer()
        for images, targets in timer.timed(batches):
            optimizer.zero_grad()
            with precision.autocast():
                loss = loss_fn(model(images.to(device, memory_format=layout)), targets.to(device))
            precision.backward(loss)
            precision.step(optimizer)
            num_images += len(images)
        if device.type == "cuda":
            torch.cuda.synchronize()
        return num_images, timer.waited_s

    return epoch


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
    batches = _data_loader(data, workload)
    return _timed_epochs(lambda _: (len(targets) for _, targets in batches))


def _pillow(workload: Workload) -> EpochRunner:
    """ImageFolder and DataLoader with Pillow, normalised to float32, as in torchvision's reference scripts."""
    batches = _pillow_loader(workload)
    return _timed_epochs(lambda _: (len(targets) for _, targets in batches))


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

    return _timed_epochs(lambda _: (run() for _ in range(batches)))


def _ffcv(workload: Workload) -> EpochRunner:
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
    return _timed_epochs(lambda _: (len(labels) for _, labels in loader))


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

    return _timed_epochs(epoch)


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
    return _timed_epochs(lambda _: pool.map(decode, [encoded[number::threads] for number in range(threads)]))


OWN: dict[str, Callable[[Workload], EpochRunner]] = {
    "processes": partial(_own, "processes", None),
    **{f"{engine}-{n}": partial(_own, engine, n) for engine in ("threads", "processes") for n in (1, 2, 4)},
}
"""EffLoop's engines by the names that `vs=` takes: how they scale. They read `data.root`."""

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

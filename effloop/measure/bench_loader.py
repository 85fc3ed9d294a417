"""`bench what=loader`, `train` and `augment`: EffLoop beside others, each in a process of its own."""

from __future__ import annotations

import itertools
import re
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from effloop import config as configs
from effloop.assemble.environment import num_workers, resolved
from effloop.assemble.loader import build_loader
from effloop.assemble.model import build_model
from effloop.assemble.trainer import build_trainer
from effloop.config import Config
from effloop.data.remote.location import is_remote
from effloop.data.source import Tail, expand_root, sources
from effloop.errors import ConfigError, optional_package
from effloop.measure.benchmark import Column, Report, Row
from effloop.measure.loops import alone, facts
from effloop.measure.turns import apart, cpu_seconds, held_bytes, in_turns, scratch_folder
from effloop.optim import optimizers
from effloop.precision import precisions
from effloop.registry import choices
from effloop.system import gpu
from effloop.system.processes import without_spin_limit

Timed = Callable[[Iterable[Any]], Iterator[Any]]
"""Passes batches through, and adds up the seconds that each was waited for."""

Epoch = Callable[[int, Timed], int]
"""Loads, or trains on, the epoch of a number, its batches passed through; returns the number of images."""

Measurement = dict[str, float]
"""Of an epoch: `images_per_s`, `cores_used`, the share of time `waited` for batches, and `bytes` of memory."""


@dataclass(frozen=True)
class Workload:
    """What every loader has to do."""

    config: Config  # of EffLoop's loader; batch size, image size, crop and number of workers apply to all
    root: Path  # the original photographs, ROOT/CLASS/*
    scratch: Path  # an empty folder


def crop_of(config: Config, baselines: str = "", fix: str = "") -> dict[str, tuple[float, float]]:
    """`scale` and `ratio` of the crop, as torchvision's `RandomResizedCrop` takes them."""
    own, usual = (configs.to_dict(each)["augment"] for each in (config, configs.compose()))
    crop = {key: (own.get("ops", {}).get("crop") or {}).get(key) for key in ("scale", "ratio")}
    usual["ops"]["crop"] |= crop  # any scale and ratio
    for key in ("ops", "order", "mixup", "cutmix", "device"):
        if baselines and own.get(key) != usual[key]:
            raise ConfigError(
                f"augment.{key}: {baselines} can only be compared on RandomResizedCrop (any scale and ratio) and "
                f"RandomHorizontalFlip with p=0.5, on the host; leave out what sets it{fix}"
            )
    return {key: tuple(value) for key, value in crop.items() if value}


def original_photos(config: Config, folder: str, baselines: str) -> Path:
    """The folder ROOT/SPLIT with the photographs of the train split, for baselines that read files."""
    data = expand_root(config.data) if is_remote(config.data.root) else Path(config.data.root or "")
    root = (Path(folder) if folder else data) / config.data.train_split
    if baselines and not root.is_dir():
        raise ConfigError(
            f"folder: {root} is no folder with a folder for each class, as {baselines} needs; set folder=ROOT"
        )
    return root


def loader(config: Config, repeats: int, *, vs: str = "torchvision,pillow", folder: str = "", work: str = "") -> Report:
    """Images/s of the configured loader and of baselines, in turns; from the index to the batch that the loop gets.

    The workload is the same for all: random-resized-crop to `image_size`, antialiased, and flip; batches of
    `batch_size`. Each runs in a process of its own, after a warm-up epoch.
    """
    wanted = [] if vs == "none" else vs.split(",")
    baselines = [name for name in LOADERS if name != "effloop"]
    for name in wanted:
        if name not in baselines:
            raise ConfigError(f"vs: no baseline '{name}'; {choices(name, ['none', *baselines])}")
    others = ",".join(name for name in wanted if name not in OWN)
    crop_of(config, others, ", or set vs=none")
    config.device, config.data.mean, config.data.std, config.global_batch = "cpu", None, None, None  # uint8 from all
    root = original_photos(config, folder, others)
    ours = build_loader(config)  # raises what is wrong with it before any process starts
    data = ours.describe()
    ours.close()
    builds = {name: LOADERS[name] for name in dict.fromkeys(["effloop", *wanted])}
    return _report("loader", config, data, builds, root, work, repeats)


def train(config: Config, repeats: int, *, folder: str = "", work: str = "") -> Report:
    """Images/s of training epochs: EffLoop, with all that a run does, and the loop that PyTorch's docs show.

    Both train the same model with the same optimizer in the same precision and layout; `bare` takes its
    images from ImageFolder and DataLoader with Pillow, as torchvision's reference scripts do, and computes no scores.
    Its OpenMP threads spin as torch has them by default, EffLoop's as a run's do.
    """
    crop_of(config, "bare")
    root = original_photos(config, folder, "bare")
    builds = {"effloop": _effloop_training, "bare": _bare_training}
    return _report("train", alone(config), f"model={config.model.name}, {root.parent}", builds, root, work, repeats)


def _report(
    what: str,
    config: Config,
    data: str,
    builds: Mapping[str, Callable[[Workload], Epoch]],
    root: Path,
    work: str,
    repeats: int,
) -> Report:
    """Each side in a process of its own, an epoch in each turn."""
    with scratch_folder(work) as scratch, ExitStack() as stack:
        runs = {}
        for name, build in builds.items():
            epochs = partial(measured_epochs, partial(build, Workload(config, root, scratch)))
            with without_spin_limit() if name == "bare" else nullcontext():
                side = apart(name, epochs, reuse_memory=config.reuse_memory)
                runs[name] = stack.enter_context(side)
        found = in_turns(runs, repeats, warm_up=1)
    ours = [each["images_per_s"] for each in found["effloop"]]
    rows: list[Row] = []
    for name, each in found.items():
        row: Row = {key: [one[key] for one in each] for key in each[0]}
        speed = statistics.median(row["images_per_s"])
        row |= {"per_core": speed / statistics.median(row["cores_used"]), "ratio": statistics.median(ours) / speed}
        rows.append({"name": name, **row})
    return Report(
        facts={"what": what, "data": data, **facts(config), "augment": configs.to_dict(config)["augment"]},
        rows=rows,
        columns=[
            *(Column("name", "loader"), Column("images_per_s", "images/s (least-most)", spread=True)),
            *(Column("ratio", "effloop over it", "{:.2f}"), Column("per_core", "per core used")),
            *(Column("cores_used", "cores used", "{:.2f}"), Column("waited", "waiting", "{:.0%}")),
            Column("bytes", "MB of memory", unit=1e6),
        ],
        title=f"{data}; {repeats} epochs each, in turns; {num_workers(config)} workers",
        notes=["all deliver uint8; ffcv resizes by areas"] if what == "loader" else (),
    )


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
        started, cpu = time.perf_counter(), cpu_seconds()
        num_images = epoch(next(numbers), timed)
        gpu.wait_for_all()
        seconds = time.perf_counter() - started
        return {
            "images_per_s": num_images / seconds,
            "cores_used": (cpu_seconds() - cpu) / seconds,
            "waited": waited_s / seconds,
            "bytes": float(held_bytes()),
        }

    return measure


def _image_folder(workload: Workload, *steps: str, **options: Any) -> torch.utils.data.DataLoader[Any]:
    """Torchvision's ImageFolder and v2 transforms, in PyTorch's DataLoader with as many workers as EffLoop has.

    `steps` follow crop and flip, options are ImageFolder's; the last batch is dropped if it is short.
    """
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import v2

    config = workload.config
    mean, std = config.data.mean or [0.485, 0.456, 0.406], config.data.std or [0.229, 0.224, 0.225]  # ImageNet's
    known = {
        "tensor": v2.PILToTensor(),
        "float": v2.ToDtype(torch.float32, scale=True),
        "norm": v2.Normalize(mean, std),
    }
    crop = v2.RandomResizedCrop(config.size, antialias=True, **crop_of(config))
    transform = v2.Compose([crop, v2.RandomHorizontalFlip(), *(known[step] for step in steps)])
    workers: dict[str, Any] = {"num_workers": num_workers(config), "persistent_workers": num_workers(config) > 0}
    data = ImageFolder(workload.root, transform, **options)
    return torch.utils.data.DataLoader(data, config.batch_size, shuffle=True, drop_last=True, **workers)


def _pairs(batches: Iterable[Any]) -> Epoch:
    return lambda _, timed: sum(len(targets) for _, targets in timed(batches))


def loading(workload: Workload) -> Epoch:
    """EffLoop's loader."""
    loader = build_loader(workload.config)
    return lambda number, timed: sum(map(len, timed(loader.epoch(number))))


def _own(engine: str, count: int | None, workload: Workload) -> Epoch:
    workload.config.engine = configs.compose([f"engine={engine}"]).engine
    workload.config.num_workers = workload.config.num_workers if count is None else count
    return loading(workload)


def _effloop_training(workload: Workload) -> Epoch:
    trainer = build_trainer(workload.config, run_dir=workload.scratch / "run")
    trainer.recorder.__enter__()  # until this process ends

    def epoch(number: int, timed: Timed) -> int:
        trainer.progress.samples_seen = 0
        trainer.train_epoch(timed(trainer.train.epoch(number)))
        return len(trainer.train) * trainer.train.global_batch

    return epoch


def _bare_training(workload: Workload) -> Epoch:
    config, device = resolved(workload.config), gpu.find_device(workload.config.device)
    batches = _image_folder(workload, "tensor", "float", "norm")  # as in torchvision's reference scripts
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
        return num_images

    return epoch


def _torchvision(workload: Workload) -> Epoch:
    from torchvision.io import decode_image

    return _pairs(_image_folder(workload, loader=lambda path: decode_image(path, mode="RGB")))


def _pillow(workload: Workload) -> Epoch:
    return _pairs(_image_folder(workload, "tensor"))


def _dali(workload: Workload) -> Epoch:
    """DALI on the CPU: region decoding, resize, flip."""
    dali, fn = (optional_package(f"nvidia.dali{part}", "vs=dali", "effloop[dali]") for part in ("", ".fn"))
    batch, shape = workload.config.batch_size, crop_of(workload.config)
    pipe = dali.Pipeline(batch_size=batch, num_threads=max(1, num_workers(workload.config)), device_id=None)
    with pipe:
        encoded, labels = fn.readers.file(file_root=str(workload.root), random_shuffle=True, name="reader")
        crop = {"random_area": list(shape["scale"]), "random_aspect_ratio": list(shape["ratio"])}
        images = fn.decoders.image_random_crop(encoded, device="cpu", **crop)
        images = fn.resize(images, size=tuple(workload.config.size))
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
    from ffcv.transforms import RandomHorizontalFlip, Squeeze, ToTensor, ToTorchImage
    from ffcv.writer import DatasetWriter
    from torchvision.datasets import ImageFolder

    file = str(workload.scratch / "ffcv.beton")
    side = {"max_resolution": about["max_side"]} if about["max_side"] else {}
    form = {"write_mode": "raw"} if kind == "raw" else {"write_mode": "jpg", "jpeg_quality": quality}
    fields = {"image": RGBImageField(**form, **side), "label": IntField()}
    DatasetWriter(file, fields, num_workers=num_workers(workload.config)).from_indexed_dataset(
        ImageFolder(str(workload.root))
    )
    steps = [
        RandomResizedCropRGBImageDecoder(tuple(workload.config.size), **crop_of(workload.config)),
        RandomHorizontalFlip(),
    ]
    labels = [IntDecoder(), ToTensor(), Squeeze()]
    loader = Loader(
        file,
        batch_size=workload.config.batch_size,
        num_workers=max(1, num_workers(workload.config)),
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
    "effloop": loading,
    **OWN,
    "torchvision": _torchvision,
    "pillow": _pillow,
    "dali": _dali,
    "ffcv": _ffcv,
}
"""Loaders by the names that `vs=` takes; `effloop` is always measured."""


LIBRARIES = {  # Albumentations doesn't antialias
    "albumentations": "augment=albumentations_resize_crop",
    "torchvision": "augment=torchvision_resize_crop",
    "native": "augment=native_resize_crop",
}

Reported = Mapping[str, Mapping[str, float]]
"""Name of a row -> side -> seconds that others published, of another machine, other data and PyTorch's loader."""

_BY_LIBRARY: Reported = {
    "1x1": {"albumentations": 92.40, "torchvision": 137.51},
    "2x1": {"albumentations": 86.51, "torchvision": 124.77},
    "32x1": {"albumentations": 81.40, "torchvision": 119.75},
    "128x1": {"albumentations": 78.49, "torchvision": 111.60},
    "256x1": {"albumentations": 78.16, "torchvision": 106.83},
    "128x2": {"albumentations": 64.92, "torchvision": 86.33},
    "256x2": {"albumentations": 64.89, "torchvision": 88.26},
}
_BY_DEVICE: Reported = {
    "1": {"cpu": 116.25, "gpu": 106.12},
    "2": {"cpu": 223.29, "gpu": 206.41},
    "3": {"cpu": 345.12, "gpu": 310.61},
    "4": {"cpu": 455.33, "gpu": 415.64},
}

GRID = ",".join(_BY_LIBRARY)  # batch sizes and numbers of workers that figures were reported for

_PAIR = re.compile(r"[1-9]\d{0,8}x\d{1,4}", re.ASCII)


def augment(config: Config, repeats: int, *, grid: str = GRID) -> Report:
    """Seconds for an epoch of the train split: with each library, and with the batch operations on either device.

    First with albumentations, torchvision and native, all on the host; then one to four epochs with native, with batch
    operations on the host or on `device`. All use EffLoop's loader, from the encoded image to the
    uint8 batch; each runs in a process of its own, in turns, after a warm-up.
    """
    pairs = dict.fromkeys(grid.split(","))
    if not all(map(_PAIR.fullmatch, pairs)) or len(pairs) < len(grid.split(",")):
        raise ConfigError(f"grid: '{grid}' is not allowed; set BATCHxWORKERS, each once, as in grid=32x1,128x2")
    default = configs.compose()
    for key in ("augment", "image_size"):
        if getattr(config, key) != getattr(default, key):
            have = "resize_crop at 256 pixels and resize_crop_jitter at 224 pixels"
            raise ConfigError(f"{key}: what=augment has its own recipes, {have}; leave out what sets {key}")
    device = gpu.find_device(config.device)
    where = "the CPU, by device=cpu" if gpu.count() else "the CPU, as there is no GPU"
    where = f"{device}, {gpu.name(device)}" if device.type == "cuda" else where
    data = replace(config.data, mean=None, std=None, tail=Tail.wrap)  # a batch may be larger than the split
    config = replace(config, data=data, global_batch=None)
    with closing(build_loader(config)) as loader:  # raises what is wrong before any process starts
        about, images = loader.describe(), len(loader.plan.source)
    config = replace(config, data=replace(data, check=0))
    rows, cpu, own = [], replace(config, device="cpu"), (config.batch_size, num_workers(config))
    libraries = {name: words for name, words in LIBRARIES.items() if name == "native" or find_spec(name)}
    for pair in pairs:
        table, numbers = "resize_crop at 256 pixels, batch size x workers", list(map(int, pair.split("x")))
        sides = {name: _config(cpu, words, 256, *numbers) for name, words in libraries.items()}
        rows += rows_of(table, (pair,), _measured(sides, 1, repeats), images, "torchvision", _BY_LIBRARY)
    sides = {
        side: _config(config, f"augment=native_resize_crop_jitter augment.device={side}", 224, *own)
        for side in ("cpu", "gpu")
    }
    table = f"resize_crop_jitter at 224 pixels by native, batches of {own[0]}, {own[1]} workers; passes"
    found = _measured(sides, len(_BY_DEVICE), repeats)
    rows += rows_of(table, tuple(_BY_DEVICE), found, images, "cpu", _BY_DEVICE)
    notes = [f"{about}; from the encoded image to the uint8 batch", f"device=gpu: batch operations ran on {where}"]
    notes.append("ratio: over torchvision, or over the CPU; reported: by others, of 9,469 images, on their machine")
    if "albumentations" not in libraries:
        notes.append("albumentations is left out, it isn't installed: pip install 'effloop[albumentations]'")
    return Report(
        facts={"what": "augment", "data": about, "images": images, "repeats": repeats, "gpu_ran_on": where}
        | facts(config),
        rows=rows,
        columns=[
            *(Column("name", ""), Column("side", "with"), Column("seconds", "s (least-most)", "{:.2f}", spread=True)),
            *(Column("ms_per_image", "ms per\nimage", "{:.2f}"), Column("cores_used", "cores\nused", "{:.2f}")),
            *(Column("ratio", "ratio", "{:.2f}"), Column("reported_s", "reported\ns", "{:.2f}")),
            Column("reported_ratio", "ratio", "{:.2f}"),
        ],
        title=f"{images:,} images, engine={config.engine.name}; {repeats} times each, in turns",
        notes=notes,
    )


def _config(base: Config, words: str, size: int, batch: int, workers: int) -> Config:
    """The user's config with a recipe, for another batch and number of workers."""
    recipe = configs.compose([*words.split(), f"image_size={size}"]).augment
    return replace(base, augment=recipe, image_size=size, batch_size=batch, num_workers=workers)


def _measured(sides: Mapping[str, Config], passes: int, repeats: int) -> dict[str, list[list[Measurement]]]:
    """Side -> for each repeat, measurements of pass after pass."""

    def turn(epoch: Callable[[], Measurement]) -> list[Measurement]:
        return [epoch() for _ in range(passes)]

    with ExitStack() as stack:
        runs = {}
        for name, config in sides.items():
            build = partial(measured_epochs, partial(loading, Workload(config, Path(), Path())))
            side = apart(f"{config.augment.name} ({name})", build, reuse_memory=config.reuse_memory)
            runs[name] = partial(turn, stack.enter_context(side))
        return in_turns(runs, repeats, warm_up=1)


def rows_of(
    table: str,
    names: Sequence[str],
    turns: Mapping[str, list[list[Measurement]]],
    images: int,
    reference: str,
    reported: Reported,
) -> list[Row]:
    """A row for each number of passes, which `names` has, and side; `reference` is compared with."""
    rows: list[Row] = []
    for passes, name in enumerate(names, start=1):
        others = reported.get(name, {})
        done = {side: [each for turn in found for each in turn[:passes]] for side, found in turns.items()}
        seconds = {
            side: [sum(images / each["images_per_s"] for each in turn[:passes]) for turn in found]
            for side, found in turns.items()
        }
        for side, own in seconds.items():
            row: Row = {"table": table, "name": name, "side": side, "passes": passes, "images": images}
            row |= {"seconds": own, "ms_per_image": [1000 * each / (images * passes) for each in own]}
            row["cores_used"] = statistics.fmean(each["cores_used"] for each in done[side])
            row["ratio"] = statistics.median(own) / statistics.median(seconds[reference])
            if side in others:
                row |= {"reported_s": others[side], "reported_ratio": others[side] / others[reference]}
            rows.append(row)
    return rows

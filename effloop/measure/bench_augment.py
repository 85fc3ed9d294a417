"""`bench what=augment`: what augmentation costs with each library, on the host and on the device."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import torch

from effloop import config as configs
from effloop.assemble.environment import num_workers
from effloop.assemble.loader import build_loader
from effloop.config import Config
from effloop.data.source import Tail
from effloop.errors import ConfigError
from effloop.measure.bench_loader import Epoch, Measurement, Timed, measured_epochs
from effloop.measure.benchmark import Column, Report, Row
from effloop.measure.loops import facts, reloaded
from effloop.measure.turns import apart, in_turns
from effloop.system.hardware import find_device

LIBRARIES = ("albumentations", "torchvision", "native")
"""Albumentations doesn't antialias."""

# Seconds that others published, of another machine, other data and PyTorch's loader.
_BY_LIBRARY = {
    "1x1": {"albumentations": 92.40, "torchvision": 137.51},
    "2x1": {"albumentations": 86.51, "torchvision": 124.77},
    "32x1": {"albumentations": 81.40, "torchvision": 119.75},
    "128x1": {"albumentations": 78.49, "torchvision": 111.60},
    "256x1": {"albumentations": 78.16, "torchvision": 106.83},
    "128x2": {"albumentations": 64.92, "torchvision": 86.33},
    "256x2": {"albumentations": 64.89, "torchvision": 88.26},
}
_BY_DEVICE = {
    "1": {"cpu": 116.25, "gpu": 106.12},
    "2": {"cpu": 223.29, "gpu": 206.41},
    "3": {"cpu": 345.12, "gpu": 310.61},
    "4": {"cpu": 455.33, "gpu": 415.64},
}

GRID = ",".join(_BY_LIBRARY)
"""Batch sizes and numbers of workers that figures were reported for."""

_PAIR = re.compile(r"[1-9]\d{0,8}x\d{1,4}", re.ASCII)


@dataclass(frozen=True)
class Group:
    """Sides that take turns.

    Attributes:
        table: what its rows belong to.
        sides: name -> config.
        reference: the side that the others are compared with.
        names: of its rows: after one pass over the data, after two and so on.
        reported: name of a row -> side -> seconds for `images`.
    """

    table: str
    sides: Mapping[str, Config]
    reference: str
    names: tuple[str, ...]
    reported: Mapping[str, Mapping[str, float]]
    images: int


def augment(config: Config, repeats: int, *, table: str = "both", grid: str = GRID) -> Report:
    """Seconds for an epoch of the train split: with each library, and with the batch operations on either device.

    `libraries`: one epoch with albumentations, torchvision and native, all on the host. `device`: one to four epochs
    with native, with batch operations on the host or on `device`. All use EffLoop's loader, from the
    encoded image to the uint8 batch; each runs in a process of its own, interleaved, after a warm-up epoch. Every
    image is loaded exactly once.

    Raises:
        ConfigError: an option isn't allowed, or a recipe can't be built.
    """
    pairs = dict.fromkeys(grid.split(","))
    if not all(map(_PAIR.fullmatch, pairs)) or len(pairs) < len(grid.split(",")):
        raise ConfigError(f"grid: '{grid}' is not allowed; set BATCHxWORKERS, each once, as in grid=32x1,128x2")
    default = configs.compose()
    for key in ("augment", "image_size"):
        if getattr(config, key) != getattr(default, key):
            have = "resize_crop at 256 pixels and resize_crop_jitter at 224 pixels"
            raise ConfigError(f"{key}: what=augment has its own recipes, {have}; leave out what sets {key}")
    device = find_device(config.device)
    gpu = "the CPU, by device=cpu" if torch.cuda.is_available() else "the CPU, as there is no GPU"
    gpu = f"{device}, {torch.cuda.get_device_name(device)}" if device.type == "cuda" else gpu
    config.data.mean = config.data.std = None
    config.data.tail = Tail.wrap  # a batch may be larger than the split; `_build_epoch` pads it
    names = [name for name in LIBRARIES if find_spec("albumentations") or name != "albumentations"]
    groups = _by_library(config, names, pairs) if table != "device" else []
    groups += _by_device(config) if table != "libraries" else []
    for first in {group.table: group for group in groups}.values():
        for side in first.sides.values():
            with closing(build_loader(side)) as loader:  # raises what is wrong before any process starts
                data, images = loader.describe(), len(loader.plan.source)
    rows = [row for group in groups for row in rows_of(group, _measure(group, repeats, images), images)]
    notes = [f"{data}; from the encoded image to the uint8 batch", f"device=gpu: batch operations ran on {gpu}"]
    notes += ["ratio: over torchvision, or over the CPU; reported: by others, of their machine and loader"]
    if "albumentations" not in names:
        notes.append("albumentations is left out, it isn't installed: pip install 'effloop[albumentations]'")
    about = {"what": "augment", "data": data, "images": images, "repeats": repeats, "gpu_ran_on": gpu}
    return Report(
        facts=about | facts(config),
        rows=rows,
        columns=[
            *(Column("name", ""), Column("side", "with"), Column("seconds", "s (least-most)", "{:.2f}", spread=True)),
            *(Column("ms_per_image", "ms per\nimage", "{:.2f}"), Column("cores_used", "cores\nused", "{:.2f}")),
            *(Column("ratio", "ratio", "{:.2f}"), Column("reported_s", "reported\ns", "{:.2f}")),
            *(Column("reported_ms_per_image", "ms per\nimage", "{:.2f}"), Column("reported_ratio", "ratio", "{:.2f}")),
        ],
        title=f"{images:,} images, engine={config.engine.name}; {repeats} times each, in turns",
        notes=notes,
        drawn={"ms_per_image": "ms per image"},
        groups=("name", "side"),
    )


def _by_library(config: Config, names: Sequence[str], pairs: Iterable[str]) -> list[Group]:
    groups = []
    for pair in pairs:
        batch, workers = map(int, pair.split("x"))
        sides = {name: _config(config, name, "resize_crop", 256, "cpu", batch, workers) for name in names}
        title = "resize_crop at 256 pixels, batch size x workers"
        groups.append(Group(title, sides, "torchvision", (pair,), _BY_LIBRARY, 9469))
    return groups


def _by_device(config: Config) -> list[Group]:
    own = config.batch_size, num_workers(config)
    sides = {each: _config(config, "native", "resize_crop_jitter", 224, each, *own) for each in ("cpu", "gpu")}
    title = f"resize_crop_jitter at 224 pixels, batches of {own[0]}, {own[1]} workers; passes"
    return [Group(title, sides, "cpu", tuple(_BY_DEVICE), _BY_DEVICE, 9467)]


def _config(base: Config, library: str, recipe: str, size: int, device: str, batch: int, workers: int) -> Config:
    """The user's config, with a recipe."""
    words = [f"augment={library}_{recipe}", f"augment.device={device}", f"image_size={size}"]
    return replace(
        base,
        augment=_recipe(*words),
        image_size=size,
        batch_size=batch,
        num_workers=workers,
        device="cpu" if recipe == "resize_crop" else base.device,
    )


@cache
def _recipe(*words: str) -> Any:
    return configs.compose(words).augment  # takes 0.1 s


def _measure(group: Group, repeats: int, images: int) -> dict[str, list[list[Measurement]]]:
    """Side -> for each repeat, measurements of pass after pass."""

    def passes(epoch: Callable[[], Measurement]) -> list[Measurement]:
        return [epoch() for _ in group.names]

    with ExitStack() as stack:
        runs = {}
        for name, config in group.sides.items():
            build = partial(measured_epochs, partial(_build_epoch, config, images))
            side = apart(f"{config.augment.name} ({name})", build, reuse_memory=config.reuse_memory)
            runs[name] = partial(passes, stack.enter_context(side))
        return in_turns(runs, repeats)


def _build_epoch(config: Config, images: int) -> Epoch:
    """Epochs of the train split; a warm-up epoch is run at once."""
    config.data.check = 0  # done
    whole = build_loader(config)
    whole.close()
    loader = reloaded(whole, config, num_workers(config), images, Tail.pad)

    def epoch(number: int, timed: Timed) -> int:
        for _ in timed(loader.epoch(number)):
            pass
        if loader.transfer.device.type == "cuda":
            torch.cuda.synchronize(loader.transfer.device)
        return images

    epoch(0, iter)
    return epoch


def rows_of(group: Group, rounds: Mapping[str, list[list[Measurement]]], images: int) -> list[Row]:
    """Rows from interleaved measurements: one for each number of passes and side."""
    rows: list[Row] = []
    for passes, name in enumerate(group.names, start=1):
        reported = group.reported.get(name, {})
        done = {side: [turn[:passes] for turn in turns] for side, turns in rounds.items()}
        seconds = {
            side: [sum(images / each["images_per_s"] for each in turn) for turn in turns]
            for side, turns in done.items()
        }
        for side, own in seconds.items():
            row: Row = {"table": group.table, "name": name, "side": side, "passes": passes, "images": images}
            row |= {"seconds": own, "ms_per_image": [1000 * each / (images * passes) for each in own]}
            row["cores_used"] = statistics.fmean(each["cores_used"] for turn in done[side] for each in turn)
            row["ratio"] = statistics.median(own) / statistics.median(seconds[group.reference])
            if side in reported:
                row |= {"reported_s": reported[side], "reported_ratio": reported[side] / reported[group.reference]}
                row["reported_ms_per_image"] = 1000 * reported[side] / (group.images * passes)
            rows.append(row)
    return rows

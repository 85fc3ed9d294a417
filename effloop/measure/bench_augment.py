"""`bench what=augment`: what augmentation costs with each library, on the host and on the device."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch

from effloop import config as configs
from effloop.assemble.environment import num_workers
from effloop.assemble.loader import build_loader
from effloop.config import Config
from effloop.data.source import Tail
from effloop.errors import ConfigError
from effloop.measure.bench_loader import Measurement, Workload, loading, measured_epochs
from effloop.measure.benchmark import Column, Report, Row
from effloop.measure.loops import facts
from effloop.measure.turns import apart, in_turns
from effloop.system.hardware import find_device

LIBRARIES = {
    "albumentations": "augment=albumentations_resize_crop",
    "torchvision": "augment=torchvision_resize_crop",
    "native": "augment=native_resize_crop",
}
"""Albumentations doesn't antialias."""

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

GRID = ",".join(_BY_LIBRARY)
"""Batch sizes and numbers of workers that figures were reported for."""

_PAIR = re.compile(r"[1-9]\d{0,8}x\d{1,4}", re.ASCII)


def augment(config: Config, repeats: int, *, grid: str = GRID) -> Report:
    """Seconds for an epoch of the train split: with each library, and with the batch operations on either device.

    First with albumentations, torchvision and native, all on the host; then one to four epochs with native, with batch
    operations on the host or on `device`. All use EffLoop's loader, from the encoded image to the
    uint8 batch; each runs in a process of its own, in turns, after a warm-up.

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
    data = replace(config.data, mean=None, std=None, tail=Tail.wrap)  # a batch may be larger than the split
    config = replace(config, data=data)
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
    notes = [f"{about}; from the encoded image to the uint8 batch", f"device=gpu: batch operations ran on {gpu}"]
    notes += [
        "ratio: over torchvision, or over the CPU; reported: of 9,469 images, by others, of their machine and loader"
    ]
    if "albumentations" not in libraries:
        notes.append("albumentations is left out, it isn't installed: pip install 'effloop[albumentations]'")
    return Report(
        facts={"what": "augment", "data": about, "images": images, "repeats": repeats, "gpu_ran_on": gpu}
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

"""`bench what=augment`: what augmentation costs with each library, on the host and on the device."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from effloop import config as configs
from effloop.assemble.loader import build_loader
from effloop.assemble.resolve import num_workers
from effloop.bench.augment_tables import TABLES, Case, print_tables, table_rows
from effloop.bench.baselines import EpochRunner, Workload
from effloop.bench.harness import MeasureEpoch, Measurement, epoch_process
from effloop.bench.interleave import interleave
from effloop.config import Config
from effloop.data.engine import engines
from effloop.data.loader import Loader
from effloop.data.source import Tail
from effloop.errors import ConfigError
from effloop.registry import choices
from effloop.system.hardware import available_cores, find_device

LIBRARIES = {
    "albumentations": ("cpu",),
    "torchvision": ("cpu", "gpu"),
    "native": ("cpu", "gpu"),
    "native fast": ("cpu",),
}
"""Library -> where its recipes can run. `fast` doesn't antialias, and Albumentations doesn't either."""

_OPTIONAL = ("albumentations",)
"""Libraries that aren't dependencies; each is an extra of its name."""


def augment(config: Config, repeats: int, *, table: str, limit: str, grid: str) -> dict[str, Any]:
    """Seconds for an epoch of the train split: with each library, and with the batch operations on either device.

    `libraries`: one epoch with albumentations, torchvision and native, all on the host. `device`: one to four epochs
    with torchvision and native, with batch operations on the host or on `device`. All use EffLoop's loader, from the
    encoded image to the uint8 batch; each runs in a process of its own, interleaved, after a warm-up epoch. Every
    image is loaded exactly once.

    Args:
        config: whose train split and engine are measured; `device` uses its batch size and workers, too.
        repeats: measurements of each.
        table: `libraries`, `device` or `both`.
        limit: only the first so many images; `all` for all.
        grid: for `libraries`, BATCHxWORKERS with commas between.

    Raises:
        ConfigError: an option isn't allowed, or a recipe can't be built.
    """
    if table not in ("both", *TABLES):
        raise ConfigError(f"table: no table '{table}'; {choices(table, ['both', *TABLES])}")
    count, pairs = _parse_limit(limit), _parse_grid(grid)
    _refuse_recipe(config)
    gpu = _describe_gpu(config.device)
    config.data.mean = config.data.std = None
    config.data.tail = Tail.wrap  # a batch may be larger than the split; `_truncated_loader` pads it
    groups = _groups(config, table, pairs)
    data, images = _check_recipes(config, itertools.chain(*groups))
    images = min(images, count or images)
    rows = [row for group in groups for row in table_rows(group, _measure(config, group, repeats, images), images)]
    facts = {"data": data, "images": images, "repeats": repeats, "gpu_ran_on": gpu}
    parts = {"engine": config.engine.name, "decode": config.decode.name, "cores": available_cores()}
    result = {"what": "augment", **facts, **parts, "rows": rows}
    print_tables(result)
    return result


def _groups(config: Config, table: str, pairs: list[tuple[int, int]]) -> list[list[Case]]:
    """Cases that are interleaved with each other; without libraries that aren't installed."""
    names = [name for name in LIBRARIES if _installed(name)]
    groups: list[list[Case]] = []
    if table != "device":
        groups += [[Case("libraries", name, "cpu", *pair) for name in names] for pair in pairs]
    if table != "libraries":
        own = (config.batch_size, num_workers(config))
        both = [name for name in names if "gpu" in LIBRARIES[name]]
        groups += [[Case("device", name, device, *own) for device in LIBRARIES[name]] for name in both]
    return groups


def _parse_limit(word: str) -> int | None:
    if word == "all":
        return None
    if not (word.isascii() and word.isdigit()) or int(word) < 1:
        raise ConfigError(f"limit: '{word}' is not allowed; set a whole number above 0, or all")
    return int(word)


def _parse_grid(words: str) -> list[tuple[int, int]]:
    found = [re.fullmatch(r"([1-9]\d{0,8})x(\d{1,4})", word, re.ASCII) for word in words.split(",")]
    pairs = dict.fromkeys((int(pair[1]), int(pair[2])) for pair in found if pair)
    if len(pairs) != len(found):
        raise ConfigError(f"grid: '{words}' is not allowed; set BATCHxWORKERS, each once, as in grid=32x1,128x2")
    return list(pairs)


def _refuse_recipe(config: Config) -> None:
    """Refuse to ignore settings of the recipe.

    Raises:
        ConfigError: a recipe or a size has been set.
    """
    default = configs.compose()
    for key in ("augment", "image_size"):
        if getattr(config, key) != getattr(default, key):
            have = " and ".join(f"{spec.recipe} at {spec.image_size} pixels" for spec in TABLES.values())
            raise ConfigError(f"{key}: what=augment has its own recipes, {have}; leave out what sets {key}")


def _installed(library: str) -> bool:
    """Whether a library is installed, without the second that importing it takes; prints a line if not."""
    installed = library not in _OPTIONAL or find_spec(library) is not None
    if not installed:
        print(f"{library} is left out, it isn't installed: pip install 'effloop[{library}]'")
    return installed


def _check_recipes(config: Config, cases: Iterable[Case]) -> tuple[str, int]:
    """Build each recipe once before any process starts: errors in it or in the data are raised here.

    Returns:
        The data in words, and its number of images.
    """
    for case in {(case.table, case.library, case.device): case for case in cases}.values():
        with closing(build_loader(_config(config, case))) as loader:
            found = loader.describe(), len(loader.plan.source)
    config.data.check = 0  # once is enough
    return found


def _config(base: Config, case: Case) -> Config:
    """The user's config, with a case's recipe."""
    library, _, resize = case.library.partition(" ")
    words = [f"augment={library}_{case.spec.recipe}", f"augment.device={case.device}"]
    words += [f"augment.resize={resize}"] if resize else []
    return replace(
        base,
        augment=configs.compose([*words, f"image_size={case.spec.image_size}"]).augment,
        image_size=case.spec.image_size,
        batch_size=case.batch_size,
        num_workers=case.num_workers,
        device="cpu" if case.table == "libraries" else base.device,
    )


def _describe_gpu(name: str) -> str:
    """What `augment.device=gpu` means here."""
    device = find_device(name)
    if device.type == "cuda":
        return f"{device}, {torch.cuda.get_device_name(device)}"
    return "the CPU: device=cpu says so" if torch.cuda.is_available() else "the CPU: there is no GPU here"


def _measure(config: Config, group: list[Case], repeats: int, images: int) -> dict[str, list[list[Measurement]]]:
    """Label of a case -> for each repeat, measurements of pass after pass."""
    with ExitStack() as stack:
        runs = {}
        for case in group:
            workload, build = Workload(_config(config, case), Path(), Path()), partial(_build_epoch, images=images)
            epoch = stack.enter_context(epoch_process(f"{case.library} on the {case.device}", build, workload))
            runs[case.label] = partial(_passes, epoch, case.spec.passes)
        return interleave(runs, repeats, warm_up=0)


def _passes(epoch: MeasureEpoch, count: int) -> list[Measurement]:
    return [epoch() for _ in range(count)]


def _build_epoch(workload: Workload, images: int) -> EpochRunner:
    """An epoch of the first `images` of the train split; a warm-up epoch is run at once."""
    loader, numbers = _truncated_loader(workload.config, images), itertools.count()

    def epoch() -> tuple[int, float]:
        for _ in loader.epoch(next(numbers)):
            pass
        if loader.transfer.device.type == "cuda":
            torch.cuda.synchronize(loader.transfer.device)
        return images, 0.0

    epoch()
    return epoch


def _truncated_loader(config: Config, images: int) -> Loader:
    """The train split's loader, of the first images only."""
    whole = build_loader(config)
    whole.close()
    plan = replace(whole.plan, order=replace(whole.plan.order, num_samples=images, tail=Tail.pad))
    pin_memory = whole.transfer.device.type == "cuda"
    engine = engines.build(config.engine, plan, num_workers=num_workers(config), pin_memory=pin_memory)
    return Loader(plan, engine, whole.transfer)

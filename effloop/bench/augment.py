"""`bench what=augment`: what augmenting costs by each library, and on the host or the device."""

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
from effloop.bench.augment_tables import KINDS, Case, rows_of, show
from effloop.bench.baselines import Epoch, Work, num_workers
from effloop.bench.harness import Figures, Row, served
from effloop.bench.interleave import take_turns
from effloop.build.loader import build_loader
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
"""What there are recipes of, and where they can run. `fast` doesn't antialias, and Albumentations doesn't either."""

_OPTIONAL = ("albumentations",)
"""Libraries that don't come along; each has an extra of its name."""


def augment(config: Config, repeats: int, *, table: str, limit: str, grid: str) -> dict[str, Any]:
    """Seconds for going through the train split: by each library, and with the batch operations on either device.

    `libraries`: one epoch by albumentations, torchvision and native, all on the host. `device`: one to four epochs
    by torchvision and native, what can be done to batches on the host or on `device`. Everything goes through this
    package's loader, from the encoded image to the uint8 batch; each in a process of its own, in turns, after one
    epoch to warm up. No image is left out, and none comes twice.

    Args:
        config: whose train split and engine are measured; `device` takes its batch size and workers, too.
        repeats: how often each.
        table: `libraries`, `device` or `both`.
        limit: go through the first so many images only; `all` for all.
        grid: for `libraries`, BATCHxWORKERS with commas between.

    Raises:
        ConfigError: an option can't be taken, or a recipe can't be built.
    """
    if table not in ("both", *KINDS):
        raise ConfigError(f"table: no table '{table}'; {choices(table, ['both', *KINDS])}")
    count, pairs = _limit(limit), _grid(grid)
    _refuse_recipe(config)
    place = _place(config.device)
    config.data.mean = config.data.std = None
    config.data.tail = Tail.wrap  # a batch may be larger than the split; `_first_of` pads it
    groups = _groups(config, table, pairs)
    about, images = _first_look(config, itertools.chain(*groups))
    images = min(images, count or images)
    rows = [row for group in groups for row in rows_of(group, _measured(config, group, repeats, images), images)]
    facts = {"data": about, "images": images, "repeats": repeats, "gpu_ran_on": place}
    parts = {"engine": config.engine.name, "decode": config.decode.name, "cores": available_cores()}
    result = {"what": "augment", **facts, **parts, "rows": rows}
    show(result)
    return result


def _groups(config: Config, table: str, pairs: list[tuple[int, int]]) -> list[list[Case]]:
    """Cases that take turns with each other; none of a library that isn't there."""
    names = [name for name in LIBRARIES if _installed(name)]
    groups: list[list[Case]] = []
    if table != "device":
        groups += [[Case("libraries", name, "cpu", *pair) for name in names] for pair in pairs]
    if table != "libraries":
        own = (config.batch_size, num_workers(config))
        both = [name for name in names if "gpu" in LIBRARIES[name]]
        groups += [[Case("device", name, device, *own) for device in LIBRARIES[name]] for name in both]
    return groups


def _limit(word: str) -> int | None:
    if word == "all":
        return None
    if not (word.isascii() and word.isdigit()) or int(word) < 1:
        raise ConfigError(f"limit: '{word}' is not allowed; set a whole number above 0, or all")
    return int(word)


def _grid(words: str) -> list[tuple[int, int]]:
    found = [re.fullmatch(r"([1-9]\d{0,8})x(\d{1,4})", word, re.ASCII) for word in words.split(",")]
    pairs = dict.fromkeys((int(pair[1]), int(pair[2])) for pair in found if pair)
    if len(pairs) != len(found):
        raise ConfigError(f"grid: '{words}' is not allowed; set BATCHxWORKERS, each once, as in grid=32x1,128x2")
    return list(pairs)


def _refuse_recipe(config: Config) -> None:
    """Refuse what would be dropped without a word.

    Raises:
        ConfigError: the recipe or the size has been chosen.
    """
    default = configs.compose()
    for key in ("augment", "image_size"):
        if getattr(config, key) != getattr(default, key):
            have = " and ".join(f"{kind.recipe} at {kind.image_size} pixels" for kind in KINDS.values())
            raise ConfigError(f"{key}: what=augment has its own recipes, {have}; leave out what sets {key}")


def _installed(library: str) -> bool:
    """Whether a library is there, without the second that importing it takes; says so if not."""
    there = library not in _OPTIONAL or find_spec(library) is not None
    if not there:
        print(f"{library} is left out, it isn't installed: pip install 'effloop[{library}]'")
    return there


def _first_look(config: Config, cases: Iterable[Case]) -> tuple[str, int]:
    """Build each recipe once before any process starts: that says what is wrong with it or with the data.

    Returns:
        What the data is, and how many images.
    """
    for case in {(case.table, case.library, case.device): case for case in cases}.values():
        with closing(build_loader(_config(config, case))) as loader:
            found = loader.describe(), len(loader.plan.source)
    config.data.check = 0  # enough
    return found


def _config(base: Config, case: Case) -> Config:
    """The user's config, with a case's recipe."""
    library, _, resize = case.library.partition(" ")
    words = [f"augment={library}_{case.kind.recipe}", f"augment.device={case.device}"]
    words += [f"augment.resize={resize}"] if resize else []
    return replace(
        base,
        augment=configs.compose([*words, f"image_size={case.kind.image_size}"]).augment,
        image_size=case.kind.image_size,
        batch_size=case.batch_size,
        num_workers=case.num_workers,
        device="cpu" if case.table == "libraries" else base.device,
    )


def _place(name: str) -> str:
    """What `augment.device=gpu` means here."""
    device = find_device(name)
    if device.type == "cuda":
        return f"{device}, {torch.cuda.get_device_name(device)}"
    return "the CPU: device=cpu says so" if torch.cuda.is_available() else "the CPU: there is no GPU here"


def _measured(config: Config, group: list[Case], repeats: int, images: int) -> dict[str, list[list[Figures]]]:
    """Label of a case -> for each turn, figures of pass after pass."""
    with ExitStack() as stack:
        runs = {}
        for case in group:
            work, build = Work(_config(config, case), Path(), Path()), partial(_epochs, images=images)
            row = stack.enter_context(served(f"{case.library} on the {case.device}", build, work))
            runs[case.label] = partial(_passes, row, case.kind.passes)
        return take_turns(runs, repeats, warm_up=0)


def _passes(row: Row, count: int) -> list[Figures]:
    return [row() for _ in range(count)]


def _epochs(work: Work, images: int) -> Epoch:
    """Through the first `images` of the train split: once to warm up, then whenever it is called."""
    loader, numbers = _first_of(work.config, images), itertools.count()

    def epoch() -> tuple[int, float]:
        for _ in loader.epoch(next(numbers)):
            pass
        if loader.transfer.device.type == "cuda":
            torch.cuda.synchronize(loader.transfer.device)
        return images, 0.0

    epoch()
    return epoch


def _first_of(config: Config, images: int) -> Loader:
    """The train split's loader, cut short."""
    whole = build_loader(config)
    whole.close()
    plan = replace(whole.plan, order=replace(whole.plan.order, num_samples=images, tail=Tail.pad))
    pin_memory = whole.transfer.device.type == "cuda"
    engine = engines.build(config.engine, plan, num_workers=num_workers(config), pin_memory=pin_memory)
    return Loader(plan, engine, whole.transfer)

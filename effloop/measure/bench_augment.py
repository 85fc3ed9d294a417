"""`bench what=augment`: what augmentation costs with each library, on the host and on the device."""

from __future__ import annotations

import itertools
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from effloop import config as configs
from effloop.assemble.loader import build_loader
from effloop.assemble.resolve import num_workers
from effloop.config import Config
from effloop.data.source import Tail
from effloop.errors import ConfigError
from effloop.measure.bench_loader import Epoch, Measurement, Timed, measured_epochs
from effloop.measure.loops import reloaded
from effloop.measure.turns import apart, in_turns, print_table, spread
from effloop.report.figures import Bar, BarPanel, plot_bars, write_csv
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

Reported = Mapping[tuple[int, ...], tuple[float, float]]
"""(batch size, workers) or (passes,) -> seconds of two rows."""


@dataclass(frozen=True)
class TableSpec:
    """What one of the tables compares.

    Attributes:
        recipe: of augmentation; each library has one of this name.
        image_size: height and width of its output.
        passes: over the data, one after the other.
        labels: of the two rows that figures were reported for.
        images: in the data that they were reported for.
        reported: the two rows' seconds, from another machine, other data and PyTorch's loader.
    """

    recipe: str
    image_size: int
    passes: int
    labels: tuple[str, str]
    images: int
    reported: Reported


_BY_LIBRARY: Reported = {
    (1, 1): (92.40, 137.51),
    (2, 1): (86.51, 124.77),
    (32, 1): (81.40, 119.75),
    (128, 1): (78.49, 111.60),
    (256, 1): (78.16, 106.83),
    (128, 2): (64.92, 86.33),
    (256, 2): (64.89, 88.26),
}
_BY_DEVICE: Reported = {(1,): (116.25, 106.12), (2,): (223.29, 206.41), (3,): (345.12, 310.61), (4,): (455.33, 415.64)}

TABLES = {
    "libraries": TableSpec("resize_crop", 256, 1, ("albumentations", "torchvision"), 9469, _BY_LIBRARY),
    "device": TableSpec("resize_crop_jitter", 224, 4, ("cpu", "gpu"), 9467, _BY_DEVICE),
}
"""By the names that `table=` takes."""

GRID = ",".join(f"{batch}x{workers}" for batch, workers in _BY_LIBRARY)
"""Batch sizes and numbers of workers that figures were reported for."""


@dataclass(frozen=True)
class Case:
    """What one process measures.

    Attributes:
        table: a name of `TABLES`.
        library: whose operations augment.
        device: where operations on batches run.
        batch_size, num_workers: of the loader.
    """

    table: str
    library: str
    device: str
    batch_size: int
    num_workers: int

    @property
    def label(self) -> str:
        """What distinguishes it from the cases it is compared with."""
        return self.library if self.table == "libraries" else self.device


def augment(
    config: Config, repeats: int, *, table: str = "both", limit: str | int = "all", grid: str = GRID
) -> dict[str, Any]:
    """Seconds for an epoch of the train split: with each library, and with the batch operations on either device.

    `libraries`: one epoch with albumentations, torchvision and native, all on the host. `device`: one to four epochs
    with torchvision and native, with batch operations on the host or on `device`. All use EffLoop's loader, from the
    encoded image to the uint8 batch; each runs in a process of its own, interleaved, after a warm-up epoch. Every
    image is loaded exactly once.

    Raises:
        ConfigError: an option isn't allowed, or a recipe can't be built.
    """
    pairs, default = _parse_grid(grid), configs.compose()
    for key in ("augment", "image_size"):
        if getattr(config, key) != getattr(default, key):
            have = " and ".join(f"{spec.recipe} at {spec.image_size} pixels" for spec in TABLES.values())
            raise ConfigError(f"{key}: what=augment has its own recipes, {have}; leave out what sets {key}")
    device = find_device(config.device)
    gpu = "the CPU, by device=cpu" if torch.cuda.is_available() else "the CPU, as there is no GPU"
    gpu = f"{device}, {torch.cuda.get_device_name(device)}" if device.type == "cuda" else gpu
    config.data.mean = config.data.std = None
    config.data.tail = Tail.wrap  # a batch may be larger than the split; `_build_epoch` pads it
    groups = _groups(config, table, pairs)
    data, images = _check_recipes(config, itertools.chain(*groups))
    images = images if limit == "all" else min(images, int(limit))
    rows = [row for group in groups for row in table_rows(group, _measure(config, group, repeats, images), images)]
    facts = {"data": data, "images": images, "repeats": repeats, "gpu_ran_on": gpu}
    parts = {"engine": config.engine.name, "decode": config.decode.name, "cores": available_cores()}
    result = {"what": "augment", **facts, **parts, "rows": rows}
    _print(result)
    return result


def _groups(config: Config, table: str, pairs: Iterable[tuple[int, int]]) -> list[list[Case]]:
    """Cases that are interleaved with each other; without libraries that aren't installed."""
    names = []
    for name in LIBRARIES:
        if name in _OPTIONAL and find_spec(name) is None:  # importing it would take a second
            print(f"{name} is left out, it isn't installed: pip install 'effloop[{name}]'")
        else:
            names.append(name)
    groups: list[list[Case]] = []
    if table != "device":
        groups += [[Case("libraries", name, "cpu", *pair) for name in names] for pair in pairs]
    if table != "libraries":
        own = (config.batch_size, num_workers(config))
        both = [name for name in names if "gpu" in LIBRARIES[name]]
        groups += [[Case("device", name, device, *own) for device in LIBRARIES[name]] for name in both]
    return groups


def _parse_grid(words: str) -> list[tuple[int, int]]:
    found = [re.fullmatch(r"([1-9]\d{0,8})x(\d{1,4})", word, re.ASCII) for word in words.split(",")]
    pairs = dict.fromkeys((int(pair[1]), int(pair[2])) for pair in found if pair)
    if len(pairs) != len(found):
        raise ConfigError(f"grid: '{words}' is not allowed; set BATCHxWORKERS, each once, as in grid=32x1,128x2")
    return list(pairs)


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
    spec = TABLES[case.table]
    words = [f"augment={library}_{spec.recipe}", f"augment.device={case.device}", f"image_size={spec.image_size}"]
    words += [f"augment.resize={resize}"] if resize else []
    return replace(
        base,
        augment=configs.compose(words).augment,
        image_size=spec.image_size,
        batch_size=case.batch_size,
        num_workers=case.num_workers,
        device="cpu" if case.table == "libraries" else base.device,
    )


def _measure(config: Config, group: list[Case], repeats: int, images: int) -> dict[str, list[list[Measurement]]]:
    """Label of a case -> for each repeat, measurements of pass after pass."""

    def passes(epoch: Callable[[], Measurement], count: int) -> list[Measurement]:
        return [epoch() for _ in range(count)]

    with ExitStack() as stack:
        runs = {}
        for case in group:
            own = _config(config, case)
            build = partial(measured_epochs, partial(_build_epoch, own, images))
            epoch = stack.enter_context(
                apart(f"{case.library} on the {case.device}", build, reuse_memory=own.reuse_memory)
            )
            runs[case.label] = partial(passes, epoch, TABLES[case.table].passes)
        return in_turns(runs, repeats)


def _build_epoch(config: Config, images: int) -> Epoch:
    """Epochs of the first `images` of the train split; a warm-up epoch is run at once."""
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


def table_rows(
    group: Sequence[Case], rounds: Mapping[str, list[list[Measurement]]], images: int
) -> list[dict[str, Any]]:
    """Rows of a table from interleaved measurements: one for each case and number of passes."""
    rows, spec = [], TABLES[group[0].table]
    for passes, case in itertools.product(range(1, spec.passes + 1), group):
        wall = {
            label: [sum(images / each["per_s"] for each in found[:passes]) for found in turns]
            for label, turns in rounds.items()
        }
        cpu = [sum(images / e["per_s"] * e["cores_used"] for e in found[:passes]) for found in rounds[case.label]]
        seconds = wall[case.label]
        middle, least, most = spread(seconds)
        by_device = case.table == "device"
        key = (passes,) if by_device else (case.batch_size, case.num_workers)
        reported = dict(zip(spec.labels, spec.reported.get(key, ()), strict=False))
        reported_s = reported.get(case.label)
        of, over = ("cpu", case.label) if by_device else (case.label, "torchvision")
        rows.append(
            {
                **{"table": case.table, "recipe": spec.recipe, "library": case.library, "device": case.device},
                **{"batch_size": case.batch_size, "num_workers": case.num_workers, "passes": passes, "images": images},
                **{"median_s": middle, "least_s": least, "most_s": most},
                "ms_per_image": 1000 * middle / (images * passes),
                "cores_used": statistics.median(a / b for a, b in zip(cpu, seconds, strict=True)),
                "ratio_of": f"{of}/{over}",
                "ratio": statistics.median(wall[of]) / statistics.median(wall[over]),
                "reported_s": reported_s,
                "reported_ms_per_image": reported_s and 1000 * reported_s / (spec.images * passes),
                "reported_ratio": reported[of] / reported[over] if {of, over} <= reported.keys() else None,
                "seconds": seconds,
            }
        )
    return rows


_FIRST = {"libraries": ("batch_size", "num_workers", "library"), "device": ("library", "passes", "device")}
_NUMBERS = ("median_s", "least_s", "most_s", "ms_per_image", "cores_used", "ratio")
_REPORTED = ("reported_s", "reported_ms_per_image", "reported_ratio")
_REPORTED_HEADINGS = ("reported\ns", "reported\nms/image", "reported\nratio")


def _print(result: Mapping[str, Any]) -> None:
    for name, rows in _by_table(result).items():
        spec, first, keys = TABLES[name], rows[0], _FIRST[name]
        title = f"{spec.recipe} at {spec.image_size} pixels, {result['images']:,} images, engine={result['engine']}"
        if name == "device":
            title += f", batches of {first['batch_size']}, {first['num_workers']} workers\n{_where(result)}"
        ratio = f"{spec.labels[0]}\n/ {spec.labels[1]}" if name == "device" else "over\ntorchvision"
        headings = ["s", "least", "most", "ms per\nimage", "cores\nused", ratio, *_REPORTED_HEADINGS]
        cells = [
            [*(str(row[key]) for key in keys)]
            + ["" if row[key] is None else f"{row[key]:.2f}" for key in (*_NUMBERS, *_REPORTED)]
            for row in rows
        ]
        print_table(
            [*(key.replace("_", "\n") for key in keys), *headings],
            cells,
            left=("library", "device"),
            dim=_REPORTED_HEADINGS,
            sections=[i for i, row in enumerate(rows[:-1]) if any(row[key] != rows[i + 1][key] for key in keys[:2])],
            min_width=110,
            title=f"{title}\n{result['repeats']} times each, in turns",
            padding=(0, 1, 0, 0),
        )
    print(f"{result['data']}; medians; from the encoded image to the uint8 batch")
    print("reported: by others, of their machine and loader; compare the ratios")


def _where(result: Mapping[str, Any]) -> str:
    return f"device=gpu: batch operations ran on {result['gpu_ran_on']}"


def _by_table(result: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    tables = dict.fromkeys(row["table"] for row in result["rows"])
    return {table: [row for row in result["rows"] if row["table"] == table] for table in tables}


def write_augment_files(result: Mapping[str, Any], out: Path) -> None:
    """Write a result as CSV and as a plot, beside its JSON file `out`: a panel for the libraries, and one for each
    library that has been on both devices.
    """
    shared = {key: result[key] for key in ("engine", "repeats", "gpu_ran_on")}
    rows = [{**{key: value for key, value in row.items() if key != "seconds"}, **shared} for row in result["rows"]]
    write_csv(out.with_suffix(".csv"), rows)
    panels = []
    for name, rows in _by_table(result).items():
        recipe, by_device = TABLES[name].recipe, name == "device"
        bars: dict[str, list[Bar]] = {}  # by title of a panel
        for row in rows:
            library, share = row["library"], row["ms_per_image"] / row["median_s"]
            group = str(row["passes"]) if by_device else f"{row['batch_size']} x {row['num_workers']}"
            ms = (share * row["median_s"], share * row["least_s"], share * row["most_s"])
            title = f"{recipe} by {library}\n{_where(result)}" if by_device else f"{recipe} by library"
            series = row["device"] if by_device else library
            bars.setdefault(title, []).append(Bar(group, series, ms, row["reported_ms_per_image"]))
        axis = "passes" if by_device else "batch size x workers"
        panels += [BarPanel(title, "ms per image", axis, each, "reported by others") for title, each in bars.items()]
    plot_bars(out.with_suffix(".png"), panels)

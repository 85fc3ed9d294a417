"""`bench what=loader`: how fast batches come, beside what people would use instead."""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from effloop.build import build_loader
from effloop.config import Config
from effloop.errors import ConfigError, optional_package
from effloop.hardware import available_cores
from effloop.measure.turns import take_turns
from effloop.registry import choices

Epoch = Callable[[], tuple[int, float]]
"""Goes through the data once; returns images and seconds waited for batches."""


def loader(config: Config, repeats: int, *, vs: str, folder: str) -> dict[str, Any]:
    """Images/s of the configured loader and of its peers, in turns; from the index to the batch in the loop's hands.

    The work is the same for all: random-resized-crop to `image_size`, antialiased, and flip; uint8 batches of
    `batch_size`, but for `pillow`, which normalises to float32 as in torchvision's own reference.

    Args:
        config: whose train split and engine are measured.
        repeats: epochs of each, after one to warm up.
        vs: peers by name, with commas between; `none` for none.
        folder: the photographs for the peers, ROOT/SPLIT/CLASS/*; empty is `data.root`.

    Raises:
        ConfigError: no such peer, or a package or folder that it needs isn't there.
    """
    wanted = [] if vs == "none" else vs.split(",")
    for name in wanted:
        if name not in PEERS:
            raise ConfigError(f"vs: no peer '{name}'; {choices(name, ['none', *PEERS])}")
    config.data.mean = config.data.std = None
    config.device = "cpu"
    root = Path(folder or config.data.root or "") / config.data.train_split
    if wanted and not root.is_dir():
        raise ConfigError(f"folder: {root} is no folder with a folder for each class, as {vs} needs; set folder=ROOT")
    threads = available_cores() if isinstance(config.num_workers, str) else config.num_workers
    ours = build_loader(config)
    runs: dict[str, Epoch] = {"effloop": _epochs(lambda number: (len(batch) for batch in ours.epoch(number)))}
    for name in wanted:
        runs[name] = PEERS[name](root, config, threads)
    turns = take_turns({name: _measured(epoch) for name, epoch in runs.items()}, repeats)
    ours.close()
    result = {
        "what": "loader",
        "data": ours.describe(),
        "engine": config.engine.name,
        "decode": config.decode.name,
        "batch_size": config.batch_size,
        "image_size": config.image_size,
        "num_workers": threads,
        "cores": available_cores(),
        "loaders": {name: {key: [turn[key] for turn in found] for key in found[0]} for name, found in turns.items()},
    }
    _show(result, repeats)
    return result


def _epochs(batches: Callable[[int], Iterator[int]]) -> Epoch:
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


def _measured(epoch: Epoch) -> Callable[[], dict[str, float]]:
    def measure() -> dict[str, float]:
        started, cpu = time.perf_counter(), _cpu_seconds()
        images, waited = epoch()
        seconds = time.perf_counter() - started
        return {"per_s": images / seconds, "cores_used": (_cpu_seconds() - cpu) / seconds, "waited": waited / seconds}

    return measure


def _cpu_seconds() -> float:
    """Of this process, its threads, and the children that run."""
    total, ticks = time.process_time(), os.sysconf("SC_CLK_TCK")
    for task in Path("/proc/self/task").iterdir():
        for child in (task / "children").read_text().split():
            try:
                fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it has just ended
            total += (int(fields[11]) + int(fields[12])) / ticks
    return total


def _torchvision(root: Path, config: Config, threads: int) -> Epoch:
    """ImageFolder and DataLoader with torchvision's v2 transforms on uint8."""
    from torchvision.datasets import ImageFolder
    from torchvision.io import decode_image
    from torchvision.transforms import v2

    transform = v2.Compose([v2.RandomResizedCrop(config.image_size, antialias=True), v2.RandomHorizontalFlip()])
    data = ImageFolder(root, transform, loader=lambda path: decode_image(path, mode="RGB"))
    return _data_loader(data, config, threads)


def _pillow(root: Path, config: Config, threads: int) -> Epoch:
    """ImageFolder and DataLoader with Pillow, as in torchvision's reference scripts."""
    from torchvision import transforms
    from torchvision.datasets import ImageFolder

    steps = [transforms.RandomResizedCrop(config.image_size), transforms.RandomHorizontalFlip(), transforms.ToTensor()]
    steps.append(transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]))
    return _data_loader(ImageFolder(root, transforms.Compose(steps)), config, threads)


def _data_loader(data: Any, config: Config, threads: int) -> Epoch:
    batches = torch.utils.data.DataLoader(
        data, config.batch_size, shuffle=True, num_workers=threads, persistent_workers=threads > 0, drop_last=True
    )
    return _epochs(lambda _: (len(targets) for _, targets in batches))


def _dali(root: Path, config: Config, threads: int) -> Epoch:
    """DALI on the CPU: region decoding, resize, flip."""
    dali = optional_package("nvidia.dali", "vs=dali", "effloop[dali]")
    fn = optional_package("nvidia.dali.fn", "vs=dali", "effloop[dali]")
    size = config.image_size
    pipe = dali.Pipeline(batch_size=config.batch_size, num_threads=max(1, threads), device_id=None)
    with pipe:
        encoded, labels = fn.readers.file(file_root=str(root), random_shuffle=True, name="reader")
        images = fn.decoders.image_random_crop(
            encoded, device="cpu", random_area=[0.08, 1.0], random_aspect_ratio=[3 / 4, 4 / 3]
        )
        images = fn.resize(images, size=(size, size))
        pipe.set_outputs(fn.flip(images, horizontal=fn.random.coin_flip()), labels)
    pipe.build()
    batches = pipe.epoch_size("reader") // config.batch_size

    def run() -> int:
        pipe.run()
        return config.batch_size

    return _epochs(lambda _: (run() for _ in range(batches)))


PEERS: dict[str, Callable[[Path, Config, int], Epoch]] = {
    "torchvision": _torchvision,
    "pillow": _pillow,
    "dali": _dali,
}


def _show(result: dict[str, Any], repeats: int) -> None:
    table = Table(title=f"{result['data']}; {repeats} epochs each, in turns; {result['num_workers']} workers")
    for heading in ("loader", "images/s", "per core used", "least", "most", "over it", "cores used", "waiting"):
        table.add_column(heading, justify="left" if heading == "loader" else "right")
    medians = {name: statistics.median(found["per_s"]) for name, found in result["loaders"].items()}
    for name, found in result["loaders"].items():
        cores = statistics.median(found["cores_used"])
        numbers = [f"{value:,.0f}" for value in (medians[name], medians[name] / cores, *_spread(found["per_s"]))]
        ratio = medians["effloop"] / medians[name]
        table.add_row(name, *numbers, f"{ratio:.2f}", f"{cores:.2f}", f"{statistics.median(found['waited']):.0%}")
    Console(width=max(100, Console().width)).print(table)
    print("over it: effloop's median over this one's")


def _spread(values: list[float]) -> tuple[float, float]:
    return min(values), max(values)

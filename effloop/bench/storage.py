"""Storage formats side by side: `python -m effloop bench what=storage`."""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from effloop.bench.interleave import scratch, take_turns
from effloop.build.loader import build_loader
from effloop.build.race import seconds_of
from effloop.config import Config
from effloop.convert.progress import Meter
from effloop.convert.spool import Originals
from effloop.data.random import Permutation
from effloop.data.source import Cache, DataConfig, Source, sources
from effloop.data.source.storage.packed import PackedConfig
from effloop.data.source.storage.writing import SHARD_BYTES, Dataset, writers
from effloop.errors import ConfigError
from effloop.registry import choices
from effloop.system.memory import drop_from_cache, files_in, growth, memory_of, share_in_cache

READ_BY = {"zarr2": "zarr", "n5": "zarr"}
"""Format -> the source that reads it, where that has another name."""

_READS = 10_000  # samples at most that reading takes at a time
_BATCHES = 100  # batches at most that loading takes at a time


@dataclass(frozen=True)
class Made:
    """The dataset in one format.

    Attributes:
        config: loads it.
        files: what is read of it, its index included.
        write_s: how long writing it took.
    """

    config: Config
    files: list[Path]
    write_s: float


def storage(config: Config, repeats: int, formats: str = "all", work: str = "") -> dict[str, Any]:
    """The dataset of `config` in one format after the other, the same bytes in all of them.

    Measured are the training split's size on disk, the time to open it, reading alone (one thread, shuffled;
    every byte copied or compared with its checksum), loading (decoded and augmented, batch by batch) and the
    memory it takes in a fresh process; reading and loading with the page cache as it is, and dropped.

    Raises:
        ConfigError: a format that nothing writes, or a folder that can't be written.
    """
    names = _formats(formats)
    with scratch(work) as folder:
        original = {
            split: sources.build(config.data, split) for split in (config.data.train_split, config.data.val_split)
        }
        made = {name: _make(config, original, name, folder) for name in names}
        train = original[config.data.train_split]
        measured = {name: _on_disk(one) for name, one in made.items()}
        for measure, values in _measure(made, repeats).items():
            for name in names:
                measured[name][measure] = values[name]
    result = {
        "what": "storage",
        "images": len(train),
        "bytes": train.fingerprint()["bytes"],
        "repeats": repeats,
        "batch_size": config.batch_size,
        "image_size": config.image_size,
        "engine": config.engine.name,
        "num_workers": config.num_workers,
        "formats": measured,
    }
    _show(result)
    return result


def _formats(words: str) -> list[str]:
    names = list(writers) if words == "all" else [word for word in words.split(",") if word]
    for name in names:
        if name not in writers:
            raise ConfigError(f"formats: no format '{name}'; {choices(name, ['all', *writers])}")
    if not names:
        raise ConfigError(f"formats: '{words}' names none; have all, {', '.join(writers)}")
    return sorted(names, key=lambda name: name != "folder")  # what the others are compared with stands first


def _make(config: Config, original: dict[str, Source], name: str, folder: Path) -> Made:
    """Write the dataset in a format, and set up what loads it."""
    path, indexes = folder / name, folder / f"{name}.indexes"
    classes = next(iter(original.values())).classes
    with Meter() as meter:
        records = {split: Originals(source, meter, f"{name} {split}") for split, source in original.items()}
        dataset = Dataset(classes, records, {"payload": "original"})
        seconds = seconds_of(lambda: writers[name](path, dataset, SHARD_BYTES))
    opened = replace(config, data=config_for(config.data, READ_BY.get(name, name), path, indexes))
    for below in (path, *path.rglob("*")):
        if below.is_dir():
            os.utime(below, (0, 0))  # a scan isn't kept for long of a folder that changed just now
    sources.build(opened.data, config.data.train_split)  # whatever index is still to be made is made here
    return Made(opened, files_in(path, indexes), seconds)


def config_for(data: DataConfig, name: str, path: Path, indexes: Path) -> DataConfig:
    """`data` for the same dataset at `path`, read by the source `name`: no cache and no first look."""
    of = sources[name].config
    shared = {field.name: getattr(data, field.name) for field in fields(DataConfig)}
    shared |= {"name": name, "root": str(path), "check": 0, "cache": Cache.none}
    kept = {"index_dir": str(indexes)} if "index_dir" in {field.name for field in fields(of)} else {}
    config = of(**shared, **kept)
    assert isinstance(config, DataConfig)
    return config


def _on_disk(made: Made) -> dict[str, Any]:
    """Size in bytes, in what the file system sets aside for them, and number of files; of both splits."""
    states = [path.stat() for path in made.files]
    return {
        "write_s": made.write_s,
        "files": len(states),
        "bytes": sum(state.st_size for state in states),
        "disk_bytes": sum(state.st_blocks * 512 for state in states),
    }


def _measure(made: dict[str, Made], repeats: int) -> dict[str, dict[str, Any]]:
    """Measure -> format -> what was found in each repeat."""
    left: dict[str, float] = dict.fromkeys(made, 0.0)

    def cold(name: str, measure: Callable[[Config], float]) -> float:
        gc.collect()  # a source that is still open keeps its pages
        drop_from_cache(made[name].files)
        left[name] = max(left[name], share_in_cache(made[name].files))
        return measure(made[name].config)

    def turns(measure: Callable[[Config], float]) -> dict[str, list[float]]:
        return take_turns({name: partial(measure, one.config) for name, one in made.items()}, repeats)

    def cold_turns(measure: Callable[[Config], float]) -> dict[str, list[float]]:
        return take_turns({name: partial(cold, name, measure) for name in made}, repeats, warm_up=0)

    return {
        "open_ms": turns(_open_ms),
        "read_per_s": turns(_read_per_s),
        "unchecked_per_s": turns(_unchecked_per_s),
        "load_per_s": turns(_load_per_s),
        "cold_read_per_s": cold_turns(_read_per_s),
        "cold_load_per_s": cold_turns(_load_per_s),
        "cold_share_left": left,
        "memory": {name: in_fresh_process(_memory, one.config) for name, one in made.items()},
    }


def _train_split(config: Config) -> Source:
    return sources.build(config.data, config.data.train_split)


def _open_ms(config: Config) -> float:
    return 1000 * seconds_of(lambda: _train_split(config))


def _read_per_s(config: Config) -> float:
    """Samples a second, by one thread, in shuffled order; those of a source with checksums are compared."""
    source = _train_split(config)
    ids = Permutation.of_epoch(len(source), config.seed, 0)(np.arange(min(_READS, len(source)))).tolist()
    started = time.perf_counter()
    for index in ids:
        bytes(source.read(index))  # of a view a copy, of bytes nothing: either way each was touched once
    return len(ids) / (time.perf_counter() - started)


def _unchecked_per_s(config: Config) -> float:
    """The same without checksums."""
    if isinstance(config.data, PackedConfig):
        config = replace(config, data=replace(config.data, checksums=False))
    return _read_per_s(config)


def _load_per_s(config: Config) -> float:
    """Images a second in batches on the device, from before the first is asked for."""
    with closing(build_loader(config, "train")) as loader:
        count = 0

        def load() -> None:
            nonlocal count
            count = sum(len(batch) for batch in itertools.islice(loader.epoch(0), _BATCHES))

        seconds = seconds_of(load)
    return count / seconds


def _memory(config: Config) -> dict[str, int]:
    """Bytes by which a process grows that opens the split and reads it; see `memory_of`."""
    before = memory_of()
    source = _train_split(config)
    for index in range(min(_READS, len(source))):
        bytes(source.read(index))
    gc.collect()
    return growth(before, memory_of())


def in_fresh_process(call: Callable[..., Any], *args: Any) -> Any:
    """What a call returns in a process of its own that has imported what it needs, and nothing else."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(call, *args).result()


_COLUMNS = {
    "disk_bytes": ("disk\nMB", 1e6),
    "open_ms": ("open\nms", 1),
    "read_per_s": ("read\n/s", 1),
    "unchecked_per_s": ("unchecked\n/s", 1),
    "load_per_s": ("load\n/s", 1),
    "cold_read_per_s": ("cold\nread/s", 1),
    "cold_load_per_s": ("cold\nload/s", 1),
}


def _show(result: dict[str, Any]) -> None:
    formats: dict[str, dict[str, Any]] = result["formats"]
    medians = {
        name: [_median(values[key]) / unit for key, (_, unit) in _COLUMNS.items()] for name, values in formats.items()
    }
    first, base = next(iter(medians.items()))
    size, repeats = f"{result['bytes'] / 1e6:,.1f} MB", result["repeats"]
    print(f"{result['images']:,} images, {size}; medians of {repeats}; loading at image_size={result['image_size']}")
    own = {name: [*row, formats[name]["memory"]["own"] / 1e6] for name, row in medians.items()}
    _table(own, "{:,.1f}", "own\nMB")
    print(f"the same over {first}")
    _table({name: np.divide(row, base).tolist() for name, row in medians.items()}, "{:.2f}")
    left = max(values["cold_share_left"] for values in formats.values())
    print(
        f"cold: pages dropped before each run, {left:.0%} stayed at most; names, inodes and the disk's own cache stay"
    )
    print("own: memory that a fresh process grows by and the kernel can't take back; pages of mapped files it can")


def _median(values: float | Sequence[float]) -> float:
    return statistics.median(values) if isinstance(values, Sequence) else values


def _table(rows: dict[str, list[float]], form: str, *more: str) -> None:
    table = Table(padding=0)
    table.add_column("format")
    for heading in (*(heading for heading, _ in _COLUMNS.values()), *more):
        table.add_column(heading, justify="right")
    for name, values in rows.items():
        table.add_row(name, *(form.format(value) if value < 1000 else f"{value:,.0f}" for value in values))
    Console().print(table)

"""`bench what=storage`: the storage formats compared."""

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

from effloop.assemble.loader import build_loader
from effloop.assemble.model import seconds_of
from effloop.batch import ImageSize
from effloop.config import Config
from effloop.convert.convert import READ_BY
from effloop.convert.records import SplitRecords
from effloop.data.random import Permutation
from effloop.data.source import Cache, DataConfig, Source, sources
from effloop.data.source.splits import open_part
from effloop.data.source.storage.packed import PackedConfig
from effloop.data.source.storage.writing import SHARD_BYTES, Dataset, writers
from effloop.errors import ConfigError
from effloop.measure.turns import in_turns, print_table, scratch_folder
from effloop.registry import choices
from effloop.system.memory import drop_from_cache, files_in, growth, memory_of, share_in_cache
from effloop.system.progress import Meter

_MAX_READS = 10_000  # samples in a measurement of reading
_MAX_BATCHES = 100  # batches in a measurement of loading


@dataclass(frozen=True)
class StoredDataset:
    """The dataset in one format.

    Attributes:
        config: loads it.
        files: that are read, its index included.
        write_s: seconds that writing it took.
    """

    config: Config
    files: list[Path]
    write_s: float


def storage(config: Config, repeats: int, formats: str = "all", work: str = "") -> dict[str, Any]:
    """The dataset of `config` in each format, with the same image bytes in all of them.

    Measured are the training split's size on disk, the time to open it, reading alone (one thread, shuffled;
    every byte copied or compared with its checksum), loading (decoded and augmented, batch by batch) and the
    memory it takes in a fresh process; reading and loading with the page cache as it is, and cold.

    Raises:
        ConfigError: there is no such format, or the folder can't be written.
    """
    names = _parse_formats(formats)
    with scratch_folder(work) as folder:
        original = {split: open_part(config.data, split) for split in ("train", "val")}
        stored = {name: _write_format(config, original, name, folder) for name in names}
        train = original["train"]
        measured = {name: _size_on_disk(dataset) for name, dataset in stored.items()}
        for measure, values in _measure(stored, repeats).items():
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


def _parse_formats(words: str) -> list[str]:
    names = list(writers) if words == "all" else [word for word in words.split(",") if word]
    for name in names:
        if name not in writers:
            raise ConfigError(f"formats: no format '{name}'; {choices(name, ['all', *writers])}")
    if not names:
        raise ConfigError(f"formats: '{words}' names none; have all, {', '.join(writers)}")
    return sorted(names, key=lambda name: name != "folder")  # what the others are compared with stands first


def _write_format(config: Config, original: dict[str, Source], name: str, folder: Path) -> StoredDataset:
    """Write the dataset in a format."""
    path, indexes = folder / name, folder / f"{name}.indexes"
    classes = next(iter(original.values())).classes
    with Meter() as meter:
        records = {split: SplitRecords(source, meter, f"{name} {split}") for split, source in original.items()}
        dataset = Dataset(classes, records, {"payload": "original"})
        seconds = seconds_of(lambda: writers[name](path, dataset, SHARD_BYTES))
    stored = replace(config, data=data_config_for(config.data, READ_BY.get(name, name), path, indexes))
    for below in (path, *path.rglob("*")):
        if below.is_dir():
            os.utime(below, (0, 0))  # the scan of a folder that changed just now isn't kept for long
    sources.build(stored.data, "train")  # builds the index, if the format has none
    return StoredDataset(stored, files_in(path, indexes), seconds)


def data_config_for(data: DataConfig, name: str, path: Path, indexes: Path) -> DataConfig:
    """`data` for the same dataset at `path`, read by the source `name`, without cache and check of samples."""
    config_type = sources[name].config
    shared = {field.name: getattr(data, field.name) for field in fields(DataConfig)}
    shared |= {"name": name, "root": str(path), "check": 0, "cache": Cache.none}
    shared |= {"train_split": "train", "val_split": "val", "val": None, "folds": None, "fold": None, "group": None}
    has_index = "index_dir" in {field.name for field in fields(config_type)}
    config = config_type(**shared, **({"index_dir": str(indexes)} if has_index else {}))
    assert isinstance(config, DataConfig)
    return config


def _size_on_disk(dataset: StoredDataset) -> dict[str, Any]:
    """Bytes, bytes that the file system allocates, and number of files of both splits; seconds to write them."""
    states = [path.stat() for path in dataset.files]
    return {
        "write_s": dataset.write_s,
        "files": len(states),
        "bytes": sum(state.st_size for state in states),
        "disk_bytes": sum(state.st_blocks * 512 for state in states),
    }


def _measure(stored: dict[str, StoredDataset], repeats: int) -> dict[str, dict[str, Any]]:
    """Measure -> format -> its values, one for each repeat."""
    still_cached: dict[str, float] = dict.fromkeys(stored, 0.0)

    def cold(name: str, measure: Callable[[Config], float]) -> float:
        gc.collect()  # a source that is still open keeps its pages
        drop_from_cache(stored[name].files)
        still_cached[name] = max(still_cached[name], share_in_cache(stored[name].files))
        return measure(stored[name].config)

    def warm_rounds(measure: Callable[[Config], float]) -> dict[str, list[float]]:
        return in_turns(
            {name: partial(measure, dataset.config) for name, dataset in stored.items()}, repeats, warm_up=1
        )

    def cold_rounds(measure: Callable[[Config], float]) -> dict[str, list[float]]:
        return in_turns({name: partial(cold, name, measure) for name in stored}, repeats)

    return {
        "open_ms": warm_rounds(_open_ms),
        "read_per_s": warm_rounds(_read_per_s),
        "unchecked_per_s": warm_rounds(_unchecked_per_s),
        "load_per_s": warm_rounds(_load_per_s),
        "cold_read_per_s": cold_rounds(_read_per_s),
        "cold_load_per_s": cold_rounds(_load_per_s),
        "cold_share_left": still_cached,
        "memory": {name: run_in_fresh_process(_memory, dataset.config) for name, dataset in stored.items()},
    }


def _train_split(config: Config) -> Source:
    return sources.build(config.data, "train")


def _open_ms(config: Config) -> float:
    return 1000 * seconds_of(lambda: _train_split(config))


def _read_per_s(config: Config) -> float:
    """Samples per second on one thread, in shuffled order; checksums are verified where there are any."""
    source = _train_split(config)
    ids = Permutation.of_epoch(len(source), config.seed, 0)(np.arange(min(_MAX_READS, len(source)))).tolist()
    started = time.perf_counter()
    for index in ids:
        bytes(source.read(index))  # copies a view, and nothing else: either way each byte was touched once
    return len(ids) / (time.perf_counter() - started)


def _unchecked_per_s(config: Config) -> float:
    """The same without verifying checksums."""
    if isinstance(config.data, PackedConfig):
        config = replace(config, data=replace(config.data, checksums=False))
    return _read_per_s(config)


def _load_per_s(config: Config) -> float:
    """Images per second as batches on the device, the time to the first one included."""
    with closing(build_loader(config, "train")) as loader:
        count = 0

        def load() -> None:
            nonlocal count
            count = sum(len(batch) for batch in itertools.islice(loader.epoch(0), _MAX_BATCHES))

        seconds = seconds_of(load)
    return count / seconds


def _memory(config: Config) -> dict[str, int]:
    """Bytes by which a process grows when it opens and reads the split; see `memory_of`."""
    before = memory_of()
    source = _train_split(config)
    for index in range(min(_MAX_READS, len(source))):
        bytes(source.read(index))
    gc.collect()
    return growth(before, memory_of())


def run_in_fresh_process(call: Callable[..., Any], *args: Any) -> Any:
    """What a call returns in a new process that imports only what the call needs."""
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
    headings = ["format", *(heading for heading, _ in _COLUMNS.values())]
    size, repeats = f"{result['bytes'] / 1e6:,.1f} MB", result["repeats"]
    shown = ImageSize.of(result["image_size"]).word
    print(f"{result['images']:,} images, {size}; medians of {repeats}; loading at image_size={shown}")
    own = {name: [*row, formats[name]["memory"]["own"] / 1e6] for name, row in medians.items()}
    print_table([*headings, "own\nMB"], _cells(own, "{:,.1f}"), left=("format",), padding=0)
    print(f"the same over {first}")
    ratios = {name: np.divide(row, base).tolist() for name, row in medians.items()}
    print_table(headings, _cells(ratios, "{:.2f}"), left=("format",), padding=0)
    left = max(values["cold_share_left"] for values in formats.values())
    print(
        f"cold: pages dropped before each run, {left:.0%} stayed at most; names, inodes and the disk's own cache stay"
    )
    print("own: memory that a fresh process grows by and the kernel can't take back; pages of mapped files it can")


def _median(values: float | Sequence[float]) -> float:
    return statistics.median(values) if isinstance(values, Sequence) else values


def _cells(rows: dict[str, list[float]], form: str) -> list[list[str]]:
    return [
        [name, *(form.format(value) if value < 1000 else f"{value:,.0f}" for value in values)]
        for name, values in rows.items()
    ]

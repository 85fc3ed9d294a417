"""`bench what=scale`: what grows with the number of samples."""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from effloop import config as configs
from effloop.assemble.loader import build_loader
from effloop.bench.interleave import interleave, scratch_folder
from effloop.bench.storage import data_config_for, run_in_fresh_process
from effloop.bench.tables import print_table
from effloop.config import Config
from effloop.convert.records import Originals
from effloop.data.source import sources
from effloop.data.source.storage.columns import ColumnFile, ColumnWriter
from effloop.data.source.storage.index import index_path
from effloop.data.source.storage.writing import SHARD_BYTES, Dataset, writers
from effloop.errors import ConfigError
from effloop.system.memory import drop_from_cache, growth, memory_of
from effloop.system.progress import Meter

_FORMAT, _SPLIT = "tar", "train"
_DIGITS = 9  # of a key
_BLOCK = 1 << 22  # entries computed at a time
_BATCHES = 20
_WORKERS = 2

Column = NDArray[Any]


@dataclass(frozen=True)
class ScaledDataset:
    """A dataset's index, and a config for each engine that loads it."""

    index: Path
    threads: Config
    processes: Config


def scale(config: Config, repeats: int, samples: str = "", work: str = "") -> dict[str, Any]:
    """Time and memory for opening and loading datasets of more and more samples.

    Each is an index of so many entries over the same file with the embedded photographs, so only the
    index grows. Every figure is from a fresh process that has loaded from the smallest before: imports
    never count. The time of the first batch includes what comes before it: opening, the check of up to
    `data.check` samples, and starting 2 workers. `cold` is with the index dropped from the page cache.

    Raises:
        ConfigError: `samples` aren't numbers, or the folder can't be written.
    """
    counts = _parse_counts(samples)
    with scratch_folder(work) as folder:
        datasets = _write_datasets(config, counts, folder)
        found = {mode: _measure(datasets, repeats, mode) for mode in ("warm", "cold", "processes")}
        sizes = {count: one.index.stat().st_size for count, one in datasets.items()}
    base = min(datasets)
    rows = {}
    for count in datasets:
        warm, cold, processes = (found[mode][count] for mode in ("warm", "cold", "processes"))
        rows[count] = {
            "index_bytes": sizes[count],
            **{key: warm[key] for key in ("open_ms", "first_batch_s")},
            **{f"cold_{key}": cold[key] for key in ("open_ms", "first_batch_s")},
            "main": growth(found["warm"][base]["main"], warm["main"]),
            "cold_main": growth(found["cold"][base]["main"], cold["main"]),
            "worker": growth(found["processes"][base]["worker"], processes["worker"]),
        }
    facts = {"repeats": repeats, "check": config.data.check, "batch_size": config.batch_size, "base": base}
    result = {"what": "scale", **facts, "samples": rows}
    _show(result)
    return result


def _parse_counts(samples: str) -> list[int]:
    words = samples.split(",")
    if not all(word.isdigit() and 0 < int(word) < 10**_DIGITS for word in words):
        raise ConfigError(
            f"samples: '{samples}' is not allowed; set whole numbers from 1 to {10**_DIGITS - 1}, with commas between"
        )
    return sorted(map(int, words))


def _write_datasets(config: Config, counts: list[int], folder: Path) -> dict[int, ScaledDataset]:
    """Number of samples -> a dataset of that size; the first has just the embedded photographs."""
    photographs, root = sources.build(configs.compose(["data=embedded"]).data, _SPLIT), folder / "photographs"
    with Meter() as meter:
        records = {_SPLIT: Originals(photographs, meter, _FORMAT)}
        writers[_FORMAT](root, Dataset(photographs.classes, records, {"payload": "original"}), SHARD_BYTES)
    datasets = {}
    for count in (len(photographs), *counts):
        path = folder / f"{count}"
        write_scaled_index(root, path, count)
        data = replace(data_config_for(config.data, _FORMAT, path, folder), check=config.data.check, train_split=_SPLIT)
        engines = (configs.compose([f"engine={name}"]).engine for name in ("threads", "processes"))
        by = [replace(config, data=data, engine=engine, num_workers=_WORKERS) for engine in engines]
        datasets[count] = ScaledDataset(index_path(path, _SPLIT), *by)
    return datasets


def write_scaled_index(small: Path, big: Path, count: int) -> None:
    """Write an index of `count` entries that repeat another's, over the same files.

    Keys are nine digits. The fingerprint's hash isn't computed from the entries, which would take 2 µs each;
    opening doesn't compare it.

    Args:
        small: the folder of a dataset with an index.
        big: the folder to write it to.
        count: number of entries, below 10^9.
    """
    index = ColumnFile(index_path(small, _SPLIT))
    big.mkdir()
    for stamp in index.meta["files"]:
        os.link(small / stamp["name"], big / stamp["name"])
    header = {**index.meta["header"], "fingerprint": {"samples": count, "bytes": 0, "sha256": "0" * 64}}
    with ColumnWriter(index_path(big, _SPLIT), {**index.meta, "header": header}) as writer:
        for name in ("label", "file", "offset", "size", "crc32c"):
            writer.add(name, _column(big, index[name].dtype, count, partial(_repeated, index[name])))
        writer.add("key", _column(big, np.dtype(np.uint8), count, _digits, width=_DIGITS))
        writer.add("key_end", _column(big, np.dtype(np.uint64), count, _key_ends))


def _repeated(values: Column, ids: Column) -> Column:
    taken: Column = values[ids % len(values)]
    return taken


def _key_ends(ids: Column) -> Column:
    return (ids + 1) * _DIGITS


def _column(folder: Path, dtype: np.dtype[Any], count: int, make: Callable[[Column], Column], width: int = 1) -> Column:
    """`make(ids)` for all ids, computed block by block into a temporary file."""
    with tempfile.TemporaryFile(dir=folder) as file:
        column = np.memmap(file, dtype, "w+", shape=count * width)
    for start in range(0, count, _BLOCK):
        stop = min(start + _BLOCK, count)
        column[start * width : stop * width] = make(np.arange(start, stop))
    return column


def _digits(ids: Column) -> Column:
    """(N,) numbers -> (N * 9,) their decimal digits in ASCII, most significant first."""
    digits = np.empty((len(ids), _DIGITS), np.uint8)
    for place in range(_DIGITS - 1, -1, -1):
        ids, digits[:, place] = np.divmod(ids, 10)
    return (digits + ord("0")).reshape(-1)


def _measure(datasets: dict[int, ScaledDataset], repeats: int, mode: str) -> dict[int, dict[str, Any]]:
    """Number of samples -> medians of what was measured."""
    configs_of = {count: one.processes if mode == "processes" else one.threads for count, one in datasets.items()}
    first = configs_of[min(configs_of)]
    runs = {
        str(count): partial(
            run_in_fresh_process, _load, config, first, datasets[count].index if mode == "cold" else None
        )
        for count, config in configs_of.items()
    }
    rounds = interleave(runs, repeats, warm_up=0)
    return {int(count): _medians(results) for count, results in rounds.items()}


def _load(config: Config, first: Config, drop: Path | None) -> dict[str, Any]:
    """Open and load a few batches in this process, which is a fresh one.

    Args:
        config: what is measured.
        first: what is loaded before, so that nothing is imported or set up later.
        drop: a file to drop from the page cache in between.
    """
    with closing(build_loader(first, "train")) as loader:
        for _ in itertools.islice(loader.epoch(0), _BATCHES):
            pass
    del loader
    gc.collect()
    if drop:
        drop_from_cache([drop])
    before, started = memory_of(), time.perf_counter()
    source = sources.build(config.data, _SPLIT)
    opened = time.perf_counter()
    del source
    begun = time.perf_counter()
    with closing(build_loader(config, "train")) as loader:
        batches = loader.epoch(0)
        next(batches)
        first_batch = time.perf_counter() - begun
        for _ in itertools.islice(batches, _BATCHES - 1):
            pass
        workers = [memory_of(child.pid) for child in multiprocessing.active_children() if child.pid]
        return {
            "open_ms": 1000 * (opened - started),
            "first_batch_s": first_batch,
            "main": growth(before, memory_of()),
            "worker": _medians(workers) if workers else {},
        }


def _medians(results: list[dict[str, Any]]) -> dict[str, Any]:
    """The median of each number, also in nested dicts."""
    return {
        key: _medians([result[key] for result in results])
        if isinstance(value, dict)
        else statistics.median(result[key] for result in results)
        for key, value in results[0].items()
    }


def _show(result: dict[str, Any]) -> None:
    headings = ("samples", "index\nMB", "open\nms", "first\ns", "cold\nopen ms", "cold\nfirst s", "cold\nRSS")
    rows = []
    for count, row in result["samples"].items():
        times = (row["open_ms"], row["first_batch_s"], row["cold_open_ms"], row["cold_first_batch_s"])
        sizes = [row["cold_main"]["rss"], *(row["main"][key] for key in ("rss", "own"))]
        sizes += [row["worker"][key] for key in ("private", "own")]
        cells = [f"{count:,}", f"{row['index_bytes'] / 1e6:,.1f}", *(f"{value:,.2f}" for value in times)]
        rows.append([*cells, *(f"{size / 1e6:,.1f}" for size in sizes)])
    print(f"medians of {result['repeats']}; memory in MB above that with {result['base']:,} samples")
    print_table([*headings, "main\nRSS", "main\nown", "worker\npriv.", "worker\nown"], rows, padding=0)
    print(f"first: the first batch; opening and the check of up to {result['check']:,} samples are in it")
    print("own: what the kernel can't take back; RSS and private count pages of the index, which it can")

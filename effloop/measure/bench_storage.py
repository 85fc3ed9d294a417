"""`bench what=storage`: the dataset in each format."""

from __future__ import annotations

import gc
import itertools
import os
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from effloop.assemble.loader import build_loader
from effloop.assemble.model import seconds_of
from effloop.config import Config
from effloop.convert.convert import READ_BY
from effloop.convert.records import SplitRecords
from effloop.data.random import Permutation
from effloop.data.source import Cache, DataConfig, Source, sources
from effloop.data.source.splits import open_part
from effloop.data.source.storage.writing import Dataset, writers
from effloop.measure import loops
from effloop.measure.benchmark import Column, Report, Row
from effloop.measure.turns import chosen, in_turns, scratch_folder
from effloop.system.memory import drop_from_cache, files_in, share_in_cache
from effloop.system.progress import Meter

_MAX_READS = 10_000  # samples in a measurement of reading
_MAX_BATCHES = 100  # batches in a measurement of loading


Stored = tuple[Config, list[Path]]
"""The dataset in one format: what loads it, and the files that are read, its index included."""


def storage(config: Config, repeats: int, *, formats: str = "all", work: str = "") -> Report:
    """The dataset of `config` in each format, with the same image bytes in all of them.

    Measured are the size of both splits on disk, and of the training split the time to open it, reading alone (one
    thread, shuffled; every byte copied or compared with its checksum) and loading (decoded and augmented, batch by
    batch), with the page cache as it is, and cold.
    """
    names = sorted(chosen("formats", formats, writers, "format"), key=lambda name: name != "folder")
    with scratch_folder(work) as folder:
        original = {split: open_part(config.data, split) for split in ("train", "val")}
        stored = {name: _write_format(config, original, name, folder) for name in names}
        found = _in_formats(stored, repeats)
    rows: list[Row] = [{"name": name, **{key: values[name] for key, values in found.items()}} for name in names]
    images, count = original["train"], len(original["train"])
    facts = {"what": "storage", "images": count, "bytes": images.fingerprint()["bytes"], "repeats": repeats}
    left = max(found["cold_share_left"].values())
    return Report(
        facts={**facts, **loops.facts(config)},
        rows=rows,
        columns=[
            *(Column("name", "format"), Column("disk_bytes", "disk\nMB", "{:,.1f}", 1e6)),
            *(Column("open_ms", "open\nms", "{:,.1f}"), Column("read_per_s", "read\n/s")),
            *(Column("load_per_s", "load\n/s"), Column("cold_read_per_s", "cold\nread/s")),
            Column("cold_load_per_s", "cold\nload/s"),
        ],
        title=f"{count:,} images, {facts['bytes'] / 1e6:,.1f} MB; medians of {repeats}; image_size={config.size.word}",
        notes=[f"cold: pages dropped before, {left:.0%} stayed at most; names, inodes and the disk's own cache stay"],
    )


def _write_format(config: Config, original: Mapping[str, Source], name: str, folder: Path) -> Stored:
    path, indexes = folder / name, folder / f"{name}.indexes"
    classes = next(iter(original.values())).classes
    with Meter() as meter:
        records = {split: SplitRecords(source, meter, f"{name} {split}") for split, source in original.items()}
        writers[name](path, Dataset(classes, records, {"payload": "original"}))
    kind = READ_BY.get(name, name)  # what reads it, without cache and check of samples
    own: dict[str, Any] = {field.name: getattr(config.data, field.name) for field in fields(DataConfig)}
    own |= {"name": kind, "root": str(path), "check": 0, "cache": Cache.none, "index_dir": str(indexes)}
    own |= {"train_split": "train", "val_split": "val", **dict.fromkeys(("val", "folds", "fold", "group", "exclude"))}
    data = sources[kind].config(**own)
    assert isinstance(data, DataConfig)
    stored = replace(config, data=data)
    for below in (path, *path.rglob("*")):
        if below.is_dir():
            os.utime(below, (0, 0))  # the scan of a folder that changed just now isn't kept for long
    sources.build(stored.data, "train")  # builds the index, if the format has none
    return stored, files_in(path, indexes)


def _in_formats(stored: Mapping[str, Stored], repeats: int) -> dict[str, dict[str, Any]]:
    """Measure -> format -> its values, one for each repeat."""
    left: dict[str, float] = dict.fromkeys(stored, 0.0)

    def cold(name: str, measure: Callable[[Config], float]) -> float:
        config, files = stored[name]
        gc.collect()  # a source that is still open keeps its pages
        drop_from_cache(files)
        left[name] = max(left[name], share_in_cache(files))
        return measure(config)

    warm: dict[str, Callable[[Config], float]] = {
        "open_ms": lambda config: 1000 * seconds_of(lambda: sources.build(config.data, "train")),
        "read_per_s": _read_per_s,
        "load_per_s": _load_per_s,
    }
    found: dict[str, dict[str, Any]] = {
        key: in_turns({name: partial(measure, config) for name, (config, _) in stored.items()}, repeats, warm_up=1)
        for key, measure in warm.items()
    }
    for key in ("read_per_s", "load_per_s"):
        found[f"cold_{key}"] = in_turns({name: partial(cold, name, warm[key]) for name in stored}, repeats)
    states = {name: [path.stat() for path in files] for name, (_, files) in stored.items()}
    found["files"] = {name: len(each) for name, each in states.items()}
    found["disk_bytes"] = {name: sum(state.st_blocks * 512 for state in each) for name, each in states.items()}
    return found | {"cold_share_left": left}


def _read_per_s(config: Config) -> float:
    """Samples per second on one thread, in shuffled order; checksums are verified where there are any."""
    source = sources.build(config.data, "train")
    ids = Permutation.of_epoch(len(source), config.seed, 0)(np.arange(min(_MAX_READS, len(source)))).tolist()
    started = time.perf_counter()
    for index in ids:
        bytes(source.read(index))  # copies a view, and nothing else: either way each byte was touched once
    return len(ids) / (time.perf_counter() - started)


def _load_per_s(config: Config) -> float:
    """Images per second as batches on the device, the time to the first one included."""
    with closing(build_loader(config, "train")) as loader:
        started = time.perf_counter()
        count = sum(map(len, itertools.islice(loader.epoch(0), _MAX_BATCHES)))
        return count / (time.perf_counter() - started)

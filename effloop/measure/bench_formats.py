"""`bench what=storage` and `inference`: formats of the dataset, and of a trained model, compared."""

from __future__ import annotations

import gc
import itertools
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor, nn

from effloop.assemble.loader import build_loader
from effloop.assemble.model import seconds_of
from effloop.config import Config
from effloop.config.overrides import key_of
from effloop.convert.convert import READ_BY
from effloop.convert.records import SplitRecords
from effloop.data.random import Permutation
from effloop.data.source import Cache, DataConfig, Source, sources
from effloop.data.source.splits import open_part
from effloop.data.source.storage.writing import SHARD_BYTES, Dataset, writers
from effloop.errors import ConfigError, EffLoopError
from effloop.inference.export import ExportOptions, export
from effloop.inference.formats import formats
from effloop.inference.trained import Trained
from effloop.measure import loops
from effloop.measure.benchmark import Column, Report, Row
from effloop.measure.turns import chosen, in_turns, scratch_folder
from effloop.system.hardware import available_cores
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
        writers[name](path, Dataset(classes, records, {"payload": "original"}), SHARD_BYTES)
    kind = READ_BY.get(name, name)  # what reads it, without cache and check of samples
    own: dict[str, Any] = {field.name: getattr(config.data, field.name) for field in fields(DataConfig)}
    own |= {"name": kind, "root": str(path), "check": 0, "cache": Cache.none, "index_dir": str(indexes)}
    own |= {"train_split": "train", "val_split": "val", "val": None, "folds": None, "fold": None, "group": None}
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


# A trained model's size, score and speed in each format.


_VARIANTS: dict[str, dict[str, Any]] = {"": {}, "_int8": {"int8": True}, "_half": {"half": True}}
_EXPORTED = {
    name + suffix: ExportOptions(to=name, **options)
    for name, kind in formats.items()
    if kind.fuses  # else it is pytorch once more
    for suffix, options in _VARIANTS.items()
    if kind.int8 or suffix != "_int8"
}
"""Names of exported formats -> how they are made."""

NAMES = ("pytorch", *_EXPORTED)

_CALLS, _SECONDS = 10, 0.3
"""A measurement takes so many calls at least, and so long at least."""


def _side(name: str, trained: Trained, scratch: Path) -> tuple[Callable[[], nn.Module], Row]:
    """What makes a model, for as many threads as torch has then; and its size and score."""
    score = trained.task.meters[0].name
    if name == "pytorch":
        size = sum(each.nbytes for each in trained.model.state_dict().values())
        return lambda: trained.model, {"bytes": size, "score": trained.evaluate(trained.loader())[0][score]}
    how = _EXPORTED[name]
    path = scratch / f"{name}{formats[how.to].suffix}"
    done = export(trained, ExportOptions(to=how.to, int8=how.int8, half=how.half, out=path))
    opened = partial(formats[how.to](half=how.half).open, path, torch.device("cpu"), trained.network)
    facts = {"bytes": done.size, "score": done.parity.after[score], "agreement": done.parity.agreement}
    return opened, facts


def inference(
    config: Config,
    repeats: int,
    *,
    run: str | Path = "",
    formats: str = "all",
    cores: str | Sequence[int] = "auto",
    batch: int = 32,
    work: str = "",
    overrides: Sequence[str] = (),
) -> Report:
    """Size, score, milliseconds for one image and images/s of batches, for each format and number of threads.

    The formats take turns, and each turn opens the file anew, so that no other's threads wait for work meanwhile.
    Images are those of the validation split, prepared before; a call is from a tensor of images to one of outputs.
    """
    if not run:
        raise ConfigError("bench: what=inference needs the run that is measured; name a run folder or a .ckpt file")
    names, found = chosen("formats", formats, NAMES, "format"), available_cores()
    if formats == "all":
        names = [name for name in names if not name.endswith("_half")]  # float16 is slow on most CPUs
    counts = sorted({1, found} if cores == "auto" else {*map(int, cores)})
    # In float32 on the CPU, whatever the overrides.
    own = [override for override in overrides if key_of(override) not in ("device", "precision", "amp")]
    trained = Trained.open(Path(run), [*own, "device=cpu", "precision=fp32", "amp=null"])
    meter = trained.task.meters[0]
    facts_of: dict[str, Row] = {}
    rows: list[Row] = []
    runs: dict[tuple[str, int], Callable[[], tuple[list[float], float]]] = {}
    with scratch_folder(work) as scratch, loops.process_state_restored(), Console(stderr=True).status("") as status:
        loader = trained.loader()  # a split that is smaller gives its images several times
        images = loader.samples(np.resize(np.arange(len(loader.plan.source)), batch).tolist()).images
        loader.close()
        for name in names:
            status.update(f"exporting: {name}")
            try:
                opened, facts_of[name] = _side(name, trained, scratch)
            except EffLoopError as error:
                rows.append({"name": name, "remark": str(error)})
                continue
            runs |= {(name, count): partial(_measure, opened, count, images) for count in counts}
        status.update("measuring in turns")
        measured = in_turns(runs, repeats, warm_up=1) if runs else {}
    for (name, count), turns in measured.items():
        ms, speeds = [1000 * second for seconds, _ in turns for second in seconds], [speed for _, speed in turns]
        row = {"name": name, "threads": count, "agreement": 1.0, **facts_of[name], "ms": ms, "images_per_s": speeds}
        row["ms_p95"] = float(np.percentile(ms, 95))
        if base := measured.get(("pytorch", count)):
            row["ratio"] = statistics.median(speeds) / statistics.median(speed for _, speed in base)
        rows.append(row)
    rows.sort(key=lambda row: (names.index(row["name"]), row.get("threads", 0)))
    model, sides_px = trained.config.model, trained.config.size
    facts = {"what": "inference", "run": str(run), "model": getattr(model, "arch", model.name), "score": meter.name}
    facts |= {"image_size": trained.config.image_size, "batch": batch, "repeats": repeats, "cores": found}
    return Report(
        facts=facts,
        rows=rows,
        columns=[
            *(Column("name", "format"), Column("bytes", "MB", "{:.2f}", 1e6), Column("score", meter.name, "{:.4f}")),
            *(Column("agreement", "agreement", "{:.2%}"), Column("threads", "threads")),
            *(Column("ms", "ms p50\n1 image", "{:.2f}"), Column("ms_p95", "p95", "{:.2f}")),
            *(Column("images_per_s", f"images/s\nat batch {batch}"), Column("ratio", "over\npytorch", "{:.2f}")),
            Column("remark", "remark"),
        ],
        title=f"{run}: {facts['model']} at {sides_px} pixels; {repeats} turns",
    )


def _measure(opened: Callable[[], nn.Module], threads: int, images: Tensor) -> tuple[list[float], float]:
    """Seconds of each call with one image, and images/s of calls with all."""
    torch.set_num_threads(threads)
    model = opened().eval()
    with torch.inference_mode():
        one, all_of_them = (_calls(model, each) for each in (images[:1], images))
    return one, len(images) / statistics.median(all_of_them)


def _calls(model: nn.Module, images: Tensor) -> list[float]:
    """Seconds of each of many calls, after two that don't count."""
    seconds: list[float] = []
    seconds_of(lambda: model(images), 2)
    while len(seconds) < _CALLS or sum(seconds) < _SECONDS:
        seconds.append(seconds_of(lambda: model(images)))
    return seconds

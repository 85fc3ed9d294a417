"""`bench`: what costs what."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any

from effloop import config as configs
from effloop.cli.command import command
from effloop.errors import ConfigError
from effloop.measure.bench_augment import GRID, augment, write_augment_files
from effloop.measure.bench_inference import inference, write_inference_files
from effloop.measure.bench_loader import loader, train
from effloop.measure.bench_step import ablate, loop, step, write_ablate_files
from effloop.measure.bench_storage import storage


@dataclass(frozen=True)
class Benchmark:
    """What `bench what=NAME` does.

    Attributes:
        call: takes the config, the number of repeats and the options; prints a table, returns what goes to JSON.
        repeats: the default of `repeats=`.
        options: its own options, with their defaults.
        files: writes more of the result beside its JSON file; then there are files even without `out=`.
        overrides: whether `call` also takes the overrides that the config was composed from.
    """

    call: Callable[..., dict[str, Any]]
    repeats: int
    options: Mapping[str, str] = field(default_factory=dict)
    files: Callable[[Mapping[str, Any], Path], None] | None = None
    overrides: bool = False


BENCHMARKS = {
    "loop": Benchmark(loop, 25),
    "step": Benchmark(step, 7, {"knobs": "all", "work": ""}, overrides=True),
    "ablate": Benchmark(ablate, 5, {"knobs": "all", "seeds": "3", "work": ""}, write_ablate_files, overrides=True),
    "loader": Benchmark(loader, 5, {"vs": "torchvision,pillow", "folder": "", "work": "", "dtype": "uint8"}),
    "train": Benchmark(train, 5, {"folder": "", "work": ""}),
    "storage": Benchmark(storage, 5, {"formats": "all", "work": ""}),
    "augment": Benchmark(augment, 3, {"table": "both", "limit": "all", "grid": GRID}, write_augment_files),
    "inference": Benchmark(
        inference,
        5,
        {"run": "", "formats": "all", "cores": "auto", "batch": "32", "work": ""},
        write_inference_files,
        overrides=True,
    ),
}
"""Benchmarks by the names that `what=` takes."""


@dataclass(frozen=True)
class BenchOptions:
    """Options of `bench`.

    Attributes:
        what: Trainer beside a bare loop, each key of the training step, what each thing is worth to the whole
            loop, the loader beside others, whole training beside a bare loop, the storage formats, the libraries that
            augment, or a trained model in the formats of export.
        repeats: how often each side is measured; without it as often as the benchmark needs.
        out: a JSON file for the figures; those of ablate, augment and inference are in outputs/bench without it.
        run: inference: the folder of a run, or a .ckpt file.
        work: step, ablate, loader, train, storage, inference: a folder for temporary files.
        folder: loader, train: the original photographs for the others, ROOT/SPLIT/CLASS/*; without it data.root.
        knobs: step, ablate: names with commas between, or all.
        seeds: ablate: runs of each side for a score, with epochs=N.
        vs: loader: the others' names with commas between, or none.
        dtype: loader: of the images, uint8 or float32, which is normalised.
        formats: storage, inference: names with commas between, or all.
        table: augment: libraries, device or both.
        limit: augment: so many images only, or all.
        grid: augment: BATCHxWORKERS with commas between.
        cores: inference: numbers of threads with commas between, or auto, for 1 and as many as there are cores.
        batch: inference: images in a batch.
    """

    what: Annotated[str, BENCHMARKS] = "loop"
    repeats: Annotated[int, range(1, 1_000_001)] | None = None
    out: Path | None = None
    run: Path | None = field(default=None, metadata={"positional": "RUN"})
    work: str | None = None
    folder: str | None = None
    knobs: str | None = None
    seeds: str | None = None
    vs: str | None = None
    dtype: str | None = None
    formats: str | None = None
    table: str | None = None
    limit: str | None = None
    grid: str | None = None
    cores: str | None = None
    batch: str | None = None

    def __post_init__(self) -> None:
        own = BENCHMARKS[self.what].options
        for each in fields(self)[3:]:
            if getattr(self, each.name) is not None and each.name not in own:
                takers = ", ".join(name for name, benchmark in BENCHMARKS.items() if each.name in benchmark.options)
                raise ConfigError(f"{each.name}: what={self.what} doesn't take it; set what to one of {takers}")


@command("bench", BenchOptions, "what=loader data.root=/data/pets vs=torchvision")
def bench(options: BenchOptions, overrides: list[str]) -> int:
    """Speed on this machine beside baselines, as a table of ratios.

    Raises:
        ConfigError: an option or override can't be taken.
    """
    benchmark = BENCHMARKS[options.what]
    out = _out(options)
    own: dict[str, Any] = {
        key: default if getattr(options, key) is None else getattr(options, key)
        for key, default in benchmark.options.items()
    }
    if benchmark.overrides:
        own["overrides"] = overrides
    result = benchmark.call(configs.compose(overrides), options.repeats or benchmark.repeats, **own)
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)  # there, unless it is the default
        out.write_text(json.dumps(result, indent=2) + "\n")
    if out and benchmark.files:
        benchmark.files(result, out)
        print(f"figures: {out} and what is beside it")
    return 0


def _out(options: BenchOptions) -> Path | None:
    """Where the figures go, if anywhere; that they can is known before minutes of work.

    Raises:
        ConfigError: they can't be written there.
    """
    out, more = options.out, BENCHMARKS[options.what].files is not None
    if out is None:
        if not more:
            return None
        folder = Path("outputs") / "bench" / time.strftime(f"{options.what}-%Y-%m-%d-%H-%M-%S")
        _check_writable(next(path for path in folder.parents if path.exists()) / f"{folder.name}.tmp")
        return folder / f"{options.what}.json"
    if more and out.suffix != ".json":
        raise ConfigError(f"out: {out} is not allowed, as a .csv and a .png are written beside it; set out=FILE.json")
    for path in [out, out.with_suffix(".csv"), out.with_suffix(".png")] if more else [out]:
        _check_writable(path)
    return out


def _check_writable(out: Path) -> None:
    """Refuse, before minutes of work, a file that the figures can't be written to; nothing is left of the trial.

    Raises:
        ConfigError: no such folder, no permission, or a folder itself.
    """
    was_there = os.path.lexists(out)
    try:
        out.open("a").close()
    except OSError as error:
        raise ConfigError(f"out: {out} can't be written: {error.strerror}; set out=FILE.json") from None
    if not was_there:
        out.unlink()

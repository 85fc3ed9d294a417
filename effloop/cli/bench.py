"""`bench`: what costs what."""

from __future__ import annotations

import inspect
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from effloop import config as configs
from effloop.cli.command import command
from effloop.errors import ConfigError
from effloop.measure.bench_augment import augment, write_augment_files
from effloop.measure.bench_inference import inference, write_inference_files
from effloop.measure.bench_loader import loader, train
from effloop.measure.bench_step import ablate, loop, step, write_ablate_files
from effloop.measure.bench_storage import storage


@dataclass(frozen=True)
class Benchmark:
    """What `bench what=NAME` does.

    Attributes:
        call: takes the config, the number of repeats and, by name, options; with `overrides` among these, what the
            config was composed from. Prints a table, and returns what goes to JSON.
        repeats: the default of `repeats=`.
        files: writes more of the result beside its JSON file; then there are files even without `out=`.
    """

    call: Callable[..., dict[str, Any]]
    repeats: int
    files: Callable[[Mapping[str, Any], Path], None] | None = None

    @property
    def options(self) -> list[str]:
        """Names of its own options."""
        parameters = inspect.signature(self.call).parameters.values()
        return [each.name for each in parameters if each.kind is each.KEYWORD_ONLY]


BENCHMARKS = {
    "loop": Benchmark(loop, 25),
    "step": Benchmark(step, 7),
    "ablate": Benchmark(ablate, 5, write_ablate_files),
    "loader": Benchmark(loader, 5),
    "train": Benchmark(train, 5),
    "storage": Benchmark(storage, 5),
    "augment": Benchmark(augment, 3, write_augment_files),
    "inference": Benchmark(inference, 5, write_inference_files),
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
    seeds: Annotated[int, range(1, 1001)] | None = None
    vs: str | None = None
    dtype: Literal["uint8", "float32"] | None = None
    formats: str | None = None
    table: Literal["both", "libraries", "device"] | None = None
    limit: Literal["all"] | Annotated[int, range(1, 1_000_000_001)] | None = None
    grid: str | None = None
    cores: Literal["auto"] | tuple[Annotated[int, range(1, 65_537)], ...] | None = None
    batch: Annotated[int, range(1, 65_537)] | None = None

    def __post_init__(self) -> None:
        for each in fields(self)[3:]:
            if getattr(self, each.name) is not None and each.name not in BENCHMARKS[self.what].options:
                takers = ", ".join(name for name, benchmark in BENCHMARKS.items() if each.name in benchmark.options)
                raise ConfigError(f"{each.name}: what={self.what} doesn't take it; set what to one of {takers}")


@command("bench", BenchOptions, "what=loader data.root=/data/pets vs=torchvision")
def bench(options: BenchOptions, overrides: list[str]) -> int:
    """Speed on this machine beside baselines, as a table of ratios.

    Raises:
        ConfigError: an option or override can't be taken.
    """
    benchmark, out = BENCHMARKS[options.what], _out(options)
    given = {**vars(options), "overrides": overrides}
    own = {name: given[name] for name in benchmark.options if given[name] is not None}
    result = benchmark.call(configs.compose(overrides), options.repeats or benchmark.repeats, **own)
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)  # there, unless it is the default
        out.write_text(json.dumps(result, indent=2) + "\n")
    if out and benchmark.files:
        benchmark.files(result, out)
        print(f"figures: {out} and what is beside it")
    return 0


def _out(options: BenchOptions) -> Path | None:
    """Where the figures go, if anywhere; that they can is known before minutes of work."""
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
    """Refuse a file that can't be written: no such folder, no permission, a folder itself; leaves nothing behind."""
    was_there = os.path.lexists(out)
    try:
        out.open("a").close()
    except OSError as error:
        raise ConfigError(f"out: {out} can't be written: {error.strerror}; set out=FILE.json") from None
    if not was_there:
        out.unlink()

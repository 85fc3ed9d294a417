"""`bench`: what costs what."""

from __future__ import annotations

import importlib
import inspect
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from effloop import config as configs
from effloop.cli.command import command
from effloop.errors import ConfigError


@dataclass(frozen=True)
class Benchmark:
    """What `bench what=NAME` does."""

    name: str  # of a function in a module of `effloop.measure`, which imports torch
    repeats: int  # the default of `repeats=`

    @property
    def call(self) -> Callable[..., Any]:
        """Takes the config, the number of repeats and, by name, options, of which `overrides` are what the config is
        composed from; returns a `Report`.
        """
        module, _, name = self.name.partition(".")
        found: Callable[..., Any] = getattr(importlib.import_module(f"effloop.measure.{module}"), name)
        return found

    @property
    def options(self) -> list[str]:
        """Names of its own options."""
        parameters = inspect.signature(self.call).parameters.values()
        return [each.name for each in parameters if each.kind is each.KEYWORD_ONLY]


BENCHMARKS = {  # benchmarks by the names that `what=` takes
    "step": Benchmark("bench_step.step", 7),
    "ablate": Benchmark("bench_step.ablate", 5),
    "loader": Benchmark("bench_loader.loader", 5),
    "train": Benchmark("bench_loader.train", 5),
    "storage": Benchmark("bench_storage.storage", 5),
    "augment": Benchmark("bench_loader.augment", 3),
    "inference": Benchmark("bench_inference.inference", 5),
}


@dataclass(frozen=True)
class BenchOptions:
    """Options of `bench`.

    Attributes:
        what: each key of the training step, what each thing is worth to the whole loop, the loader beside others,
            whole training beside a bare loop, the storage formats, the libraries that augment, or a trained model in
            the formats of export.
        repeats: how often each side is measured; without it as often as the benchmark needs.
        out: a JSON file for the figures, with a .csv beside it; outputs/bench/WHAT-DATE without it.
        run: inference: the folder of a run, or a .ckpt file.
        work: step, ablate, loader, train, storage, inference: a folder for temporary files.
        folder: loader, train: the original photographs for the others, ROOT/SPLIT/CLASS/*; without it data.root.
        knobs: step, ablate: names with commas between, or all.
        vs: loader: the others' names with commas between, or none.
        formats: storage, inference: names with commas between, or all.
        grid: augment: BATCHxWORKERS with commas between.
        cores: inference: numbers of threads with commas between, or auto, for 1 and as many as there are cores.
        batch: inference: images in a batch.
    """

    what: Annotated[str, BENCHMARKS] = "step"
    repeats: Annotated[int, range(1, 1_000_001)] | None = None
    out: Path | None = None
    run: Path | None = field(default=None, metadata={"positional": "RUN"})
    work: str | None = None
    folder: str | None = None
    knobs: str | None = None
    vs: str | None = None
    formats: str | None = None
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
    """Speed on this machine beside baselines, as a table of ratios."""
    benchmark, out = BENCHMARKS[options.what], _out(options)
    given = {**vars(options), "overrides": overrides}
    own = {name: given[name] for name in benchmark.options if given[name] is not None}
    result = benchmark.call(configs.compose(overrides), options.repeats or benchmark.repeats, **own)
    result.print()
    result.write(out)
    print(f"figures: {out} and what is beside it")
    return 0


def _out(options: BenchOptions) -> Path:
    """Where the figures go; that they can is known before minutes of work."""
    folder = Path("outputs") / "bench" / time.strftime(f"{options.what}-%Y-%m-%d-%H-%M-%S")
    out = options.out or folder / f"{options.what}.json"
    there = next(path for path in (*out.parents, Path()) if path.exists())
    if out.suffix != ".json" or not there.is_dir() or not os.access(there, os.W_OK):
        raise ConfigError(f"out: {out} can't be written; set out=FILE.json, in a folder of yours")
    return out
